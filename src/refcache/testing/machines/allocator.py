"""Suites of an allocator: state, misuse, and the reference's exact choices."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from refcache.oracle import AllocatorDriver
from refcache.oracle.drivers.misuse import AllocatorMisuseDriver
from refcache.oracle.target.config import DEFAULT_PROFILE
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.strategies import (
    allocator_configs,
    index,
    indices,
    strides,
    unsorted,
)


class AllocatorMachine(DriverMachine):
    """Suite ``allocator.state``."""

    d: AllocatorDriver
    make = AllocatorDriver

    @initialize(config=allocator_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.begin(**config, profile=self.profile)

    @rule(pages=st.integers(0, 3))
    def alloc(self, pages: int) -> None:
        self.d.alloc(pages)

    @rule(
        growth=st.lists(st.tuples(index, st.integers(0, 11)), min_size=1, max_size=3).map(tuple),
        unread=st.sampled_from([-1, 0, 1, 2**31, 2**40]),
    )
    def extend(self, growth: Any, unread: int) -> None:
        self.d.extend(growth, unread)

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
    @rule(indices=indices, stride=strides, view=st.booleans())
    def release_together(self, indices: Any, stride: int, view: bool) -> None:
        self.d.release_together(indices, stride, view)

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


class AllocatorExactMachine(AllocatorMachine):
    """Suite ``allocator.exact``."""

    profile = DEFAULT_PROFILE

    @initialize(config=allocator_configs().map(unsorted))
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
