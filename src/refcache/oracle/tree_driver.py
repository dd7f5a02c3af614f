"""Drives a tree cache over an allocator, as a scheduler with a handful of requests does.

Admit (match, lock, allocate, compute), go on with the next chunk, decode, cache, finish, abort,
retract; and the bare calls: match, insert, evict, lock, unlock, reset. Here are the steps. They are
made of what a request does (:mod:`refcache.oracle.tree_requests`), that of single calls
(:mod:`refcache.oracle.tree_calls`); after each step come the checks of
:mod:`refcache.oracle.tree_checks`. With the capability ``inspect`` every invariant of the nodes is
checked as well.
"""

from collections.abc import Sequence

import torch

from refcache.oracle.driver import step
from refcache.oracle.tree_requests import TreeRequests


class TreeDriver(TreeRequests):
    """See the module docstring."""

    needs = frozenset({"allocator", "tree"})

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
        self._admit(tokens, extra_key, chunk, priority)

    @step
    def proceed(self, index: int, chunk: int | None = None) -> None:
        """The next chunk of a prefill; what was computed before is cached first."""
        req = self._pick(index)
        if req is not None and not req.prefilled:
            self._cache(req)
            self._compute(req, chunk)

    @step
    def cache(self, index: int) -> None:
        """``cache_unfinished_req`` of what a request has computed."""
        req = self._pick(index)
        if req is not None:
            self._cache(req)

    @step
    def decode(self, index: int, token: int) -> None:
        """One token more, computed at once."""
        req = self._pick(index)
        if req is None or not req.prefilled or req.computed + 2 > self.config.context_length:
            return
        if req.pending:
            self._cache(req)
        if req.allocated == req.computed and not self._allocate(req, 1):
            return
        req.output_ids.append(token)
        self._forward(req, req.computed + 1)

    @step
    def reserve(self, index: int, count: int) -> None:
        """Slots for draft tokens that may never come, as speculative decoding takes them."""
        req = self._pick(index)
        room = self.config.context_length
        if req is not None and req.prefilled and req.allocated + count < room:
            self._allocate(req, count)

    @step
    def finish(self, index: int) -> None:
        """A request ends; its whole pages are cached."""
        req = self._pick(index)
        if req is not None and req.prefilled:
            self._finish(req, insert=True)

    @step
    def abort(self, index: int) -> None:
        """A request ends at any point; nothing is cached."""
        req = self._pick(index)
        if req is not None:
            self._finish(req, insert=False)

    @step
    def retract(self, index: int, chunk: int | None = None) -> None:
        """Take a request's memory away and admit it again with the tokens it has."""
        req = self._pick(index)
        if req is not None:
            tokens = req.tokens
            self._finish(req, insert=False)
            self._admit(tokens, req.extra_key, chunk, req.priority)

    @step
    def finish_together(self, indices: Sequence[int]) -> None:
        """Several requests end inside one free group, as a batch's results are processed."""
        if not self.requests:
            return
        ends = {index % len(self.requests) for index in indices}
        done = [r for i, r in enumerate(self.requests) if i in ends and r.prefilled]
        self.on_target(self.allocator.free_group_begin)
        for req in done:
            self._finish(req, insert=True)
        self.on_target(self.allocator.free_group_end)

    # ---- bare calls ------------------------------------------------------------------------------

    @step
    def match(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Match twice: the second answer is the first."""
        first = self._match(tokens, extra_key)
        before = self._shape()
        again = self._match(tokens, extra_key)
        self.require(
            first.device_indices.tolist() == again.device_indices.tolist()
            and first.last_device_node == again.last_device_node,
            "M1",
            f"a second match gave {again.device_indices.tolist()} at {again.last_device_node}, the "
            f"first {first.device_indices.tolist()} at {first.last_device_node}",
        )
        self._same_shape(before, "M1", "a second match")

    @step
    def insert(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        chunked: bool = False,
        priority: int = 0,
    ) -> None:
        """Insert whole pages with fresh slots; the tensor is overwritten afterwards."""
        elements = self._whole(tokens)
        if not elements:
            return
        slots = self._pages_for(len(elements), "the caller")
        if slots is None:
            return
        tokens = tuple(tokens[: len(elements) + self.config.is_eagle])
        self._write_kv(slots, 0, tokens, extra_key)
        prefix = (extra_key, elements)
        known = len(self.ledger.longest(prefix)[1])
        value = torch.tensor(slots)
        self.ledger.may_free = self.ledger.only(set())
        result = self.on_target(
            self.tree.insert,
            self.target.InsertParams(
                key=self.target.RadixKey(list(tokens), extra_key),
                value=value,
                chunked=chunked,
                priority=priority,
            ),
        )
        value.fill_(-1)
        self._inserted(result.prefix_len, known)
        self._adopt(prefix, slots, known)
        duplicates = slots[:known]
        self._free(duplicates)

    @step
    def evict(self, num_tokens: int) -> None:
        self._evict(num_tokens)

    @step
    def hold(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Match and lock for nobody in particular."""
        found = self._match(tokens, extra_key)
        elements = self._elements(tokens)[: len(found.device_indices)]
        self._lock(found.last_device_node, (extra_key, elements))
        self.holds.append((found.last_device_node, (extra_key, elements)))

    @step
    def unhold(self, index: int) -> None:
        if self.holds:
            self._unlock(*self.holds.pop(index % len(self.holds)))

    @step
    def lock_and_unlock(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Lock then unlock is the identity."""
        found = self._match(tokens, extra_key)
        elements = self._elements(tokens)[: len(found.device_indices)]
        before = self._shape()
        self._lock(found.last_device_node, (extra_key, elements))
        self._unlock(found.last_device_node, (extra_key, elements))
        self._same_shape(before, "K1", "lock then unlock")

    @step
    def reset(self) -> None:
        """Forget everything, as ``flush_cache`` does when nothing runs."""
        if self.requests or self.holds:
            return
        self._before_reset()
        self.on_target(self.tree.reset)
        self.on_target(self.allocator.clear)
        self.on_target(self.rows.clear)
        self.ledger.clear()
        self.kv.clear()
        sizes = (self.tree.evictable_size(), self.tree.protected_size(), self.tree.total_size())
        self.require(sizes == (0, 0, 0), "Z1", f"after reset the tree has sizes {sizes}")

    @step
    def wind_down(self) -> None:
        """End every request, drop every lock, evict everything: every page must be free."""
        self._end_everything()
        self._evict_everything()

    def _end_everything(self) -> None:
        while self.requests:
            self._finish(self.requests[0], insert=self.requests[0].prefilled)
        while self.holds:
            self._unlock(*self.holds.pop())

    def _evict_everything(self) -> None:
        self._evict(self.config.size)
        free = int(self.on_target(self.allocator.available_size))
        self.require(
            free == self.config.size,
            "P1",
            f"{free} of {self.config.size} tokens are free after everything was evicted",
        )

    def _before_reset(self) -> None:
        """What a caller must have waited for."""
