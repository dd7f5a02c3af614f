"""Drives a tree cache over an allocator, as a scheduler with a handful of requests does.

Admit (match, lock, allocate, compute), go on with the next chunk, decode, cache, finish, abort,
retract; and the bare calls: match, insert, evict, lock, unlock, reset. Here are the steps; the
calls and checks that they are made of are the bench's (:mod:`refcache.oracle.drivers.tree.bench`),
what a request does is in :mod:`refcache.oracle.drivers.tree.serving`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from refcache.oracle.drivers.tree.bench import TreeBench
from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.drivers.tree.serving import Serving
from refcache.oracle.ledger.ledger import Ledger, Prefix
from refcache.oracle.program.driver import Driver, step
from refcache.oracle.target.base import Target


class TreeDriver(Driver):
    """See the module docstring. ``serving``: what requests do on the bench."""

    needs = frozenset({"allocator", "tree"})
    bench_type: ClassVar[type[Any]] = TreeBench
    serving_type: ClassVar[type[Serving]] = Serving
    bench: TreeBench

    def __init__(self, target: Target, **config: Any) -> None:
        super().__init__(target, **config)
        self.serving = self.serving_type(self.bench)

    @property
    def tree(self) -> Any:
        """The tree on trial."""
        return self.bench.tree

    @property
    def allocator(self) -> Any:
        """The allocator under it, recorded."""
        return self.bench.allocator

    @property
    def ledger(self) -> Ledger:
        """Who owns each page."""
        return self.bench.ledger

    @property
    def requests(self) -> list[Request]:
        """The running requests, oldest first."""
        return self.bench.requests

    @property
    def holds(self) -> list[tuple[Any, Prefix]]:
        """Locks that belong to no request."""
        return self.bench.holds

    def pick(self, index: int) -> Request | None:
        """One of the running requests; None when there is none."""
        return self.requests[index % len(self.requests)] if self.requests else None

    # ---- requests --------------------------------------------------------------------------------

    @step
    def admit(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        chunk: int | None = None,
        priority: int = 0,
    ) -> None:
        """Match all but the last token, lock, and compute the first ``chunk`` of the rest."""
        self.serving.admit(tokens, extra_key, chunk, priority)

    @step
    def proceed(self, index: int, chunk: int | None = None) -> None:
        """The next chunk of a prefill; what was computed before is cached first."""
        req = self.pick(index)
        if req is not None:
            self.serving.proceed(req, chunk)

    @step
    def cache(self, index: int) -> None:
        """``cache_unfinished_req`` of what a request has computed."""
        req = self.pick(index)
        if req is not None:
            self.serving.cache(req)

    @step
    def decode(self, index: int, token: int) -> None:
        """One token more, computed at once."""
        req = self.pick(index)
        if req is not None:
            self.serving.decode(req, token)

    @step
    def reserve(self, index: int, count: int) -> None:
        """Slots for draft tokens that may never come, as speculative decoding takes them."""
        req = self.pick(index)
        room = self.config.context_length
        if req is not None and req.prefilled and req.allocated + count < room:
            self.serving.allocate(req, count)

    @step
    def finish(self, index: int) -> None:
        """A request ends; its whole pages are cached."""
        req = self.pick(index)
        if req is not None and req.prefilled:
            self.serving.finish(req, insert=True)

    @step
    def abort(self, index: int) -> None:
        """A request ends at any point; nothing is cached."""
        req = self.pick(index)
        if req is not None:
            self.serving.finish(req, insert=False)

    @step
    def retract(self, index: int, chunk: int | None = None) -> None:
        """Take a request's memory away and admit it again with the tokens it has."""
        req = self.pick(index)
        if req is not None:
            tokens = req.tokens
            self.serving.finish(req, insert=False)
            self.serving.admit(tokens, req.extra_key, chunk, req.priority)

    @step
    def finish_together(self, indices: Sequence[int]) -> None:
        """Several requests end inside one free group, as a batch's results are processed."""
        if not self.requests:
            return
        ends = {index % len(self.requests) for index in indices}
        done = [r for i, r in enumerate(self.requests) if i in ends and r.prefilled]
        self.trial.call(self.allocator.free_group_begin)
        for req in done:
            self.serving.finish(req, insert=True)
        self.trial.call(self.allocator.free_group_end)

    # ---- bare calls ------------------------------------------------------------------------------

    @step
    def match(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Match twice: the second answer is the first."""
        first = self.bench.match(tokens, extra_key)
        before = self.bench.shape()
        again = self.bench.match(tokens, extra_key)
        self.trial.require(
            first.device_indices.tolist() == again.device_indices.tolist()
            and first.last_device_node == again.last_device_node,
            "M1",
            f"a second match gave {again.device_indices.tolist()} at {again.last_device_node}, the "
            f"first {first.device_indices.tolist()} at {first.last_device_node}",
        )
        self.bench.same_shape(before, "M1", "a second match")

    @step
    def insert(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        chunked: bool = False,
        priority: int = 0,
    ) -> None:
        """Insert whole pages with fresh slots; the tensor is overwritten afterwards."""
        count = len(self.bench.whole(tokens))
        slots = self.bench.alloc(count, "the caller") if count else None
        if slots is None:
            return
        tokens = tuple(tokens[: count + self.config.is_eagle])
        self.bench.forwards.run(slots, 0, tokens, extra_key)
        self.bench.insert(tokens, extra_key, slots, chunked, priority)

    @step
    def evict(self, num_tokens: int) -> None:
        """``evict``: at least so many tokens, if so many are unlocked."""
        self.bench.evict(num_tokens)

    @step
    def hold(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Match and lock for nobody in particular."""
        held = self._found(tokens, extra_key)
        self.bench.lock(*held)
        self.holds.append(held)

    @step
    def unhold(self, index: int) -> None:
        """Unlock what ``hold`` has locked."""
        if self.holds:
            self.bench.unlock(*self.holds.pop(index % len(self.holds)))

    @step
    def lock_and_unlock(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Lock then unlock is the identity."""
        held = self._found(tokens, extra_key)
        before = self.bench.shape()
        self.bench.lock(*held)
        self.bench.unlock(*held)
        self.bench.same_shape(before, "K1", "lock then unlock")

    @step
    def reset(self) -> None:
        """Forget everything, as ``flush_cache`` does when nothing runs."""
        if not self.requests and not self.holds:
            self.bench.reset()

    @step
    def wind_down(self) -> None:
        """End every request, drop every lock, evict everything: every page must be free."""
        self.serving.end_all()
        self.bench.evict_everything()

    def _found(self, tokens: Sequence[int], extra_key: str | None) -> tuple[Any, Prefix]:
        """Match; the handle of the last node on the device, with its prefix."""
        found = self.bench.match(tokens, extra_key)
        elements = self.bench.elements(tokens)[: len(found.device_indices)]
        return found.last_device_node, (extra_key, elements)
