"""The life of a request with window layers: what lies behind its window may go while it runs."""

from typing import Any, ClassVar

import torch

from refcache.oracle.drivers.swa.bench import SWABench
from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.drivers.tree.serving import Serving
from refcache.oracle.ledger.ledger import Prefix


class SWARequest(Request):
    """``swa_uuid_for_lock``: what its lock returned; ``swa_evicted_seqlen``: tokens whose window it
    has given back."""

    swa_uuid_for_lock: int | None = None
    swa_evicted_seqlen = 0


class SWAServing(Serving):
    """See the module docstring."""

    bench: SWABench
    request_type: ClassVar[type[Request]] = SWARequest

    def keeps_lock(self, req: Request, prefix: Prefix) -> None:
        assert isinstance(req, SWARequest)
        req.swa_uuid_for_lock = self.bench.ended(req.last_node, prefix)

    def _plan(
        self, req: Request, prefix: Prefix, row: list[int]
    ) -> tuple[set[int], list[tuple[Prefix, int]]]:
        assert isinstance(req, SWARequest)
        size = self.bench.page_size
        pages = [slot // size for slot in row[: len(prefix[1]) : size]]
        return self.bench.plan(prefix, pages, req.cache_protected_len, req.swa_evicted_seqlen)

    def duplicates(self, req: Request, prefix: Prefix, row: list[int], known: int) -> set[int]:
        freed, self._adopted = self._plan(req, prefix, row)
        return {page * self.bench.page_size for page in freed}

    def adopt(self, req: Request, prefix: Prefix, row: list[int], known: int) -> None:
        for part, page in self._adopted:
            self.ledger.adopt(part, page)

    def found_again(self, found: Any, prefix: Prefix) -> None:
        """How much of it matches follows from the windows that are there (M0)."""

    def allocate(self, req: Request, count: int) -> bool:
        """As on a plain tree; where the next page of one pool is missing, only a target that says
        so by None is asked (W02)."""
        bench, size = self.bench, self.bench.page_size
        old = req.allocated
        pages = -(-(old + count) // size) - -(-old // size)
        bench.make_room(pages * size)
        free = min(len(self.ledger.free), bench.windows.free)
        if size > 1 and count == 1 and pages > free and not self.trial.has("refuses_misuse"):
            return False
        return super().allocate(req, count)

    def _forward(self, req: Request, end: int) -> None:
        """What is decoded is not cached before the end, as in a loop."""
        pending, prefill = req.pending, not req.prefilled
        super()._forward(req, end)
        req.pending = pending or prefill

    def cache(self, req: Request) -> None:
        """``cache_unfinished_req``; not after the window has moved, as in a loop."""
        assert isinstance(req, SWARequest)
        if req.swa_evicted_seqlen > req.cache_protected_len:
            return
        super().cache(req)

    def decode(self, req: Request, token: int) -> None:
        """One token more; what prefill has computed is cached first."""
        assert isinstance(req, SWARequest)
        if req.prefilled and req.swa_evicted_seqlen > req.cache_protected_len:
            req.pending = False
        super().decode(req, token)

    def evict_window(self, req: SWARequest, whole: bool = False) -> None:
        """The window moves on: what lies before it is given back, in whole pages.

        Not all that the request could insert now, unless ``whole`` (W01).
        """
        bench, size = self.bench, self.bench.page_size
        evicted = max(req.swa_evicted_seqlen, req.cache_protected_len)
        end = (req.computed - bench.config.window) // size * size
        if not whole:
            insertable = len(bench.whole(req.tokens[: req.computed]))
            end = min(end, insertable - size)
        if end <= evicted:
            return
        slots = bench.row(req)[evicted:end]
        with bench.windows.permits({slot // size for slot in slots}):
            self.trial.call(bench.allocator.free_swa, torch.tensor(slots))
        req.swa_evicted_seqlen = end
