"""SGLang's trees of two components on trial: ``MambaRadixCache`` and ``SWARadixCache``.

Real: the trees, the row pools, the state pool and both allocators. The bytes of states are written
by the suites, in the release's own tensors.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from refcache.oracle.target.config import (
    MAMBA_LAYERS,
    STATE_SHAPE,
    MambaConfig,
    MambaParts,
    SWAConfig,
)
from refcache.peers.engine import Engine

SHAPES = SimpleNamespace(conv=list(STATE_SHAPE[0]), temporal=STATE_SHAPE[1])
DTYPES = SimpleNamespace(conv=torch.int64, temporal=torch.int64)


def mamba(
    engine: Engine,
    config: MambaConfig,
    inner: Any,
    wrap: Callable[[Any], Any],
    states: Callable[[Any], Any],
    init_params: Callable[..., Any],
    readable: Callable[[type], type],
    with_lists: Callable[[type], type],
) -> MambaParts:
    """A fresh tree of tokens and states.

    Args:
        inner: the allocator; ``init_params``, ``readable``, ``with_lists``: see
            :mod:`refcache.peers.sglang`.
    """
    module = engine.module("mem_cache.mamba_radix_cache")
    chunk = SimpleNamespace(mamba_cache_chunk_size=config.chunk)
    module.get_global_server_args = lambda: chunk
    rows = readable(engine.module("mem_cache.memory_pool").HybridReqToTokenPool)(
        size=config.max_requests,
        mamba_size=config.states,
        mamba_spec_state_size=config.max_requests,
        max_context_len=config.context_length,
        device="cpu",
        enable_memory_saver=False,
        cache_params=SimpleNamespace(shape=SHAPES, dtype=DTYPES),
        mamba_layer_ids=list(MAMBA_LAYERS),
        enable_mamba_extra_buffer=config.extra_buffer,
        enable_overlap_schedule=config.overlap,
    )
    pool = rows.mamba_pool
    planes = [*pool.mamba_cache.conv, pool.mamba_cache.temporal]
    rows.mamba_pool = states(pool)
    tree = with_lists(module.MambaRadixCache)(
        init_params(config, inner, rows, enable_mamba_extra_buffer=config.extra_buffer)
    )
    tree.token_to_kv_pool_allocator = allocator = wrap(inner)
    return MambaParts(tree, allocator, rows, rows.mamba_pool, planes)


def swa(
    engine: Engine,
    config: SWAConfig,
    rows: Any,
    wrap: Callable[[Any], Any],
    init_params: Callable[..., Any],
    with_lists: Callable[[type], type],
) -> tuple[Any, Any, Any]:
    """A fresh tree over two pools, its allocator and its rows; arguments as for :func:`mamba`."""
    pools = engine.module("mem_cache.swa_memory_pool")
    kv = pools.SWAKVPool(
        size=config.size,
        size_swa=config.swa_size,
        page_size=config.page_size,
        dtype=torch.int64,
        head_num=1,
        head_dim=1,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        enable_kvcache_transpose=False,
        device="cpu",
    )
    inner = pools.SWATokenToKVPoolAllocator(
        size=config.size,
        size_swa=config.swa_size,
        page_size=config.page_size,
        dtype=torch.int64,
        device="cpu",
        kvcache=kv,
        need_sort=config.need_sort,
    )
    base = engine.module("mem_cache.swa_radix_cache").SWARadixCache
    params = init_params(config, inner, rows, sliding_window_size=config.window)
    tree = with_lists(base)(params)
    tree.token_to_kv_pool_allocator = allocator = wrap(inner)
    return tree, allocator, rows
