"""Drives a tree over a full and a sliding-window pool, as a scheduler does.

The steps of a plain tree's driver, and those of windows: one that moves on, evictions of windows,
inserts whose first windows are gone.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from refcache.oracle.drivers.swa.bench import SWABench
from refcache.oracle.drivers.swa.misuse import SWAMisuse
from refcache.oracle.drivers.swa.serving import SWARequest, SWAServing
from refcache.oracle.drivers.tree.driver import TreeDriver
from refcache.oracle.drivers.tree.serving import Serving
from refcache.oracle.program.driver import step
from refcache.oracle.target.config import SWAConfig


class SWADriver(TreeDriver):
    """See the module docstring."""

    needs = frozenset({"swa"})
    Config = SWAConfig
    bench_type: ClassVar[type[Any]] = SWABench
    serving_type: ClassVar[type[Serving]] = SWAServing
    bench: SWABench
    serving: SWAServing
    config: SWAConfig

    @step
    def evict_window(self, index: int, whole: bool = False) -> None:
        """The window of a request moves on; what lies before it is given back."""
        req = self.pick(index)
        if isinstance(req, SWARequest) and req.prefilled:
            self.serving.evict_window(req, whole)

    @step
    def evict_windows(self, windows: int, num_tokens: int = 0) -> None:
        """``evict`` of window tokens, after so many tokens."""
        self.bench.evict(num_tokens, windows)

    @step
    def insert(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        chunked: bool = False,
        priority: int = 0,
        evicted: int = 0,
    ) -> None:
        """Insert whole pages with fresh slots, of which the first ``evicted`` tokens have no window
        any more; some page has."""
        bench, size = self.bench, self.bench.page_size
        count = len(bench.whole(tokens))
        slots = bench.alloc(count, "the caller") if count else None
        if slots is None:
            return
        tokens = tuple(tokens[: count + self.config.is_eagle])
        bench.forwards.run(slots, 0, tokens, extra_key)
        evicted = min(evicted, count - size) // size * size
        bench.insert(tokens, extra_key, slots, chunked, priority, evicted)

    @step
    def misuse(self, what: str, given: tuple[Any, ...] = ()) -> None:
        """A misuse, by the name of a method of :class:`SWAMisuse`."""
        getattr(SWAMisuse(self, self.bench), what)(*given)
