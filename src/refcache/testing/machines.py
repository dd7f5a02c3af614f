"""Hypothesis state machines: thin rules over the oracle's drivers.

A rule draws arguments and makes one call on a driver; the driver checks. Each machine class is made
for one target by :func:`machine_for`.
"""

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from refcache.oracle import AllocatorDriver, Driver, LoopDriver, Target, TreeDriver
from refcache.oracle.driver import Call
from refcache.oracle.exact import DEFAULT_PROFILE
from refcache.oracle.misuse import AllocatorMisuseDriver, TreeMisuseDriver
from refcache.testing.strategies import (
    allocator_configs,
    chunks,
    index,
    indices,
    loop_configs,
    namespaces,
    priorities,
    prompts,
    strides,
    token,
    tree_configs,
)


class Tally:
    """Counts what a run of a machine did, and keeps the driver that failed last."""

    def __init__(self) -> None:
        self.cases = 0
        self.steps = 0
        self.failed: Driver | None = None


class DriverMachine(RuleBasedStateMachine):
    """Base: owns a driver, winds it down at the end of a case, tells the tally."""

    target: ClassVar[Target]
    tally: ClassVar[Tally]
    driver: Driver | None = None
    make: type[Any]
    opening: ClassVar[tuple[Call, ...]] = ()
    """A fixed program, with the default configuration, run once before the drawn ones."""
    steps: ClassVar[int] = 50
    """Of a case, at most."""

    def start_driver(self, driver: Driver) -> None:
        self.driver = driver
        self.tally.cases += 1

    def teardown(self) -> None:
        driver = self.driver
        if driver is None:
            return
        try:
            if driver.found is None:
                driver.wind_down()
        finally:
            self.tally.steps += driver.calls
            if driver.found is not None:
                self.tally.failed = driver


