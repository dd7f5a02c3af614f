"""Suites of a tree cache: state, misuse, and the reference's exact choices."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from refcache.oracle import TreeDriver
from refcache.oracle.drivers.misuse import TreeMisuseDriver
from refcache.oracle.target.config import DEFAULT_PROFILE
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.strategies import (
    chunks,
    index,
    indices,
    namespaces,
    priorities,
    prompts,
    token,
    tree_configs,
    unsorted,
)


class TreeMachine(DriverMachine):
    """Suite ``tree.state``."""

    d: TreeDriver
    make = TreeDriver

    @initialize(config=tree_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.begin(**config, profile=self.profile)

    @rule(tokens=prompts, extra_key=namespaces, chunk=chunks, priority=priorities)
    def admit(self, tokens: Any, extra_key: Any, chunk: Any, priority: int) -> None:
        self.d.admit(tokens, extra_key, chunk, priority)

    @rule(tokens=prompts, extra_key=namespaces, chunk=chunks)
    def admit_twins(self, tokens: Any, extra_key: Any, chunk: Any) -> None:
        """Two requests compute the same prompt; what the second caches is there already."""
        for _ in range(2):
            self.d.admit(tokens, extra_key, chunk)
        for which in range(len(self.d.requests)):
            self.d.cache(which)

    @precondition(lambda self: any(not r.prefilled for r in self.d.requests))
    @rule(index=index, chunk=chunks)
    def proceed(self, index: int, chunk: Any) -> None:
        self.d.proceed(index, chunk)

    @precondition(lambda self: self.d.requests)
    @rule(index=index)
    def cache(self, index: int) -> None:
        self.d.cache(index)

    @precondition(lambda self: self.d.requests)
    @rule(index=index, token=token)
    def decode(self, index: int, token: int) -> None:
        self.d.decode(index, token)

    @precondition(lambda self: self.d.requests)
    @rule(index=index, count=st.integers(1, 5))
    def reserve(self, index: int, count: int) -> None:
        self.d.reserve(index, count)

    @precondition(lambda self: self.d.requests)
    @rule(index=index)
    def finish(self, index: int) -> None:
        self.d.finish(index)

    @precondition(lambda self: self.d.requests)
    @rule(index=index)
    def abort(self, index: int) -> None:
        self.d.abort(index)

    @precondition(lambda self: self.d.requests)
    @rule(index=index, chunk=chunks)
    def retract(self, index: int, chunk: Any) -> None:
        self.d.retract(index, chunk)

    @precondition(lambda self: len(self.d.requests) > 1)
    @rule(indices=indices)
    def finish_together(self, indices: Any) -> None:
        self.d.finish_together(indices)

    @rule(tokens=prompts, extra_key=namespaces)
    def match(self, tokens: Any, extra_key: Any) -> None:
        self.d.match(tokens, extra_key)

    @rule(tokens=prompts, extra_key=namespaces, chunked=st.booleans(), priority=priorities)
    def insert(self, tokens: Any, extra_key: Any, chunked: bool, priority: int) -> None:
        self.d.insert(tokens, extra_key, chunked, priority)

    @rule(num_tokens=st.integers(1, 9))
    def evict(self, num_tokens: int) -> None:
        self.d.evict(num_tokens)

    @rule(tokens=prompts, extra_key=namespaces)
    def hold(self, tokens: Any, extra_key: Any) -> None:
        self.d.hold(tokens, extra_key)

    @precondition(lambda self: self.d.holds)
    @rule(index=index)
    def unhold(self, index: int) -> None:
        self.d.unhold(index)

    @rule(tokens=prompts, extra_key=namespaces, pages=st.integers(1, 4), grow=st.booleans())
    def part_from_held(self, tokens: Any, extra_key: Any, pages: int, grow: bool) -> None:
        """Two hold a prompt, another parts from it after a few pages, then one of the two goes."""
        self.d.insert(tokens, extra_key)
        for _ in range(2):
            self.d.hold(tokens, extra_key)
        shared = tokens[: pages * self.d.config.page_size + self.d.config.is_eagle]
        if grow:
            self.d.insert((*shared, 3, 3, 3, 3), extra_key)
        else:
            self.d.match(shared, extra_key)
        self.d.unhold(len(self.d.holds) - 1)

    @rule(tokens=prompts, extra_key=namespaces)
    def lock_and_unlock(self, tokens: Any, extra_key: Any) -> None:
        self.d.lock_and_unlock(tokens, extra_key)

    @precondition(lambda self: not self.d.requests and not self.d.holds)
    @rule()
    def reset(self) -> None:
        self.d.reset()


class TreeExactMachine(TreeMachine):
    """Suite ``tree.exact``."""

    profile = DEFAULT_PROFILE

    @initialize(config=tree_configs().map(unsorted))
    def start(self, config: dict[str, Any]) -> None:
        super().start(config)


class TreeMisuseMachine(TreeMachine):
    """Suite ``tree.misuse``."""

    d: TreeMisuseDriver
    make = TreeMisuseDriver

    @rule(tokens=prompts, extra_key=namespaces)
    def unlock_unlocked(self, tokens: Any, extra_key: Any) -> None:
        self.d.unlock_unlocked(tokens, extra_key)

    @rule(tokens=prompts)
    def lock_stranger(self, tokens: Any) -> None:
        self.d.lock_stranger(tokens)

    @rule(tokens=prompts, extra_key=namespaces)
    def lock_evicted(self, tokens: Any, extra_key: Any) -> None:
        self.d.lock_evicted(tokens, extra_key)

    @rule(tokens=prompts, extra_key=namespaces)
    def insert_unfit(self, tokens: Any, extra_key: Any) -> None:
        self.d.insert_unfit(tokens, extra_key)

    @precondition(lambda self: self.d.requests)
    @rule(index=index, beyond=st.integers(1, 3))
    def write_outside_row(self, index: int, beyond: int) -> None:
        self.d.write_outside_row(index, beyond)
