"""Drives an offloading manager: stores, loads, failures, completions in any order.

Keys are small numbers in a program. A job is named by its number among those that are open.
"""

import itertools
from collections.abc import Iterator, Sequence

from refcache.oracle.drivers.offload.bench import OffloadBench
from refcache.oracle.program.driver import Driver, step

FRESH = 1 << 10
"""From here on: keys that no program names, for :meth:`OffloadDriver.fill`."""


class OffloadDriver(Driver):
    """See the module docstring."""

    needs = frozenset({"offload"})
    bench_type = OffloadBench
    bench: OffloadBench

    @step
    def lookup(self, keys: Sequence[int]) -> None:
        self.bench.lookup(_distinct(keys))

    @step
    def store(self, keys: Sequence[int], tokens: int = 0) -> None:
        """Offer these keys. ``tokens``: of the last block, where blocks may be partial."""
        keys = _distinct(keys)[: self.bench.traits.batch]
        whole = self.config.page_size
        if keys:
            lengths = [whole] * (len(keys) - 1) + [tokens % whole or whole]
            self.bench.prepare_store(keys, lengths)

    @step
    def stored(self, job: int, ok: bool = True, first: int = 0) -> None:
        """A store is over, or only that of its ``first`` keys."""
        keys = self._ends(self.bench.stores, job, first)
        if keys:
            self.bench.complete_store(keys, ok)

    @step
    def load(self, keys: Sequence[int]) -> None:
        """Read those of the keys that are found; another may be read already."""
        bench = self.bench
        if bench.traits.tiers:
            wanted = [k for k in _distinct(keys) if k in bench.ever and bench.lookup([k])]
            if bench.lookup(wanted) < len(wanted):  # one took the room of another
                return
        else:
            wanted = [k for k in _distinct(keys) if k in bench.stored]
        if wanted:
            bench.prepare_load(wanted)

    @step
    def loaded(self, job: int, first: int = 0) -> None:
        """A load is over, or only that of its ``first`` keys."""
        keys = self._ends(self.bench.loads, job, first)
        if keys:
            self.bench.complete_load(keys)

    @step
    def touch(self, keys: Sequence[int]) -> None:
        if keys:
            self.bench.touch(_distinct(keys))

    @step
    def reset(self) -> None:
        """Forget every block, if the manager can and no job is open."""
        if self.bench.can("reset") and not self.bench.stores and not self.bench.loads:
            self.bench.reset()

    @step
    def fill(self, left: int = 0) -> None:
        """Store new keys until ``left`` of the blocks that may go are there: no more, no less."""
        count = self.bench.free + len(self.bench.idle()) - left
        if not self.bench.traits.tiers:
            self._fill(count)
            if left == 0:
                self.bench.prepare_store([next(self._fresh())], [self.config.page_size])
            self._all_over()

    @step
    def wind_down(self) -> None:
        """Every job ends; then every slot can be filled, and read."""
        self._all_over()
        if self.bench.traits.tiers:
            return
        before = set(self.bench.stored)
        self._fill(self.config.pages)
        for key in sorted(self.bench.stored.keys() - before):
            self.bench.prepare_load([key])
        self._all_over()

    def _all_over(self) -> None:
        for jobs, complete in (
            (self.bench.loads, self.bench.complete_load),
            (self.bench.stores, lambda keys: self.bench.complete_store(keys, True)),
        ):
            while jobs:
                complete(jobs.pop(0))

    def _fill(self, count: int) -> None:
        """Offer ``count`` new keys, as many at once as may be."""
        batch = self.bench.traits.batch or count
        while count > 0:
            keys = list(itertools.islice(self._fresh(), min(batch, count)))
            self.bench.prepare_store(keys, [self.config.page_size] * len(keys))
            count -= len(keys)

    def _fresh(self) -> Iterator[int]:
        """Keys that no program names and that are not there now."""
        bench = self.bench
        return (k for k in itertools.count(FRESH) if k not in bench.stored | bench.storing)

    def _ends(self, jobs: list[list[int]], job: int, first: int) -> list[int]:
        """Take these keys out of an open job, and the job off the list when it is over."""
        if not jobs:
            return []
        job %= len(jobs)
        keys = jobs[job][: None if self.bench.traits.whole_jobs else first or None]
        del jobs[job][: len(keys)]
        if not jobs[job]:
            del jobs[job]
        return keys


def _distinct(keys: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(keys))