class AllocatorMachine(DriverMachine):
    """Suite ``allocator.state``."""

    d: AllocatorDriver
    make: type[AllocatorDriver] = AllocatorDriver
    profile: str | None = None

    @initialize(config=allocator_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.d = self.make(self.target, **config, profile=self.profile)
        self.start_driver(self.d)

    @rule(pages=st.integers(0, 3))
    def alloc(self, pages: int) -> None:
        self.d.alloc(pages)

    @rule(growth=st.lists(st.tuples(index, st.integers(0, 11)), min_size=1, max_size=3).map(tuple))
    def extend(self, growth: Any) -> None:
        self.d.extend(growth)

    @precondition(lambda self: self.d.sequences)
    @rule(indices=indices)
    def decode(self, indices: Any) -> None:
        self.d.decode(indices)

    @rule(pages=st.integers(1, 2), count=st.integers(2, 3), stride=strides)
    def open_side_by_side(self, pages: int, count: int, stride: int) -> None:
        """Sequences of whole pages, then one token more for each: all open a page in one batch.
        They go together again."""
        before = len(self.d.sequences)
        for _ in range(count):
            self.d.alloc(pages)
        made = tuple(range(before, len(self.d.sequences)))
        self.d.decode(made)
        self.d.release_together(made, stride)

    @precondition(lambda self: self.d.sequences)
    @rule(index=index, keep=st.integers(0, 9), sparse=st.booleans())
    def release(self, index: int, keep: int, sparse: bool) -> None:
        self.d.release(index, keep, sparse)

    @precondition(lambda self: self.d.sequences)
    @rule(indices=indices, stride=strides)
    def release_together(self, indices: Any, stride: int) -> None:
        self.d.release_together(indices, stride)

    @precondition(lambda self: self.d.queued is None)
    @rule()
    def begin_group(self) -> None:
        self.d.begin_group()

    @precondition(lambda self: self.d.queued is not None)
    @rule()
    def end_group(self) -> None:
        self.d.end_group()

    @rule(pages=st.integers(0, 3))
    def draft(self, pages: int) -> None:
        self.d.draft(pages)

    @rule()
    def sort(self) -> None:
        self.d.sort()

    @rule()
    def drain(self) -> None:
        self.d.drain()

    @rule()
    def clear(self) -> None:
        self.d.clear()


class TreeMachine(DriverMachine):
    """Suite ``tree.state``."""

    d: TreeDriver
    make: type[TreeDriver] = TreeDriver
    profile: str | None = None

    @initialize(config=tree_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.d = self.make(self.target, **config, profile=self.profile)
        self.start_driver(self.d)

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


def unsorted(config: dict[str, Any]) -> dict[str, Any]:
    """Without ``need_sort``: SGLang merges its lists by an estimate, refcache when one is short."""
    return {**config, "need_sort": False}


class AllocatorExactMachine(AllocatorMachine):
    """Suite ``allocator.exact``."""

    profile = DEFAULT_PROFILE

    @initialize(config=allocator_configs().map(unsorted))
    def start(self, config: dict[str, Any]) -> None:
        super().start(config)


class TreeExactMachine(TreeMachine):
    """Suite ``tree.exact``."""

    profile = DEFAULT_PROFILE

    @initialize(config=tree_configs().map(unsorted))
    def start(self, config: dict[str, Any]) -> None:
        super().start(config)


class AllocatorMisuseMachine(AllocatorMachine):
    """Suite ``allocator.misuse``."""

    d: AllocatorMisuseDriver
    make = AllocatorMisuseDriver

    @rule(index=index)
    def free_free_page(self, index: int) -> None:
        self.d.free_free_page(index)

    @rule(index=index)
    def free_with_free_page(self, index: int) -> None:
        self.d.free_with_free_page(index)

    @rule()
    def free_dummy_page(self) -> None:
        self.d.free_dummy_page()

    @rule(beyond=st.integers(0, 9))
    def free_outside(self, beyond: int) -> None:
        self.d.free_outside(beyond)

    @rule()
    def free_floats(self) -> None:
        self.d.free_floats()

    @rule(pages=st.integers(0, 3))
    def alloc_odd(self, pages: int) -> None:
        self.d.alloc_odd(pages)

    @rule(index=index)
    def shrink(self, index: int) -> None:
        self.d.shrink(index)

    @rule(index=index, more=st.integers(0, 5))
    def wrong_sum(self, index: int, more: int) -> None:
        self.d.wrong_sum(index, more)

    @rule(index=index)
    def wrong_last_loc(self, index: int) -> None:
        self.d.wrong_last_loc(index)

    @rule(index=index)
    def last_loc_outside(self, index: int) -> None:
        self.d.last_loc_outside(index)


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


class LoopMachine(DriverMachine):
    """Suite ``loop.state``."""

    d: LoopDriver

    @initialize(config=loop_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.d = LoopDriver(self.target, **config)
        self.start_driver(self.d)

    @rule(
        tokens=prompts,
        max_new_tokens=st.integers(1, 6),
        extra_key=namespaces,
        priority=priorities,
    )
    def submit(self, tokens: Any, max_new_tokens: int, extra_key: Any, priority: int) -> None:
        self.d.submit(tokens, max_new_tokens, extra_key, priority)

    @rule(batch=st.lists(prompts, min_size=2, max_size=3), max_new_tokens=st.integers(1, 6))
    def submit_together(self, batch: Any, max_new_tokens: int) -> None:
        for tokens in batch:
            self.d.submit(tokens, max_new_tokens)

    @rule(steps=st.integers(1, 4))
    def run(self, steps: int) -> None:
        self.d.run(steps)

    @precondition(lambda self: self.d.scheduler.live_reqs)
    @rule(index=index)
    def abort(self, index: int) -> None:
        self.d.abort(index)

    @precondition(lambda self: self.d.running)
    @rule()
    def retract(self) -> None:
        self.d.retract()

    @rule(num_tokens=st.integers(1, 9))
    def evict(self, num_tokens: int) -> None:
        self.d.evict(num_tokens)

    @precondition(lambda self: self.d.scheduler.is_idle())
    @rule()
    def flush(self) -> None:
        self.d.flush()


def machine_for(
    machine: type[DriverMachine], target: Target, tally: Tally | None = None, **attributes: Any
) -> type[DriverMachine]:
    """The machine class on one target; its runs are counted in ``tally``."""
    attributes |= {"target": target, "tally": tally or Tally()}
    return type(machine.__name__, (machine,), attributes)
