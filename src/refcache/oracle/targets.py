"""Target ``refcache``: the reference on trial, like anybody else's cache."""

from typing import Any

import torch

from refcache.errors import RefcacheError
from refcache.oracle.target import CacheConfig, Target
from refcache.oracle.view import TreeView, inspect_radix
from refcache.types import CacheInitParams


class RefcacheTarget(Target):
    """The reference allocators and ``RadixCache``; a refusal must be a named error."""

    name = "refcache"
    capabilities = frozenset(
        {"allocator", "tree", "inspect", "events", "minimal_evict", "refuses_misuse"}
    )
    errors = RefcacheError

    def allocator(self, config: CacheConfig) -> Any:
        from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

        if config.page_size == 1:
            return TokenToKVPoolAllocator(
                config.size, torch.bfloat16, "cpu", None, config.need_sort
            )
        return PagedTokenToKVPoolAllocator(
            config.size, config.page_size, torch.bfloat16, "cpu", None, config.need_sort
        )

    def tree(self, config: CacheConfig, allocator: Any, req_to_token_pool: Any) -> Any:
        from refcache.tree import RadixCache

        return RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool_allocator=allocator,
                page_size=config.page_size,
                is_eagle=config.is_eagle,
                eviction_policy=config.eviction_policy,
                enable_kv_cache_events=config.enable_kv_cache_events,
            )
        )

    def inspect(self, tree: Any) -> TreeView:
        return inspect_radix(tree, lambda key: key.child_key(tree.page_size))
