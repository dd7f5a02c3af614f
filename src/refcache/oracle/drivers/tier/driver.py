"""Drives a cache of three tiers: most of what :class:`HiCacheDriver` does, and requests that wait
for storage, attach and detach, and a store that loses pages and fails.

A request that waits is named by its number among those that do.
"""

from collections.abc import Sequence
from typing import Any

from refcache.oracle.drivers.hicache.driver import HiCacheDriver
from refcache.oracle.drivers.tier.bench import TierBench, Waiting
from refcache.oracle.drivers.tree.driver import TreeDriver
from refcache.oracle.program.driver import step
from refcache.oracle.target.config import StorageTierConfig
from refcache.runtime import SimulatedRuntime


class TierDriver(TreeDriver):
    """See the module docstring."""

    needs = HiCacheDriver.needs | {"storage_tier"}
    Config = StorageTierConfig
    config: StorageTierConfig
    bench_type = TierBench
    bench: TierBench

    readmit: Any = HiCacheDriver.readmit
    reload: Any = HiCacheDriver.reload
    _load_back: Any = HiCacheDriver._load_back
    poll: Any = HiCacheDriver.poll
    work: Any = HiCacheDriver.work
    settle: Any = HiCacheDriver.settle

    @property
    def machine(self) -> SimulatedRuntime:
        """Where forwards, copies and the threads of storage run."""
        return self.bench.machine

    @step
    def queue(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A request comes: what its prompt has beyond the host is asked of storage."""
        self.bench.prefetch(tokens, extra_key)

    @step
    def progress(self, which: int) -> None:
        """May the request be scheduled? What has come for it is in the tree then."""
        request = self._waiting(which)
        if request is not None:
            self.bench.progress(request)

    @step
    def give_up(self, which: int) -> None:
        """A request waits no longer."""
        request = self._waiting(which)
        if request is not None:
            self.bench.hurried.add(request.rid)
            self.trial.call(self.bench.tree.terminate_prefetch, request.rid)

    @step
    def abort_queued(self, which: int) -> None:
        """A request that waits is aborted."""
        request = self._waiting(which)
        if request is not None:
            self.bench.abort(request)

    @step
    def attach(self) -> None:
        """Attach the store again, after a detach."""
        self.bench.attach()

    @step
    def detach(self) -> None:
        """Detach the store, whatever goes on."""
        self.bench.detach()

    @step
    def lose(self, which: int) -> None:
        """The store evicts a page."""
        self.bench.store.lose(which)

    @step
    def forget(self) -> None:
        """Empty both tiers above the store, as far as nothing is used."""
        self.bench.evict(self.config.size)
        self.bench.evict_host_everything()

    @step
    def reset(self) -> None:
        """Forget everything, with requests waiting and threads at work."""
        if not self.requests and not self.holds:
            self.bench.reset()

    @step
    def wind_down(self) -> None:
        """End everything, and empty both tiers: nothing may be left over.

        Under write-back an eviction writes to the host, and from there to the store.
        """
        self.serving.end_all()
        self.bench.settle()
        self.bench.evict_host_everything()
        self.bench.evict_everything()
        self.bench.settle()
        self.bench.evict_host_everything()
        free, size = len(self.bench.host().free), self.config.host_size
        self.trial.require(
            free == size, "H1", f"{free} of {size} host slots are free after everything was evicted"
        )

    def _waiting(self, which: int) -> Waiting | None:
        waiting = self.bench.waiting
        return waiting[which % len(waiting)] if waiting else None
