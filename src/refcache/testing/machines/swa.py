"""Suites of a tree over a full and a sliding-window pool.

What bugs need is a path whose upper windows are gone, and somebody who computes that prefix again;
``dig`` makes one.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from refcache.oracle import SWADriver
from refcache.oracle.target.config import DEFAULT_PROFILE
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.strategies import (
    index,
    namespaces,
    prompts,
    swa_configs,
    unsorted,
)
from refcache.testing.machines.tree import TreeMachine

much = st.sampled_from([1, 2, 4, 6, 20])
evicted = st.sampled_from([0, 0, 0, 2, 4, 6, 99])


class SWAMachine(DriverMachine):
    """Suite ``swa.state``: what a plain tree does, and what windows do."""

    d: SWADriver
    make = SWADriver

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

    @initialize(config=swa_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.begin(**config, profile=self.profile)

    @rule(tokens=prompts, extra_key=namespaces, evicted=evicted)
    def insert(self, tokens: Any, extra_key: Any, evicted: int) -> None:
        self.d.insert(tokens, extra_key, False, 0, evicted)

    @rule(tokens=prompts, extra_key=namespaces, cut=st.integers(1, 12), windows=much, e=evicted)
    def dig(self, tokens: Any, extra_key: Any, cut: int, windows: int, e: int) -> None:
        """A path in two nodes; its upper windows go; the upper part is computed again."""
        self.d.insert(tokens[:cut], extra_key)
        self.d.insert(tokens, extra_key)
        self.d.evict_windows(windows)
        self.d.insert(tokens[: cut + 1], extra_key, False, 0, e)

    @rule(tokens=prompts, extra_key=namespaces, cut=st.integers(1, 12))
    def refill(self, tokens: Any, extra_key: Any, cut: int) -> None:
        """Somebody holds a path in two nodes, whose upper windows go; it is computed again."""
        self.d.insert(tokens[:cut], extra_key)
        self.d.insert(tokens, extra_key)
        self.d.hold(tokens, extra_key)
        self.d.evict_windows(20)
        self.d.insert(tokens, extra_key)

    @rule(windows=much, num_tokens=st.sampled_from([0, 0, 0, 1, 4]))
    def evict_windows(self, windows: int, num_tokens: int) -> None:
        self.d.evict_windows(windows, num_tokens)

    @precondition(lambda self: self.d.requests)
    @rule(index=index, tokens=st.lists(st.integers(0, 2), max_size=6), whole=st.booleans())
    def move_on(self, index: int, tokens: list[int], whole: bool) -> None:
        """A request decodes so far that its window moves."""
        for token in tokens:
            self.d.decode(index, token)
        self.d.evict_window(index, whole)

    @precondition(lambda self: self.d.requests)
    @rule(index=index, tokens=st.lists(st.integers(0, 2), min_size=3, max_size=6))
    def move_out(self, index: int, tokens: list[int]) -> None:
        """A request decodes, its window moves behind all that it can cache, and it ends."""
        self.move_on(index, tokens, True)
        self.d.finish(index)


class SWAExactMachine(SWAMachine):
    """Suite ``swa.exact``."""

    profile = DEFAULT_PROFILE

    @initialize(config=swa_configs().map(unsorted))
    def start(self, config: dict[str, Any]) -> None:
        super().start(config)


class SWAMisuseMachine(SWAMachine):
    """Suite ``swa.misuse``."""

    @rule(tokens=prompts, extra_key=namespaces)
    def unlock_unlocked(self, tokens: Any, extra_key: Any) -> None:
        self.d.misuse("unlock_unlocked", (tokens, extra_key))

    @rule(tokens=prompts, extra_key=namespaces, index=index)
    def unlock_elsewhere(self, tokens: Any, extra_key: Any, index: int) -> None:
        self.d.insert(tokens, extra_key)
        self.d.hold(tokens, extra_key)
        self.d.misuse("unlock_elsewhere", (index,))

    @rule(tokens=prompts, extra_key=namespaces)
    def lock_without_window(self, tokens: Any, extra_key: Any) -> None:
        """Of a path whose end goes on below."""
        self.d.insert(tokens, extra_key)
        self.d.insert((*tokens, 1, 1), extra_key)
        self.d.misuse("lock_without_window", (tokens, extra_key))

    @rule(tokens=prompts, extra_key=namespaces)
    def insert_unfit(self, tokens: Any, extra_key: Any) -> None:
        self.d.misuse("insert_unfit", (tokens, extra_key))

    @rule(index=index)
    def free_window_outside(self, index: int) -> None:
        self.d.misuse("free_window_outside", (index,))
