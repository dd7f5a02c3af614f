"""Crashes at every point of a backend's operations: ``storage.crash``.

Every change that a backend makes to its directory is followed on the simulated disk
(:mod:`.medium`). At each point of a put, an eviction or a clear, every directory that a crash may
leave there is made, a fresh backend is started in it (:mod:`.images`), and all pages are read.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from refcache.oracle.drivers.backend.bench import KEYS, BackendBench, Page, key_of
from refcache.oracle.drivers.backend.images import Restart
from refcache.oracle.drivers.backend.medium import Change, Medium
from refcache.oracle.drivers.backend.watch import Died, Watch
from refcache.oracle.program.driver import Driver, step
from refcache.oracle.program.trial import Trial
from refcache.oracle.rules.violation import Violation, switched_off
from refcache.oracle.target.storage.contract import StorageConfig

HEADER = 64
"""What the bound allows a file beside its page."""


class CrashBench(BackendBench):
    """One engine, its directory on a simulated disk.

    Attributes:
        must: the pages that every image must have; set before a call.
        bound: ``max_bytes`` of the backend; None where it keeps none.
        restart: reads images back; ``seen``: those that were, and what was expected of them.
    """

    engines = 1

    def __init__(self, trial: Trial, config: StorageConfig) -> None:
        bounded = trial.target.storage_traits.bounded and config.max_pages
        size = config.page_size * 16 + HEADER
        self.bound = config.max_pages * size if bounded else None
        super().__init__(trial, config)
        self.must: set[Page] = set()
        self.seen: set[object] = set()
        self.medium = Medium()
        self.following = False
        self.watch = Watch(self.path, self._changed)
        for number in (*{c.file for c in self.medium.pending}, 0):  # what is there already lasts
            self.medium.apply(Change("sync", number))
        self.following = True

    def make(self, engine: int, path: str, max_bytes: int | None = None) -> object:
        return super().make(engine, path, max_bytes or self.bound)

    def _changed(self, change: Change) -> None:
        self.medium.apply(change)
        if self.following:
            self.read_back(f"after {change.kind} {change.name or change.file}")

    def during(self, function: Callable[[], object]) -> object:
        """Make a call, and crash at every point of it, and at its end."""
        with self.watch.watching():
            answer = function()
        return answer

    def read_back(self, when: str) -> None:
        """Restart in every directory that a crash may leave now.

        What is found is noted: the call on trial, which may catch exceptions, goes on.
        """
        may = frozenset(self.stored | self.unsure)
        for image in self.medium.images():
            told = (frozenset(image.items()), frozenset(self.must), may)
            if told not in self.seen and self.following:
                self.seen.add(told)
                try:
                    Restart(self, image, f"in a crash {when}").judge(self.must, may)
                except Violation as violation:
                    if not switched_off(violation.id):
                        self.trial.note(violation.id, violation.evidence)
                        self.following = False


class CrashDriver(Driver):
    """Puts, clears, and a process that is killed in between; crashes in all of them."""

    needs = frozenset({"storage", "durable"})
    Config = StorageConfig
    bench_type = CrashBench
    bench: CrashBench

    @step
    def put(self, keys: Sequence[int]) -> None:
        """Store pages, one call for all; a bounded store may let others go for them."""
        names, values, pages = self._offer(keys)
        bench = self.bench
        done = bench.during(lambda: bench.call(0, "batch_set", names, values))
        bench.trial.raise_noted()
        bench.trial.require(
            done is True or bench.bound is not None, "SB2", f"the store of {pages} gave {done!r}"
        )
        self._forget(set(pages) if done is True else set())
        if done is True:
            bench.stored |= {*pages}
            bench.unsure -= {*pages}
        self._settled()

    @step
    def killed(self, keys: Sequence[int], at: int) -> None:
        """The process dies after so many calls of ``os`` in a store; the power stays on."""
        names, values, _ = self._offer(keys)
        bench = self.bench
        bench.watch.left = at
        with suppress(Died):
            bench.during(lambda: bench.backend(0).batch_set(names, values))
        bench.watch.left = None
        bench.trial.raise_noted()
        self._forget(set())
        bench.backends.clear()
        bench.during(lambda: bench.backend(0))
        self._settled()

    @step
    def clear(self) -> None:
        """Remove every page."""
        bench = self.bench
        bench.must = set()
        bench.unsure |= bench.stored
        bench.during(lambda: bench.call(0, "clear"))
        bench.stored, bench.unsure = set(), set()
        self._settled()

    @step
    def wind_down(self) -> None:
        """A restart, and every page is read."""
        self.bench.restart()
        self.bench.during(lambda: self.bench.backend(0))
        self._settled()

    def _offer(self, keys: Sequence[int]) -> tuple[list[str], list[object], list[Page]]:
        """Arguments of a store; what it offers may be there from now on."""
        bench = self.bench
        pages = [Page(0, key) for key in dict.fromkeys(k % KEYS for k in keys)]
        bench.unsure |= {*pages} - bench.stored
        bench.must = set() if bench.bound is not None else set(bench.stored)
        return [key_of(page.key) for page in pages], [bench.bytes_of(p) for p in pages], pages

    def _forget(self, kept: set[Page]) -> None:
        """Of a bounded store: any page but these may have gone."""
        if self.bench.bound is not None:
            self.bench.unsure |= self.bench.stored - kept
            self.bench.stored &= kept

    def _settled(self) -> None:
        """Crash once more, now that the call has said what it says."""
        self.bench.must = set(self.bench.stored)
        self.bench.read_back("after the call was over")
        self.bench.trial.raise_noted()
