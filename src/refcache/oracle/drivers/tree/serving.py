"""The life of a request on a tree: admitted, computed in chunks, cached, finished.

What a scheduler does with one request, made of the calls of a
:class:`~refcache.oracle.drivers.tree.bench.TreeBench`. What each of the two caching calls must free
and adopt is known before it is made.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from refcache.keys import TOKEN
from refcache.oracle.drivers.tree.bench import TreeBench
from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.ledger.ledger import Prefix

SAMPLED = 1  # the token a request ends with: sampled, but without KV


class Serving:
    """See the module docstring. ``admitted`` counts the requests there were."""

    request_type: ClassVar[type[Request]] = Request

    def __init__(self, bench: TreeBench) -> None:
        self.bench, self.trial, self.ledger = bench, bench.trial, bench.ledger
        self.admitted = 0

    def admit(
        self, tokens: Sequence[int], extra_key: str | None, chunk: int | None, priority: int
    ) -> None:
        """Match all but the last token, lock, and compute the first ``chunk`` of the rest."""
        bench, c = self.bench, self.bench.config
        if not tokens or len(bench.requests) >= c.max_requests or len(tokens) >= c.context_length:
            return
        req = self.request_type(f"request {self.admitted}", tokens, extra_key, priority)
        self.admitted += 1
        found = bench.match(tokens[:-1], extra_key)
        req.last_node, slots = bench.bring(found, tokens[:-1], extra_key)
        prefix = (extra_key, bench.elements(tokens[:-1])[: len(slots)])
        req.cache_protected_len, req.prefix_indices = len(slots), slots
        owned = getattr(found, "cache_protected_len", None)
        if owned is not None and len(slots) == len(found.device_indices):
            req.cache_protected_len = int(owned)  # the tree says that it owns no more of them
        bench.lock(req.last_node, prefix)
        self.trial.call(bench.rows.alloc, [req])
        self._write(req, 0, slots)
        req.computed = req.allocated = len(slots)
        if self.compute(req, chunk):
            self.keeps_lock(req, prefix)
            bench.requests.append(req)
        else:
            bench.unlock(req.last_node, prefix)
            self.trial.call(bench.rows.free, req)

    def keeps_lock(self, req: Request, prefix: Prefix) -> None:
        """The lock of what it matched is the request's from now on."""

    def duplicates(self, req: Request, prefix: Prefix, row: list[int], known: int) -> set[int]:
        """The slots that an insert of ``prefix`` for the request frees: ``known`` tokens of it were
        cached."""
        return set(row[req.cache_protected_len : known])

    def adopt(self, req: Request, prefix: Prefix, row: list[int], known: int) -> None:
        """The tree owns what the request has inserted."""
        self.bench.adopt(prefix, row, known)

    def found_again(self, found: Any, prefix: Prefix) -> None:
        """M2: what was cached at the end of a request matches."""
        self.trial.require(
            len(found.device_indices) == len(prefix[1]),
            "M2",
            f"{len(prefix[1])} tokens were cached, {len(found.device_indices)} match",
        )

    def proceed(self, req: Request, chunk: int | None) -> None:
        """The next chunk of a prefill; what was computed before is cached first."""
        if not req.prefilled:
            self.cache(req)
            self.compute(req, chunk)

    def compute(self, req: Request, chunk: int | None) -> bool:
        """Allocate and compute up to ``chunk`` more prompt tokens; False when there is no room."""
        left = len(req.origin_input_ids) - req.computed
        count = left if chunk is None else min(left, max(1, chunk))
        if not self.allocate(req, count):
            return False
        self._forward(req, req.computed + count)
        return True

    def decode(self, req: Request, token: int) -> None:
        """One token more, computed at once."""
        if not req.prefilled or req.computed + 2 > self.bench.config.context_length:
            return
        if req.pending:
            self.cache(req)
        if req.allocated == req.computed and not self.allocate(req, 1):
            return
        req.output_ids.append(token)
        self._forward(req, req.computed + 1)

    def allocate(self, req: Request, count: int) -> bool:
        """``count`` more slots for the row, evicting what is needed; False when there are none."""
        bench, call = self.bench, self.trial.call
        size, old, allocator = bench.page_size, req.allocated, bench.allocator
        pages = -(-(old + count) // size) - -(-old // size)
        bench.make_room(pages * size)
        if size == 1:
            out = call(allocator.alloc, count)
        else:
            last = torch.tensor([bench.row(req)[-1] if old else -1])
            before, after = torch.tensor([old]), torch.tensor([old + count])
            if count == 1:
                out = call(allocator.alloc_decode, after, after, last)
            else:
                out = call(allocator.alloc_extend, before, before, after, after, last, count)
        if not bench.granted(out, pages, req.rid):
            return False
        self._write(req, old, out)
        req.allocated += count
        return True

    def cache(self, req: Request) -> None:
        """``cache_unfinished_req`` of what a request has computed; R2 for what it sets."""
        bench = self.bench
        bench.forwards.wait()
        req.fill_ids = array(TOKEN, req.tokens[: req.computed])
        elements = bench.whole(req.fill_ids)
        prefix = (req.extra_key, elements)
        row = bench.row(req)
        known = len(self.ledger.longest(prefix)[1])
        held = (req.last_node, (req.extra_key, elements[: req.cache_protected_len]))
        with self._gives_up(self.duplicates(req, prefix, row, known)):
            self.trial.call(bench.tree.cache_unfinished_req, req, chunked=not req.prefilled)
        self.adopt(req, prefix, row, known)
        self.ledger.drop(*held)
        self.ledger.hold(req.last_node, prefix)
        self.trial.require(
            req.cache_protected_len == len(elements),
            "R2",
            f"{req.rid}: cache_protected_len = {req.cache_protected_len}, but {len(elements)} "
            "tokens fill whole pages",
        )
        self.trial.require(
            req.prefix_indices.tolist() == bench.row(req)[: req.computed],
            "R2",
            f"{req.rid}: prefix_indices = {req.prefix_indices.tolist()}, its row has "
            f"{bench.row(req)[: req.computed]}",
        )
        req.pending = False

    def finish(self, req: Request, insert: bool) -> None:
        """``cache_finished_req``: whole pages are cached, or nothing; the rest is given back."""
        bench, computed = self.bench, req.computed
        if insert:
            bench.forwards.wait()
        req.output_ids.append(SAMPLED)
        committed = req.tokens[:computed]
        prefix = (req.extra_key, bench.whole(committed))
        protected = (req.extra_key, prefix[1][: req.cache_protected_len])
        row = bench.row(req)
        known = len(self.ledger.longest(prefix)[1])
        tail = row[len(prefix[1]) if insert else req.cache_protected_len : computed]
        given_up = {*tail, *(self.duplicates(req, prefix, row, known) if insert else ())}
        with self._gives_up(given_up):
            self.trial.call(bench.tree.cache_finished_req, req, is_insert=insert)
        if insert:
            self.adopt(req, prefix, row, known)
        self.ledger.drop(req.last_node, protected)
        start = -(-computed // bench.page_size) * bench.page_size
        bench.free(row[start : req.allocated])
        if self.ledger.queued is None:  # an open group may keep views of rows: nobody reuses them
            self._write(req, 0, torch.full((req.allocated,), -1))
        self.trial.call(bench.rows.free, req)
        bench.requests.remove(req)
        if insert:
            found = bench.match(committed, req.extra_key)
            self.found_again(found, prefix)

    def end_all(self) -> None:
        """Finish every request and drop every lock."""
        bench = self.bench
        while bench.requests:
            self.finish(bench.requests[0], insert=bench.requests[0].prefilled)
        while bench.holds:
            bench.unlock(*bench.holds.pop())

    @contextmanager
    def _gives_up(self, slots: set[int]) -> Iterator[None]:
        """In the block the pages of these slots are freed: no others, and all of them (P1)."""
        pages = {slot // self.bench.page_size for slot in slots}
        with self.ledger.permits(pages) as freed:
            yield
        lost = sorted(pages - {*freed.pages})
        self.trial.require(
            not lost,
            "P1",
            f"pages {lost} belong to nobody: the request gave them up, they were not freed",
        )

    def _forward(self, req: Request, end: int) -> None:
        """Read every slot before, write the new ones."""
        bench = self.bench
        bench.forwards.read(req, bench.row)
        bench.forwards.run(bench.row(req)[:end], req.computed, req.tokens, req.extra_key)
        req.computed = end
        req.pending = True

    def _write(self, req: Request, start: int, slots: torch.Tensor) -> None:
        """Put slots into the row, from token ``start`` on."""
        columns = slice(start, start + len(slots))
        self.trial.call(self.bench.rows.write, (req.req_pool_idx, columns), slots)
