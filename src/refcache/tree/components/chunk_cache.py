"""``ChunkCache``: no tree. A prompt computed in chunks keeps what it has; nothing is shared.

What a serving loop calls when prefixes are not to be cached: it matches nothing, locks nothing, has
nothing to evict, and frees all slots of a request at its end. ``SWAChunkCache`` is the same for a
model with sliding windows; there the loop gives window slots back while a request runs.

Models SGLang 0.5.10's classes of these names. (``RadixCache`` with ``disable`` does the same for
plain models.)
"""

from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.types import (
    CacheInitParams,
    CacheReq,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)


class ChunkCache:
    """See the module docstring.

    Attributes:
        req_to_token_pool, token_to_kv_pool_allocator, page_size: as given.
        disable: always True.
    """

    disable = True
    protected_size_ = 0

    def __init__(self, params: CacheInitParams) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.device = getattr(self.token_to_kv_pool_allocator, "device", "cpu")

    def is_chunk_cache(self) -> bool:
        """It is."""
        return True

    def supports_swa(self) -> bool:
        """No layers with a sliding window."""
        return False

    def supports_mamba(self) -> bool:
        """No layers with a recurrent state."""
        return False

    def reset(self) -> None:
        """There is nothing to forget."""

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Nothing: int64 ``[0]``, and None as node."""
        return MatchResult(torch.empty(0, dtype=torch.int64, device=self.device), None, None)

    def insert(self, params: InsertParams) -> InsertResult:
        """Nothing is kept; the slots stay the caller's."""
        return InsertResult(prefix_len=0)

    def cache_unfinished_req(self, req: CacheReq, chunked: bool = False) -> None:
        """``prefix_indices`` become the slots that the request's row has."""
        req.prefix_indices = self._row(req, len(req.fill_ids))

    def cache_finished_req(self, req: CacheReq, is_insert: bool = True) -> None:
        """Free every slot with KV of a finished request."""
        slots = self._row(req, req.pop_committed_kv_cache())
        if len(slots):
            self.token_to_kv_pool_allocator.free(slots)

    def _row(self, req: CacheReq, length: int) -> torch.Tensor:
        slots: torch.Tensor = self.req_to_token_pool.read(req.req_pool_idx, slice(0, length))
        return slots

    def evict(self, params: EvictParams) -> EvictResult:
        """Nothing."""
        return EvictResult()

    def inc_lock_ref(self, node: Any) -> IncLockRefResult:
        """Nothing to lock."""
        return IncLockRefResult()

    def dec_lock_ref(self, node: Any, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Nothing to unlock."""
        return DecLockRefResult()

    def evictable_size(self) -> int:
        """0 tokens."""
        return 0

    def protected_size(self) -> int:
        """0 tokens."""
        return 0

    def full_evictable_size(self) -> int:
        """0 tokens."""
        return 0

    def full_protected_size(self) -> int:
        """0 tokens."""
        return 0

    def total_size(self) -> int:
        """0 tokens."""
        return 0

    def is_tree_cache(self) -> bool:
        """It is none."""
        return False

    def take_events(self) -> list[Any]:
        """Nothing is cached, so nothing happens to it."""
        return []

    def pretty_print(self) -> str:
        """Nothing to see."""
        return ""

    def available_and_evictable_str(self) -> str:
        """Nothing can be evicted."""
        return ""


class SWAChunkCache(ChunkCache):
    """See the module docstring.

    Attributes:
        sliding_window_size: how many tokens a layer looks back; ``chunked_prefill_size``: kept.

    Raises:
        InvalidArgument: no window, or an allocator without window slots.
    """

    def __init__(self, params: CacheInitParams) -> None:
        window = params.sliding_window_size
        if window is None or window < 1:
            raise InvalidArgument(f"sliding_window_size={window}: expected at least 1")
        if not hasattr(params.token_to_kv_pool_allocator, "free_swa"):
            kind = type(params.token_to_kv_pool_allocator).__name__
            raise InvalidArgument(f"allocator {kind}: expected a SWATokenToKVPoolAllocator")
        super().__init__(params)
        self.sliding_window_size = window
        self.chunked_prefill_size = params.chunked_prefill_size

    def supports_swa(self) -> bool:
        """Layers with a sliding window."""
        return True

    def swa_evictable_size(self) -> int:
        """0 tokens."""
        return 0
