"""The life of a request on a tree: admitted, computed in chunks, cached, finished.

The forward pass is played: it writes into a table which prefix each slot holds, so a request that
reads another's KV is seen. What each of the two caching calls must free and adopt is known before.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from refcache.keys import TOKEN
from refcache.oracle.ledger import Prefix
from refcache.oracle.request import Request
from refcache.oracle.tree_calls import TreeCalls

SAMPLED = 1  # the token a request ends with: sampled, but without KV


class TreeRequests(TreeCalls):
    """A :class:`TreeCalls` that serves requests."""

    def _admit(
        self, tokens: Sequence[int], extra_key: str | None, chunk: int | None, priority: int
    ) -> None:
        c = self.config
        if not tokens or len(self.requests) >= c.max_requests or len(tokens) >= c.context_length:
            return
        req = Request(f"request {self._names}", tokens, extra_key, priority)
        self._names += 1
        found = self._match(tokens[:-1], extra_key)
        req.last_node, slots = self._bring(found, tokens[:-1], extra_key)
        prefix = (extra_key, self._elements(tokens[:-1])[: len(slots)])
        req.cache_protected_len, req.prefix_indices = len(slots), slots
        owned = getattr(found, "cache_protected_len", None)
        if owned is not None and len(slots) == len(found.device_indices):
            req.cache_protected_len = int(owned)  # the tree says that it owns no more of them
        self._lock(req.last_node, prefix)
        self.on_target(self.rows.alloc, [req])
        self._write(req, 0, slots)
        req.computed = req.allocated = len(slots)
        if self._compute(req, chunk):
            self.requests.append(req)
        else:
            self._unlock(req.last_node, prefix)
            self.on_target(self.rows.free, req)

    def _bring(
        self, found: Any, tokens: Sequence[int], extra_key: str | None
    ) -> tuple[Any, torch.Tensor]:
        """What a request reuses of a match: the handle to lock, and the device slots."""
        return found.last_device_node, found.device_indices

    def _compute(self, req: Request, chunk: int | None) -> bool:
        """Allocate and compute up to ``chunk`` more prompt tokens; False when there is no room."""
        left = len(req.origin_input_ids) - req.computed
        count = left if chunk is None else min(left, max(1, chunk))
        if not self._allocate(req, count):
            return False
        self._forward(req, req.computed + count)
        return True

    def _allocate(self, req: Request, count: int) -> bool:
        """``count`` more slots for the row, evicting what is needed; False when there are none."""
        size, old = self.page_size, req.allocated
        pages = -(-(old + count) // size) - -(-old // size)
        short = pages * size - int(self.on_target(self.allocator.available_size))
        if short > 0:
            self._evict(short)
        if size == 1:
            out = self.on_target(self.allocator.alloc, count)
        else:
            last = self._row(req)[-1] if old else -1
            before, after = torch.tensor([old]), torch.tensor([old + count])
            one = torch.tensor([last])
            if count == 1:
                out = self.on_target(self.allocator.alloc_decode, after, after, one)
            else:
                out = self.on_target(
                    self.allocator.alloc_extend, before, before, after, after, one, count
                )
        if not self._granted(out, pages):
            return False
        slots = out.tolist()
        self.ledger.take(slots, req.rid)
        self.raise_noted()
        self._write(req, old, out)
        req.allocated += count
        return True

    def _forward(self, req: Request, end: int) -> None:
        """Read every slot before, write the new ones."""
        self._read_check(req)
        self._write_kv(self._row(req)[:end], req.computed, req.tokens, req.extra_key)
        req.computed = end
        req.pending = True

    def _cache(self, req: Request) -> None:
        """``cache_unfinished_req``; what it must free and adopt is known before."""
        req.fill_ids = array(TOKEN, req.tokens[: req.computed])
        elements = self._whole(req.fill_ids)
        prefix = (req.extra_key, elements)
        known, row = self._expect(req, prefix, final=None)
        held = (req.last_node, (req.extra_key, elements[: req.cache_protected_len]))
        self.on_target(self.tree.cache_unfinished_req, req, chunked=not req.prefilled)
        self._settle(prefix, row, known)
        self.ledger.drop(*held)
        self.ledger.hold(req.last_node, prefix)
        self.require(
            req.cache_protected_len == len(elements),
            "R2",
            f"{req.rid}: cache_protected_len = {req.cache_protected_len}, but {len(elements)} "
            "tokens fill whole pages",
        )
        self.require(
            req.prefix_indices.tolist() == self._row(req)[: req.computed],
            "R2",
            f"{req.rid}: prefix_indices = {req.prefix_indices.tolist()}, its row has "
            f"{self._row(req)[: req.computed]}",
        )
        req.pending = False

    def _finish(self, req: Request, insert: bool) -> None:
        computed = req.computed
        req.output_ids.append(SAMPLED)
        committed = req.tokens[:computed]
        prefix = (req.extra_key, self._whole(committed))
        protected = (req.extra_key, prefix[1][: req.cache_protected_len])
        row = self._row(req)
        known, _ = self._expect(req, prefix, final=insert)
        self.on_target(self.tree.cache_finished_req, req, is_insert=insert)
        if insert:
            self._settle(prefix, row, known)
        else:
            self._all_freed()
        self.ledger.drop(req.last_node, protected)
        start = -(-computed // self.page_size) * self.page_size
        self._free(row[start : req.allocated])
        if self.ledger.queued is None:  # an open group may keep views of rows: nobody reuses them
            self._write(req, 0, torch.full((req.allocated,), -1))
        self.on_target(self.rows.free, req)
        self.requests.remove(req)
        if insert:
            found = self._match(committed, req.extra_key)
            self.require(
                len(found.device_indices) == len(prefix[1]),
                "M2",
                f"{len(prefix[1])} tokens were cached, {len(found.device_indices)} match",
            )

    def _expect(self, req: Request, prefix: Prefix, final: bool | None) -> tuple[int, list[int]]:
        """Say what the call may free: duplicates, and at the end the tail.

        ``final``: None for an unfinished request, else whether its pages are inserted.
        """
        size, row = self.page_size, self._row(req)
        known = len(self.ledger.longest(prefix)[1])
        stays = len(prefix[1]) if final is None else req.computed
        allowed = set(row[req.cache_protected_len : known])
        if final is not None:
            allowed |= set(row[len(prefix[1]) if final else req.cache_protected_len : stays])
        self._due = {slot // size for slot in allowed}
        self.ledger.may_free = self.ledger.only(self._due)
        self.ledger.freed = []
        return known, row

    def _all_freed(self) -> None:
        lost = sorted(self._due - set(self.ledger.freed))
        self.require(
            not lost,
            "P1",
            f"pages {lost} belong to nobody: the request gave them up, they were not freed",
        )

    def _settle(self, prefix: Prefix, row: list[int], known: int) -> None:
        """After an insert of a row: duplicates were freed, the rest is the tree's."""
        self._all_freed()
        self._adopt(prefix, row, known)
