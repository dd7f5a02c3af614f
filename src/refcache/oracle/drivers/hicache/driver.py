"""Drives a two-tier tree cache on the simulated machine, with copies left pending for as long as
the program likes.

Everything :class:`~refcache.oracle.drivers.tree.driver.TreeDriver` does, and: load-back at
admission and on its own, with quotas; forwards and copies as launches on streams, their bytes
checked when they run; the machine advanced launch by launch (``work``); acknowledgements polled
(``poll``), or everything finished (``settle``). The tracker reports every pair of accesses that
nothing orders.

The forward pass writes rows that name their origin (:mod:`refcache.tags`) into the device pool, and
reads the request's whole row through the pool's getters, which wait for the layers of a load.

Here are the steps; the calls and checks are the bench's
(:mod:`refcache.oracle.drivers.hicache.bench`).
"""

from collections.abc import Sequence

import torch

from refcache.oracle.drivers.hicache.bench import HiCacheBench
from refcache.oracle.drivers.hicache.faulty_loop import FaultyLoop
from refcache.oracle.drivers.tree.driver import TreeDriver
from refcache.oracle.program.driver import step
from refcache.oracle.target.config import HiCacheConfig
from refcache.runtime import SimulatedRuntime

FRESH = 100  # tokens from here on are in no prompt that is drawn


class HiCacheDriver(TreeDriver):
    """See the module docstring."""

    needs = frozenset({"allocator", "tree", "inspect", "hicache"})
    Config = HiCacheConfig
    config: HiCacheConfig
    bench_type = HiCacheBench
    bench: HiCacheBench

    @property
    def machine(self) -> SimulatedRuntime:
        """Where forwards and copies run."""
        return self.bench.machine

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
        known = self.bench.on_host_only(which)
        if known is not None:
            self.serving.admit((*known[0], token), known[1], chunk, priority)

    @step
    def reload(self, which: int, quota: int | None = None, start: bool = True) -> None:
        """``load_back`` of something that is on the host only."""
        known = self.bench.on_host_only(which)
        if known is not None:
            self._load_back(*known, quota, start)

    @step
    def fill(self) -> None:
        """Admit a request with a prompt that nobody had, as long as all the room there is."""
        room = self.bench.available() + self.bench.evictable()
        self.serving.admit((self.serving.admitted + FRESH,) * room, None, None, 0)

    @step
    def start_loads(self) -> None:
        """``ready_to_load_host_cache``, for a batch that comes later."""
        self.bench.forwards.start_loads()

    @step
    def poll(self) -> None:
        """``check_hicache_events``: acknowledge what is done."""
        self.bench.poll()

    @step
    def copy_by_hand(self, pages: int) -> None:
        """Both ways between slots of one's own, by the calls of the controller below the tree."""
        bench, call = self.bench, self.trial.call
        controller = getattr(bench.tree, "cache_controller", None)
        if controller is None:
            return
        bench.settle()
        count = pages * self.config.page_size
        slots = bench.alloc(count, "the caller")
        if slots is None:
            return
        host = call(controller.write, torch.tensor(slots))
        if host is not None:
            self.machine.synchronize()
            controller.ack_write_queue.pop()
            bench.free(slots)
            loaded = call(controller.load, host)
            slots = loaded.tolist()
            bench.ledger.take(slots, "the caller")
            call(controller.start_loading)
            self.machine.synchronize()
            controller.ack_load_queue.pop()
            call(controller.evict_host, host)
        own = call(bench.host_pool.alloc, count)
        if own is not None:
            call(bench.host_pool.free, own)
        bench.free(slots)

    @step
    def serve(self, prompts: Sequence[Sequence[int]], overlap: bool = False) -> None:
        """The serving loop over components of its own, with inner steps of iterations raising."""
        loop = FaultyLoop(self.trial, self.config, overlap)
        loop.serve(prompts, max(1, self.config.fault))
        if self.bench.faults is not None:
            self.bench.faults.met += len(loop.pairs)
            self.bench.faults.pairs.update(loop.pairs)

    @step
    def work(self, choices: Sequence[int]) -> None:
        """The machine runs a few launches: of the streams that could go on, the one named."""
        for choice in choices:
            ready = self.machine.runnable()
            if ready:
                self.trial.call(self.machine.run_next, ready[choice % len(ready)])

    @step
    def settle(self) -> None:
        """Every launch finishes and is acknowledged; every byte on both tiers is compared."""
        self.bench.settle()

    @step
    def reset(self) -> None:
        """Forget everything; where misuse is not refused, what runs is finished first."""
        if not self.requests and not self.holds:
            if not self.trial.has("refuses_misuse"):  # it may neither refuse nor wait
                self.bench.settle()
            self.bench.reset()

    @step
    def wind_down(self) -> None:
        """End every request, drop every lock, empty both tiers: nothing may be left over."""
        self.serving.end_all()
        self.bench.settle()
        self.bench.evict_host_everything()
        self.bench.evict_everything()
        self.bench.evict_host_everything()
        free, size = len(self.bench.host().free), self.config.host_size
        self.trial.require(
            free == size, "H1", f"{free} of {size} host slots are free after everything was evicted"
        )

    def _load_back(
        self, tokens: Sequence[int], extra_key: str | None, quota: int | None, start: bool
    ) -> None:
        """Match and load; ``start`` the load as well."""
        found = self.bench.match(tokens, extra_key)
        if found.host_hit_length:
            self.bench.load(found, tokens, extra_key, quota)
            if start:
                self.bench.forwards.start_loads()
