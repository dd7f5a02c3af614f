"""Suites ``storage.backend``, ``storage.damage``, ``storage.crash``: storage backends."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from refcache.oracle.drivers.backend.crash import CrashDriver
from refcache.oracle.drivers.backend.damage import DamageDriver
from refcache.oracle.drivers.backend.driver import BackendDriver
from refcache.testing.machines.base import DriverMachine

engine = st.sampled_from([0, 0, 0, 1, 2, 3])
key = st.integers(0, 3)
keys = st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True).map(tuple)
few = st.lists(key, min_size=1, max_size=3, unique=True).map(tuple)
page_sizes = st.sampled_from([1, 2, 4])


class BackendMachine(DriverMachine):
    """Every call of the interface, by several engines in one directory."""

    d: BackendDriver
    make = BackendDriver
    steps = 30

    @initialize(page_size=page_sizes)
    def start(self, page_size: int) -> None:
        self.begin(page_size=page_size)

    @rule(engine=engine, key=key)
    def set(self, engine: int, key: int) -> None:
        self.d.set(engine, key)

    @rule(engine=engine, key=key, form=st.sampled_from(["flat", "gaps", "none"]))
    def get(self, engine: int, key: int, form: str) -> None:
        self.d.get(engine, key, form)

    @rule(engine=engine, key=key, form=st.sampled_from(["shorter", "longer"]))
    def get_other_size(self, engine: int, key: int, form: str) -> None:
        self.d.get(engine, key, form)

    @rule(engine=engine, keys=keys)
    def batch_set(self, engine: int, keys: Any) -> None:
        self.d.batch_set(engine, keys)

    @rule(engine=engine, keys=keys)
    def batch_read(self, engine: int, keys: Any) -> None:
        self.d.batch_exists(engine, keys)
        self.d.batch_get(engine, keys)
        self.d.exists(engine, keys[0])

    @rule(engine=engine, stored=keys, keys=keys)
    def v1(self, engine: int, stored: Any, keys: Any) -> None:
        self.d.write_v1(engine, stored)
        self.d.read_v1(engine, keys)

    @rule(engine=engine, stored=keys, states=few, keys=keys)
    def v2(self, engine: int, stored: Any, states: Any, keys: Any) -> None:
        self.d.write_v2(engine, stored, states)
        self.d.read_v2(engine, keys, keys[:1])

    @rule(engine=engine, stored=keys, state=st.integers(0, 3), last=st.integers(0, 2))
    def hits(self, engine: int, stored: Any, state: int, last: int) -> None:
        self.d.write_v2(engine, stored, (stored[state % len(stored)],))
        self.d.hits_v2(engine, stored, last)

    @rule(engine=engine)
    def clear(self, engine: int) -> None:
        self.d.clear(engine)

    @rule()
    def restart(self) -> None:
        self.d.restart()


class DamageMachine(DriverMachine):
    """Damaged files between the calls."""

    d: DamageDriver
    make = DamageDriver
    steps = 20

    @initialize(page_size=page_sizes, keys=keys)
    def start(self, page_size: int, keys: Any) -> None:
        self.begin(page_size=page_size)
        self.d.batch_set(0, keys)

    @rule(engine=engine, key=key)
    def set(self, engine: int, key: int) -> None:
        self.d.set(engine, key)

    @rule(engine=engine, key=key)
    def get(self, engine: int, key: int) -> None:
        self.d.get(engine, key)

    @rule(engine=engine, keys=keys)
    def batch_get(self, engine: int, keys: Any) -> None:
        self.d.batch_get(engine, keys)

    @rule(engine=engine, key=key)
    def stored_again(self, engine: int, key: int) -> None:
        self.d.stored_again(engine, key)

    @rule(file=key, at=st.integers(0, 200), more=st.booleans())
    def cut(self, file: int, at: int, more: bool) -> None:
        (self.d.longer if more else self.d.cut)(file, at)
        self._all()

    @rule(file=key, bit=st.integers(-128, 600))
    def flip(self, file: int, bit: int) -> None:
        self.d.flip(file, bit)
        self._all()

    @rule(file=key, other=key)
    def swap(self, file: int, other: int) -> None:
        self.d.swap(file, other)
        self._all()

    @rule()
    def restart(self) -> None:
        self.d.restart()

    def _all(self) -> None:
        self.d.batch_get(0, tuple(range(6)))


class CrashMachine(DriverMachine):
    """Puts, evictions, clears and dying processes, a crash at each of their points."""

    d: CrashDriver
    make = CrashDriver
    steps = 5

    @initialize(page_size=st.sampled_from([1, 2]), max_pages=st.sampled_from([0, 0, 3]))
    def start(self, page_size: int, max_pages: int) -> None:
        self.begin(page_size=page_size, max_pages=max_pages)

    @rule(keys=few)
    def put(self, keys: Any) -> None:
        self.d.put(keys)

    @rule(keys=few, at=st.integers(0, 14))
    def killed_and_put(self, keys: Any, at: int) -> None:
        self.d.killed(keys, at)
        self.d.put(keys)

    @rule()
    def clear(self) -> None:
        self.d.clear()
