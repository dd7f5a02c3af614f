"""Drives a two-tier tree cache on the simulated machine, with copies left pending for as long as
the program likes.

Everything :class:`~refcache.oracle.tree_driver.TreeDriver` does, and: load-back at admission and on
its own, with quotas; forwards and copies as launches on streams, their bytes checked when they run;
the machine advanced launch by launch (``work``); acknowledgements polled (``poll``), or everything
finished (``settle``). The tracker reports every pair of accesses that nothing orders.

The forward pass writes rows that name their origin (:mod:`refcache.tags`) into the device pool, and
reads the request's whole row through the pool's getters, which wait for the layers of a load.

Here are the steps; :mod:`refcache.oracle.hicache_calls` has the calls that they are made of,
:mod:`refcache.oracle.hicache_checks` the checks after each.
"""

from collections.abc import Sequence

from refcache.oracle.driver import step
from refcache.oracle.hicache_calls import HiCacheCalls

FRESH = 100  # tokens from here on are in no prompt that is drawn


class HiCacheDriver(HiCacheCalls):
    """See the module docstring."""

    needs = frozenset({"allocator", "tree", "inspect", "hicache"})

    @step
    def load_back(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        quota: int | None = None,
        start: bool = True,
    ) -> None:
        """A match, and a load of what is only on the host, without the scheduler's own lock."""
        self._load_back(tokens, extra_key, quota, start)

    @step
    def readmit(self, which: int, token: int, chunk: int | None = None, priority: int = 0) -> None:
        """Admit a request for something that is on the host only, and one token more."""
        known = self._on_host_only(which)
        if known is not None:
            self._admit((*known[0], token), known[1], chunk, priority)

    @step
    def reload(self, which: int, quota: int | None = None, start: bool = True) -> None:
        """``load_back`` of something that is on the host only."""
        known = self._on_host_only(which)
        if known is not None:
            self._load_back(*known, quota, start)

    @step
    def fill(self) -> None:
        """Admit a request with a prompt that nobody had, as long as all the room there is."""
        room = int(self.on_target(self.allocator.available_size)) + self._evictable()
        self._admit((self._names + FRESH,) * room, None, None, 0)

    @step
    def start_loads(self) -> None:
        """``ready_to_load_host_cache``, for a batch that comes later."""
        self._start_loads()

    @step
    def poll(self) -> None:
        """``check_hicache_events``: acknowledge what is done."""
        self._poll()

    @step
    def work(self, choices: Sequence[int]) -> None:
        """The machine runs a few launches: of the streams that could go on, the one named."""
        for choice in choices:
            ready = self.machine.runnable()
            if ready:
                self._on_machine(self.machine.run_next, ready[choice % len(ready)])

    @step
    def settle(self) -> None:
        """Every launch finishes and is acknowledged; every byte on both tiers is compared."""
        self._settle_all()

    @step
    def wind_down(self) -> None:
        """End every request, drop every lock, empty both tiers: nothing may be left over."""
        self._end_everything()
        self._settle_all()
        self.on_target(self.tree.evict_host, self.config.host_size)
        self._evict_everything()
        self.on_target(self.tree.evict_host, self.config.host_size)
        host_free = len(self._host().free)
        self.require(
            host_free == self.config.host_size,
            "H1",
            f"{host_free} of {self.config.host_size} host slots are free after everything was "
            "evicted",
        )
