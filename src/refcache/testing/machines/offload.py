"""Suite ``offload.state``: an offloading manager with jobs of both ways open side by side."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from refcache.oracle.drivers.offload.driver import OffloadDriver
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.strategies import index, offload_configs

keys = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True).map(tuple)
"""A few more keys than there are slots; a call names one to four."""
first = st.sampled_from([0, 0, 0, 1, 2])
tokens = st.integers(0, 3)
"""Of the last block, where blocks may be shorter than a whole one."""


class OffloadMachine(DriverMachine):
    """See the module docstring."""

    d: OffloadDriver
    make = OffloadDriver

    @initialize(config=offload_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.begin(**config)

    @rule(keys=keys)
    def lookup(self, keys: Any) -> None:
        self.d.lookup(keys)

    @rule(keys=keys, tokens=tokens)
    def store(self, keys: Any, tokens: int) -> None:
        self.d.store(keys, tokens)

    @rule(keys=keys, ok=st.sampled_from([True, True, True, False]), tokens=tokens)
    def store_and_end(self, keys: Any, ok: bool, tokens: int) -> None:
        self.store_at_once(keys, tokens, ok)

    def store_at_once(self, keys: Any, tokens: int = 0, ok: bool = True) -> None:
        """A store that is over before anything else happens."""
        before = len(self.d.bench.stores)
        self.d.store(keys, tokens)
        if len(self.d.bench.stores) > before:
            self.d.stored(before, ok)

    @precondition(lambda self: self.d.bench.stores)
    @rule(job=index, ok=st.sampled_from([True, True, False]), first=first)
    def stored(self, job: int, ok: bool, first: int) -> None:
        self.d.stored(job, ok, first)

    @precondition(lambda self: self.d.bench.stored)
    @rule(keys=keys)
    def load(self, keys: Any) -> None:
        self.d.load(keys)

    @rule(keys=keys, touch=st.booleans())
    def used_when_room_is_needed(self, keys: Any, touch: bool) -> None:
        """Of some blocks the first is used again; then all but one must go."""
        self.store_at_once(keys)
        if touch:
            self.d.touch(keys[:1])
        else:
            before = len(self.d.bench.loads)
            self.d.load(keys[:1])
            self.d.loaded(before)
        self.d.fill(1)

    @rule(keys=keys, first=first, tokens=tokens)
    def read_by_two(self, keys: Any, first: int, tokens: int) -> None:
        """Two loads of the same blocks, of which one is over when room is needed."""
        self.store_at_once(keys, tokens)
        before = len(self.d.bench.loads)
        self.d.load(keys)
        self.d.load(keys[::-1])
        if len(self.d.bench.loads) > before:
            self.d.loaded(before, first)
            self.d.fill()

    @precondition(lambda self: self.d.bench.loads)
    @rule(job=index, first=first)
    def loaded(self, job: int, first: int) -> None:
        self.d.loaded(job, first)

    @rule(keys=keys)
    def touch(self, keys: Any) -> None:
        self.d.touch(keys)

    @rule()
    def fill(self) -> None:
        self.d.fill()

    @rule()
    def reset(self) -> None:
        self.d.reset()
