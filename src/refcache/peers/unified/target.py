"""SGLang's unified radix tree on trial (0.5.23), with its Python core or its Rust core.

From this release on requests keep their KV in a record, locks are receipts, and a request is
cached by ``checkpoint``; :mod:`refcache.peers.unified.calls` translates the calls that the
suites make, and decides nothing. What a request gives back goes through the release's own
``release_kv_cache``.
"""

from array import array
from collections.abc import Callable
from typing import Any

from refcache.oracle.target.config import CacheConfig, HiCacheConfig, HiCacheParts
from refcache.oracle.view.host import HostView
from refcache.oracle.view.tree import TreeView
from refcache.peers.sglang import SglangTarget, readable, stop_watching
from refcache.peers.unified import cores
from refcache.peers.unified import hicache as unified_hicache
from refcache.peers.unified import view as unified_view
from refcache.peers.unified.calls import (
    Segments,
    insert_params,
    load_back_params,
    translated,
    with_records,
    with_segments,
)


class UnifiedTarget(SglangTarget):
    """Release 0.5.23; ``+rust``: the tree's core is the compiled one of the wheel."""

    def __init__(self, version: str, variant: str = "") -> None:
        super().__init__(version, variant)
        self.core = "python"
        if variant == "rust":
            self.core = cores.BACKEND
            cores.register(self.engine)
        engine, params = self.engine, self.engine.params
        key = engine.radix_cache.RadixKey
        self.RadixKey = lambda tokens, extra_key=None: key(array("q", tokens), extra_key)
        self.InsertParams = insert_params(params.InsertParams)
        self.InitLoadBackParams = load_back_params
        record = engine.module("managers.schedule_batch").ReqKvInfo
        rows = engine.module("mem_cache.memory_pool").ReqToTokenPool
        self._rows_class = with_records(readable(rows), record)
        self._unified_class = translated(
            engine.module("mem_cache.unified_radix_cache").UnifiedRadixCache,
            params,
            engine.module("mem_cache.common").release_kv_cache,
            record,
        )
        self._full = engine.module("mem_cache.unified_cache.component_type").ComponentType.FULL
        self.configure(hicache_write_policy="write_through")

    def configure(self, **fields: Any) -> Any:
        """Publish server arguments for the whole process, as a launcher does."""
        context = self.engine.module("runtime_context").get_context()
        return context.override_server_args(**fields).install()

    def make_allocator(self, config: CacheConfig, pool: Any) -> Any:
        made = super().make_allocator(config, pool)
        made.__class__ = with_segments(type(made))
        return made

    def init_params(self, config: CacheConfig, allocator: Any, rows: Any, **more: Any) -> Any:
        return super().init_params(
            config,
            Segments(allocator),
            rows,
            tree_components=(self._full,),
            tree_core_backend=self.core,
            **more,
        )

    def unified(self, params: Any) -> Any:
        """An empty tree, which answers the calls of the suites."""
        return self._unified_class(params)

    def tree(self, config: CacheConfig, allocator: Any, req_to_token_pool: Any) -> Any:
        stop_watching(allocator)
        return self.unified(self.init_params(config, allocator, req_to_token_pool))

    def hicache(
        self,
        config: HiCacheConfig,
        runtime: Any,
        forward_stream: Any,
        wrap: Callable[[Any], Any],
    ) -> HiCacheParts:
        def watched(allocator: Any) -> Any:
            made = wrap(allocator)
            stop_watching(made)
            return made

        return unified_hicache.build(self, config, runtime, forward_stream, watched)

    def inspect(self, tree: Any) -> TreeView:
        return unified_view.inspect_tree(tree)

    def inspect_host(self, tree: Any) -> HostView:
        return unified_view.inspect_host(tree)

    def host_pool(self, tree: Any) -> Any:
        return tree.host_pool_group.anchor_entry.host_pool

    def pin_on_host(self, tree: Any, handle: Any) -> None:
        tree.inc_host_lock_ref(handle)
