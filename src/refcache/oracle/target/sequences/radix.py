"""The reference's ``RadixCache`` as sequences see it: what a scheduler does with one request.

Every result is cached at once (``cache_unfinished_req``), so a prefix is found from then on and a
duplicate page is given back. A fork shares what the tree owns and copies the rest. An invalidated
namespace goes by another name from then on.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from refcache.keys import TOKEN, RadixKey
from refcache.oracle.target.config import CacheConfig
from refcache.types import EvictParams, MatchPrefixParams


@dataclass
class Served:
    """A request as the tree sees it (:class:`refcache.types.CacheReq`).

    Attributes:
        allocated: slots in its row; ``kv_committed_len``: those with KV.
    """

    origin_input_ids: "array[int]"
    extra_key: str | None
    prefix_indices: torch.Tensor
    last_node: Any
    output_ids: "array[int]" = field(default_factory=lambda: array(TOKEN))
    fill_ids: "array[int]" = field(default_factory=lambda: array(TOKEN))
    priority: int | None = 0
    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    cache_counted_len: int = 0
    kv_committed_len: int = 0
    kv_committed_freed: bool = False
    allocated: int = 0

    def __post_init__(self) -> None:
        found = len(self.prefix_indices)
        self.cache_protected_len = self.kv_committed_len = self.allocated = found

    def pop_committed_kv_cache(self) -> int:
        """Tokens with KV."""
        self.kv_committed_freed = True
        return self.kv_committed_len


class RadixSequences:
    """See the module docstring."""

    def __init__(self, config: CacheConfig, tree: Any, allocator: Any, rows: Any) -> None:
        self.size, self.tree, self.allocator, self.rows = config.page_size, tree, allocator, rows
        self.requests: dict[int, Served] = {}
        self.renamed: Counter[str | None] = Counter()
        self._copies: list[tuple[int, int]] = []

    # ---- parts -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for copies between tiers; there is one tier."""

    def _found(self, tokens: Sequence[int], space: str | None) -> tuple[torch.Tensor, Any]:
        """Slots of the longest prefix that is cached, and the node to lock."""
        key = RadixKey(list(tokens[:-1]), space)
        found = self.tree.match_prefix(MatchPrefixParams(key))
        return found.device_indices, found.last_device_node

    def _room(self, tokens: int) -> bool:
        """Evict until so many are free; False, and nothing is evicted, when they never will be."""
        missing = tokens - self.allocator.available_size()
        if missing > self.tree.evictable_size():
            return False
        if missing > 0:
            self.tree.evict(EvictParams(missing))
            self.settle()
        return True

    def _row(self, req: Served) -> torch.Tensor:
        row: torch.Tensor = self.rows.read(req.req_pool_idx, slice(0, req.allocated))
        return row

    def _write(self, req: Served, start: int, slots: torch.Tensor) -> None:
        self.rows.write((req.req_pool_idx, slice(start, start + len(slots))), slots)

    def _hold(self, seq: int, req: Served, slots: torch.Tensor) -> None:
        """A row and a lock for a request whose prefix is in these slots."""
        self.tree.inc_lock_ref(req.last_node)
        self.rows.alloc([req])
        self._write(req, 0, slots)
        self.requests[seq] = req

    # ---- the contract ----------------------------------------------------------------------------

    def start(self, seq: int, tokens: Sequence[int], namespace: str | None) -> int | None:
        times = self.renamed[namespace]
        space = f"{namespace}, {times}" if times else namespace
        slots, node = self._found(tokens, space)
        self._hold(seq, Served(array(TOKEN, tokens), space, slots, node), slots)
        return len(slots)

    def grow(self, seq: int, tokens: Sequence[int], n: int) -> bool:
        req = self.requests[seq]
        more, pages = n - req.allocated, -(-n // self.size) - -(-req.allocated // self.size)
        if more <= 0:
            return True
        if not self._room(pages * self.size):
            return False
        if self.size == 1:
            slots = self.allocator.alloc(more)
        else:
            before, after = torch.tensor([req.allocated]), torch.tensor([n])
            last = self._row(req)[-1:] if req.allocated else torch.tensor([-1])
            slots = self.allocator.alloc_extend(
                before, before, after, after, last.to(torch.int64), more
            )
        self._write(req, req.allocated, slots)
        req.allocated = n
        return True

    def computed(self, seq: int, tokens: Sequence[int], n: int) -> None:
        req = self.requests.get(seq)
        if req is None:
            return
        req.output_ids = array(TOKEN, tokens[len(req.origin_input_ids) :])
        req.fill_ids, req.kv_committed_len = array(TOKEN, tokens[:n]), n
        self.tree.cache_unfinished_req(req, chunked=n < len(req.origin_input_ids))
        self.settle()

    def finish(self, seq: int, tokens: Sequence[int]) -> None:
        self._end(seq, insert=True)

    def abort(self, seq: int) -> None:
        self._end(seq, insert=False)

    preempt = abort

    def _end(self, seq: int, insert: bool) -> None:
        """What has KV is cached or given back; so are the slots that got none."""
        req = self.requests.pop(seq)
        unused = self._row(req)[-(-req.kv_committed_len // self.size) * self.size :]
        if req.kv_committed_len > req.cache_protected_len:
            self.tree.cache_finished_req(req, is_insert=insert)
        else:  # all that it has is the tree's
            self.tree.dec_lock_ref(req.last_node)
        self.allocator.free(unused.to(torch.int64))
        self.rows.free(req)
        self.settle()

    def fork(self, seq: int, child: int) -> bool:
        req = self.requests[seq]
        shared, done = req.cache_protected_len, req.kv_committed_len
        pages = -(-(done - shared) // self.size)
        if not self._room(pages * self.size):
            return False
        row = self._row(req)[:done].to(torch.int64)
        new = self.allocator.alloc(pages * self.size)
        theirs, mine = (slots[:: self.size] // self.size for slots in (row[shared:], new))
        self._copies += zip(theirs.tolist(), mine.tolist(), strict=True)
        slots = torch.cat([row[:shared], new[: done - shared]])
        twin = Served(req.origin_input_ids, req.extra_key, slots, req.last_node, req.output_ids)
        twin.cache_protected_len = twin.cache_counted_len = shared
        self._hold(child, twin, slots)
        return True

    def copies(self) -> list[tuple[int, int]]:
        made, self._copies = self._copies, []
        return made

    def invalidate(self, namespace: str | None) -> None:
        self.renamed[namespace] += 1

    def reset(self) -> None:
        self.tree.reset()
        self.allocator.clear()
        self.rows.clear()

    def events(self) -> list[Any]:
        events: list[Any] = self.tree.take_events()
        return events

    def table(self, seq: int) -> list[int]:
        pages: list[int] = (self._row(self.requests[seq])[:: self.size] // self.size).tolist()
        return pages
