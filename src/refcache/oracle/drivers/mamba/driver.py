"""Drives a tree of tokens and recurrent states, as a scheduler with a handful of requests does.

The steps of a plain tree's driver, and those of states: a request that copies a state and is never
admitted, evictions of states, inserts that keep a part.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from refcache.oracle.drivers.mamba.bench import MambaBench
from refcache.oracle.drivers.mamba.misuse import MambaMisuse
from refcache.oracle.drivers.mamba.serving import MambaServing
from refcache.oracle.drivers.tree.driver import TreeDriver
from refcache.oracle.drivers.tree.serving import Serving
from refcache.oracle.program.driver import step
from refcache.oracle.target.config import MambaConfig


class MambaDriver(TreeDriver):
    """See the module docstring."""

    needs = frozenset({"mamba"})
    Config = MambaConfig
    bench_type: ClassVar[type[Any]] = MambaBench
    serving_type: ClassVar[type[Serving]] = MambaServing
    bench: MambaBench
    serving: MambaServing
    config: MambaConfig

    @step
    def leave(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A request matches, which copies a state, and is aborted before it is admitted."""
        req = self.serving.wait(tokens, extra_key) if tokens else None
        if req is not None:
            self.serving.leave(req)

    @step
    def rematch(self, tokens: Sequence[int], extra_key: str | None = None, end: int = 1) -> None:
        """A waiting request matches again when more, or less, is cached: its slot is reused."""
        req = self.serving.wait(tokens, extra_key) if tokens else None
        if req is not None:
            self.bench.match(tokens[: max(1, end)], extra_key, req if req.states else None)
            self.serving.leave(req)

    @step
    def evict_states(self, count: int, num_tokens: int = 0) -> None:
        """``evict`` of states, after so many tokens."""
        self.bench.evict(num_tokens, count)

    @step
    def insert(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        chunked: bool = False,
        priority: int = 0,
        kept: int = 0,
    ) -> None:
        """Insert whole chunks (or any, without buffers) with fresh slots and a state; the tree may
        free no more than what lies beyond ``kept`` tokens."""
        grid = self.config.chunk if self.config.extra_buffer else 1
        tokens = tuple(tokens[: len(tokens) // grid * grid])
        slots = self.bench.alloc(len(tokens), "the caller") if tokens else None
        if slots is not None:
            self.bench.forwards.run(slots, 0, tokens, extra_key)
            self.bench.insert(tokens, extra_key, slots, chunked, priority, kept)

    @step
    def misuse(self, what: str, given: tuple[Any, ...] = ()) -> None:
        """A misuse, by the name of a method of :class:`MambaMisuse`."""
        getattr(MambaMisuse(self, self.bench), what)(*given)
