"""Suites of a tree of tokens and recurrent states.

A state that a match may copy, an inner node that has lost its state, and a full pool of states are
what bugs need, so some rules make several calls: ``grow`` leaves states along one path,
``thin`` takes those near the root away and comes back.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from refcache.oracle import MambaDriver
from refcache.oracle.target.config import DEFAULT_PROFILE
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.strategies import (
    index,
    mamba_configs,
    namespaces,
    prompts,
    unsorted,
)
from refcache.testing.machines.tree import TreeMachine

counts = st.sampled_from([1, 1, 1, 2, 9])
kept = st.sampled_from([0, 0, 2, 4, 99])


class MambaMachine(DriverMachine):
    """Suite ``mamba.state``: what a plain tree does, and what states do."""

    d: MambaDriver
    make = MambaDriver

    admit = TreeMachine.admit
    admit_twins = TreeMachine.admit_twins
    proceed = TreeMachine.proceed
    cache = TreeMachine.cache
    decode = TreeMachine.decode
    reserve = TreeMachine.reserve
    finish = TreeMachine.finish
    abort = TreeMachine.abort
    retract = TreeMachine.retract
    finish_together = TreeMachine.finish_together
    match = TreeMachine.match
    evict = TreeMachine.evict
    hold = TreeMachine.hold
    unhold = TreeMachine.unhold
    part_from_held = TreeMachine.part_from_held
    lock_and_unlock = TreeMachine.lock_and_unlock
    reset = TreeMachine.reset

    @initialize(config=mamba_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.begin(**config, profile=self.profile)

    @rule(tokens=prompts, extra_key=namespaces, kept=kept)
    def insert(self, tokens: Any, extra_key: Any, kept: int) -> None:
        self.d.insert(tokens, extra_key, False, 0, kept)

    @rule(tokens=prompts, extra_key=namespaces, cuts=st.lists(st.integers(2, 12), max_size=3))
    def grow(self, tokens: Any, extra_key: Any, cuts: list[int]) -> None:
        """States along one path, the longest prefix first or last, as ``cuts`` come."""
        for cut in (*cuts, len(tokens)):
            self.d.insert(tokens[:cut], extra_key)

    @rule(tokens=prompts, extra_key=namespaces, cut=st.integers(1, 12), count=counts)
    def thin(self, tokens: Any, extra_key: Any, cut: int, count: int) -> None:
        """The states of a path are taken, those near the root first; another parts from it."""
        self.d.insert(tokens[:cut], extra_key)
        self.d.insert(tokens, extra_key)
        self.d.evict_states(count)
        self.d.admit((*tokens[:cut], 3, 3), extra_key)

    @rule(count=counts, num_tokens=st.sampled_from([0, 0, 0, 1, 4]))
    def evict_states(self, count: int, num_tokens: int) -> None:
        self.d.evict_states(count, num_tokens)

    @rule(tokens=prompts, extra_key=namespaces)
    def leave(self, tokens: Any, extra_key: Any) -> None:
        self.d.leave(tokens, extra_key)

    @rule(tokens=prompts, extra_key=namespaces, end=st.integers(1, 15))
    def rematch(self, tokens: Any, extra_key: Any, end: int) -> None:
        self.d.rematch(tokens, extra_key, end)

    @precondition(lambda self: self.d.requests)
    @rule(index=index, tokens=st.lists(st.integers(0, 2), min_size=2, max_size=6))
    def decode_some(self, index: int, tokens: list[int]) -> None:
        """Enough tokens to pass a boundary of chunks."""
        for token in tokens:
            self.d.decode(index, token)


class MambaExactMachine(MambaMachine):
    """Suite ``mamba.exact``."""

    profile = DEFAULT_PROFILE

    @initialize(config=mamba_configs().map(unsorted))
    def start(self, config: dict[str, Any]) -> None:
        super().start(config)


class MambaMisuseMachine(MambaMachine):
    """Suite ``mamba.misuse``."""

    @rule(tokens=prompts, extra_key=namespaces)
    def unlock_unlocked(self, tokens: Any, extra_key: Any) -> None:
        self.d.misuse("unlock_unlocked", (tokens, extra_key))

    @rule(tokens=prompts)
    def lock_stranger(self, tokens: Any) -> None:
        self.d.misuse("lock_stranger", (tokens,))

    @rule(tokens=prompts, extra_key=namespaces)
    def insert_unfit(self, tokens: Any, extra_key: Any) -> None:
        self.d.misuse("insert_unfit", (tokens, extra_key))

    @rule(index=index)
    def free_free_state(self, index: int) -> None:
        self.d.misuse("free_free_state", (index,))

    @rule(tokens=prompts, extra_key=namespaces)
    def copy_without_room(self, tokens: Any, extra_key: Any) -> None:
        """With every state in use but one."""
        self.d.insert(tokens, extra_key)
        self.d.hold(tokens, extra_key)
        self.d.admit((*tokens, 1), extra_key)
        self.d.misuse("copy_without_room", (tokens, extra_key))

    @rule(tokens=prompts)
    def row_without_room(self, tokens: Any) -> None:
        self.d.misuse("row_without_room", (tokens,))
