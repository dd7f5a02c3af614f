"""Target ``refcache``: the reference on trial, like anybody else's cache."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from refcache.errors import RefcacheError
from refcache.oracle.target.base import CAPABILITIES, Target
from refcache.oracle.target.config import (
    MAMBA_LAYERS,
    STATE_SHAPE,
    CacheConfig,
    HiCacheConfig,
    HiCacheParts,
    MambaConfig,
    MambaParts,
    SequencesConfig,
    SWAConfig,
)
from refcache.oracle.target.offload.contract import USES, OffloadTraits
from refcache.oracle.target.ops import OPS, interpret_kernels
from refcache.oracle.target.storage.contract import StorageTraits
from refcache.oracle.target.traits import Traits
from refcache.oracle.view.component import (
    ComponentView,
    inspect_full,
    inspect_states,
    inspect_window,
)
from refcache.oracle.view.host import HostView, inspect_hiradix
from refcache.oracle.view.tree import TreeView, inspect_radix
from refcache.types import CacheInitParams, ServerArgs

LAYERS = 2
TOKEN_BYTES = 8 * LAYERS * 3
"""What :class:`~refcache.oracle.target.offload.reference.HostBlocks` keeps of one token."""


class RefcacheTarget(Target):
    """The reference allocators and ``RadixCache``; a refusal must be a named error."""

    name = "refcache"
    capabilities = CAPABILITIES if find_spec("triton") else CAPABILITIES - {"ops"}
    errors = RefcacheError
    storage_traits = StorageTraits(bounded=True)
    offload_traits = OffloadTraits(uses=USES, token_bytes=TOKEN_BYTES)
    traits = Traits(eagle=True, caches_when="computed", merges_duplicates=True, host_tier=True)
    inner_steps = ("refcache.tree.kv_events:page_hashes",)

    def allocator(self, config: CacheConfig) -> Any:
        return self._allocator(config, None, None)

    @staticmethod
    def _allocator(config: CacheConfig, pool: Any, runtime: Any) -> Any:
        """The reference's allocator of these pages, over a pool or none."""
        from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

        given = (torch.int64, "cpu", pool, config.need_sort, runtime)
        if config.page_size == 1:
            return TokenToKVPoolAllocator(config.size, *given)
        return PagedTokenToKVPoolAllocator(config.size, config.page_size, *given)

    def tree(self, config: CacheConfig, allocator: Any, req_to_token_pool: Any) -> Any:
        from refcache.tree import RadixCache

        return RadixCache(self._params(config, allocator, req_to_token_pool))

    @staticmethod
    def _params(config: CacheConfig, allocator: Any, rows: Any, **more: Any) -> CacheInitParams:
        return CacheInitParams(**config.init_params(allocator, rows), **more)

    def inspect(self, tree: Any) -> TreeView:
        hybrid = tree.supports_mamba() or tree.supports_swa()
        look = inspect_full if hybrid else inspect_radix
        return look(tree, lambda key: key.child_key(tree.page_size))

    def mamba(
        self, config: MambaConfig, wrap: Callable[[Any], Any], states: Callable[[Any], Any]
    ) -> MambaParts:
        from refcache.pool import HybridReqToTokenPool
        from refcache.pool.mamba import BaseLinearStateParams, Mamba2StateDType, StateShape
        from refcache.tree import MambaRadixCache

        dtype = Mamba2StateDType(conv=torch.int64, temporal=torch.int64)
        rows = HybridReqToTokenPool(
            size=config.max_requests,
            mamba_size=config.states,
            mamba_spec_state_size=0,
            max_context_len=config.context_length,
            device="cpu",
            enable_memory_saver=False,
            cache_params=BaseLinearStateParams(
                shape=StateShape(*STATE_SHAPE), layers=MAMBA_LAYERS, dtype=dtype
            ),
            mamba_layer_ids=MAMBA_LAYERS,
            enable_mamba_extra_buffer=config.extra_buffer,
            enable_overlap_schedule=config.overlap,
        )
        planes = [*rows.mamba_pool.mamba_cache.conv, rows.mamba_pool.mamba_cache.temporal]
        rows.mamba_pool = states(rows.mamba_pool)
        allocator = wrap(self._allocator(config, None, None))
        buffers = {"enable_mamba_extra_buffer": config.extra_buffer}
        params = self._params(
            config, allocator, rows, mamba_cache_chunk_size=config.chunk, **buffers
        )
        return MambaParts(MambaRadixCache(params), allocator, rows, rows.mamba_pool, planes)

    def swa(self, config: SWAConfig, wrap: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        from refcache.allocator import SWATokenToKVPoolAllocator
        from refcache.tree import SWARadixCache

        sizes = (config.size, config.swa_size, config.page_size)
        allocator = wrap(
            SWATokenToKVPoolAllocator(*sizes, torch.int64, "cpu", None, config.need_sort)
        )
        rows = self.req_to_token_pool(config)
        params = self._params(config, allocator, rows, sliding_window_size=config.window)
        return SWARadixCache(params), allocator, rows

    def inspect_component(self, tree: Any) -> ComponentView:
        look = inspect_window if tree.supports_swa() else inspect_states
        return look(tree, self.inspect(tree))

    def hicache(
        self,
        config: HiCacheConfig,
        runtime: Any,
        forward_stream: Any,
        wrap: Callable[[Any], Any],
    ) -> HiCacheParts:
        from refcache.pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
        from refcache.tree.hiradix_cache import HiRadixCache

        size, page = config.size, config.page_size
        pool: Any
        if config.mla:
            pool = MLATokenToKVPool(size, page, torch.int64, 2, 1, LAYERS, "cpu", runtime=runtime)
        else:
            pool = MHATokenToKVPool(
                size, page, torch.int64, 1, 2, LAYERS, "cpu", v_head_dim=1, runtime=runtime
            )
        allocator = wrap(self._allocator(config, pool, runtime))
        rows = ReqToTokenPool(config.max_requests, config.context_length, runtime=runtime)
        params = self._params(
            config,
            allocator,
            rows,
            tp_cache_group=config.tp_group,
            hit_policy=config.hit_policy,
            runtime=runtime,
        )
        args = ServerArgs(
            page_size=page,
            enable_hierarchical_cache=True,
            hicache_ratio=(config.host_size - page / 2) / size,
            hicache_write_policy=config.write_policy,
            hicache_io_backend=config.io_backend,
            hicache_mem_layout=config.layout,
            chunked_prefill_size=None,
        )
        tree = HiRadixCache(params, args)
        tree.load_back_threshold = config.load_back_threshold
        tree.cache_controller.register_forward_stream(forward_stream)
        counter = tree.cache_controller.layer_done_counter
        host = tree.token_to_kv_pool_host
        if not config.small_loads:
            host.small_load_bytes = 0
        return HiCacheParts(tree, allocator, rows, pool, host, host.planes, counter)

    def inspect_host(self, tree: Any) -> HostView:
        return inspect_hiradix(tree, tree.token_to_kv_pool_host.free_slots)

    def offload(self, config: CacheConfig) -> Any:
        from refcache.oracle.target.offload.reference import HostBlocks

        one_page = replace(config, size=config.page_size)
        return HostBlocks(config, lambda pool: self._allocator(one_page, pool, None))

    def storage(self, engine: Mapping[str, Any], path: str, max_bytes: int | None = None) -> Any:
        from refcache.oracle.target.backends import file_backend

        return file_backend(engine, path, max_bytes)

    def sequences(self, config: SequencesConfig) -> Any:
        """Over a ``RadixCache``, or over a ``HiRadixCache`` where there is a host tier."""
        from refcache.oracle.target.sequences.hiradix import TieredSequences
        from refcache.oracle.target.sequences.radix import RadixSequences

        if config.host_size:
            given = {f.name: getattr(config, f.name) for f in fields(config)}
            return TieredSequences(HiCacheConfig(**given, delay=False), self.hicache)
        allocator, rows = self.allocator(config), self.req_to_token_pool(config)
        return RadixSequences(config, self.tree(config, allocator, rows), allocator, rows)

    def ops(self) -> Any:
        """The kernels, on the card, or through Triton's interpreter where there is none."""
        interpret_kernels()
        found = {op: importlib.import_module(f"refcache_ops.{op}.op") for op in OPS}
        return SimpleNamespace(**{op: module.run_kernel for op, module in found.items()})
