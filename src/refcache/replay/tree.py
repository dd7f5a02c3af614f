"""Replay a request trace through the tree alone: what a cache without an engine does."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from refcache.keys import RadixKey
from refcache.readers import TraceRequest
from refcache.replay.parts import CountingRadixCache, prompt_of
from refcache.types import CacheInitParams, EvictParams, InsertParams, MatchPrefixParams


@dataclass(frozen=True)
class TreeReplayResult:
    """Tokens that were matched, and that were evicted."""

    hit_tokens: int
    evicted_tokens: int


class _NoAllocator:
    """Takes back slots that nobody hands out."""

    device = "cpu"

    def free(self, free_index: torch.Tensor) -> None: ...


def replay_tree(
    requests: Iterable[TraceRequest],
    page_size: int = 64,
    device_tokens: int | None = 3_000_000,
    policy: str = "lru",
) -> TreeReplayResult:
    """Match each whole prompt, insert it in whole pages, evict what exceeds ``device_tokens``."""
    tree = CountingRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=_NoAllocator(),
            page_size=page_size,
            eviction_policy=policy,
        )
    )
    hits = 0
    for request in requests:
        key = RadixKey(prompt_of(request)).page_aligned(page_size)
        hits += len(tree.match_prefix(MatchPrefixParams(key)).device_indices)
        tree.insert(InsertParams(key, torch.zeros(len(key), dtype=torch.int64)))
        excess = 0 if device_tokens is None else tree.evictable_size() - device_tokens
        if excess > 0:
            tree.evict(EvictParams(excess))
    return TreeReplayResult(hits, tree.evicted_tokens)
