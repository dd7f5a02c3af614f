"""A small three-tier cache with a store in memory: what tests of the storage tier drive."""

import torch

from refcache.allocator import PagedTokenToKVPoolAllocator
from refcache.keys import RadixKey
from refcache.pool import MHATokenToKVPool, ReqToTokenPool
from refcache.runtime import ImmediateRuntime
from refcache.storage import HiCacheMemory
from refcache.tree import HiRadixCache
from refcache.types import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    ServerArgs,
)


class Clock:
    """Seconds, as a test sets them."""

    now = 0.0

    def __call__(self):
        return self.now


class Rig:
    """Pages of 2 tokens, 16 on the device, 34 on the host; ``store`` outlives it.

    Attributes:
        refuse: jobs of the storage threads are put here instead of run, until :meth:`let`.
    """

    def __init__(self, store=None, policy="best_effort", page=2, size=16, host=34, runtime=None,
                 threshold=2, write_policy="write_through", options="", group=None):  # fmt: skip
        self.runtime, self.page, self.clock = runtime or ImmediateRuntime(), page, Clock()
        self.store = HiCacheMemory() if store is None else store
        pool = MHATokenToKVPool(size, page, torch.int64, 1, 2, 2, "cpu", runtime=self.runtime)
        self.pool = pool
        self.allocator = PagedTokenToKVPoolAllocator(
            size, page, torch.int64, "cpu", pool, False, self.runtime
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, 64, runtime=self.runtime),
            token_to_kv_pool_allocator=self.allocator,
            page_size=page,
            clock=self.clock,
            tp_cache_group=group,
            runtime=self.runtime,
        )
        args = ServerArgs(
            page_size=page,
            enable_hierarchical_cache=True,
            hicache_ratio=(host - page / 2) / size,
            hicache_write_policy=write_policy,
            chunked_prefill_size=None,
        )
        self.tree = HiRadixCache(params, args)
        self.host, self.controller = self.tree.token_to_kv_pool_host, self.tree.cache_controller
        self.storage = self.controller.storage
        if self.store is not False:
            text = f'{{"prefetch_threshold": {threshold}{options}}}'
            ok, message = self.tree.attach_storage_backend(self.store, text, None, policy)
            assert ok, message

    @staticmethod
    def key(tokens, extra_key=None):
        return RadixKey(list(tokens), extra_key)

    def insert(self, tokens, extra_key=None):
        tokens = list(tokens)
        slots = self.allocator.alloc(len(tokens) - self.tree.is_eagle)
        for layer in range(2):
            rows = [
                torch.tensor([t * 100 + layer * 10 + p for t in tokens[: len(slots)]])[
                    :, None, None
                ]
                .expand(-1, 1, 2)
                .contiguous()
                for p in range(2)
            ]
            self.pool.set_kv_buffer(layer, slots, *rows)
        self.tree.insert(InsertParams(self.key(tokens, extra_key), slots))

    def poll(self):
        self.tree.check_hicache_events()

    def save(self, tokens, extra_key=None):
        """Insert, and let it reach storage."""
        self.insert(tokens, extra_key)
        for _ in range(3):
            self.poll()
        assert not self.tree.ongoing_backup

    def match(self, tokens, extra_key=None):
        found = self.tree.match_prefix(MatchPrefixParams(self.key(tokens, extra_key)))
        return len(found.device_indices), found.host_hit_length

    def prefetch(self, rid, tokens, extra_key=None):
        found = self.tree.match_prefix(MatchPrefixParams(self.key(tokens, extra_key)))
        node = found.last_host_node
        rest = list(tokens)[self.tree.prefix_length(node) :]
        self.tree.prefetch_from_storage(rid, node, rest, extra_key=extra_key)

    def forget(self):
        """Both upper tiers are empty."""
        self.tree.evict(EvictParams(self.allocator.size))
        self.tree.evict_host(self.host.size)

    def rows(self, tokens, extra_key=None):
        """The first K of each token on the host, layer 0."""
        node = self.tree.match_prefix(MatchPrefixParams(self.key(tokens, extra_key))).last_host_node
        slots = torch.cat([n.host_value for n in reversed(self.tree._path(node))])
        return (self.host.k_buffer[0][slots][:, 0, 0] // 100).tolist()

    def queued(self):
        """Pages that wait to be freed."""
        return self.storage.host_mem_release_queue.qsize()
