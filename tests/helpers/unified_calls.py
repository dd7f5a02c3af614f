"""The same calls on ``UnifiedRadixCache``, refcache's or SGLang 0.5.23's.

As a program: what the release answers, as JSON.
"""

import json
from array import array
from types import SimpleNamespace
from typing import Any

import torch

KINDS = {"full": ("FULL",), "mamba": ("FULL", "MAMBA")}


def ours() -> Any:
    """refcache's names."""
    from refcache import allocator, pool
    from refcache.keys import RadixKey
    from refcache.tree import unified
    from refcache.types import EvictParams, MatchPrefixParams

    return SimpleNamespace(
        CacheInitParams=unified.CacheInitParams,
        ComponentType=unified.ComponentType,
        EvictParams=EvictParams,
        HybridReqToTokenPool=pool.HybridReqToTokenPool,
        InsertParams=unified.InsertParams,
        MatchPrefixParams=MatchPrefixParams,
        ReqToTokenPool=pool.ReqToTokenPool,
        TokenToKVPoolAllocator=allocator.TokenToKVPoolAllocator,
        UnifiedRadixCache=unified.UnifiedRadixCache,
        key=RadixKey,
        states=lambda rows: rows.mamba_pool,
        more={"mamba_cache_chunk_size": 4},
    )


def theirs() -> Any:
    """The release's."""
    from refcache.peers import device, engine
    from refcache.runtime import ImmediateRuntime

    release = engine.load("0.5.23")
    device.use(ImmediateRuntime())
    context = release.module("runtime_context").get_context()
    context.override_server_args(hicache_write_policy="write_through").install()
    mamba = release.module("mem_cache.unified_cache.components.mamba")
    mamba.mamba_cache_chunk_size = lambda: 4
    mamba.mamba_checkpoint_grid = lambda page_size: 4
    pools = release.module("mem_cache.memory_pool")
    key = release.radix_cache.RadixKey
    return SimpleNamespace(
        CacheInitParams=release.module("mem_cache.cache_init_params").CacheInitParams,
        ComponentType=release.module("mem_cache.unified_cache.component_type").ComponentType,
        EvictParams=release.params.EvictParams,
        HybridReqToTokenPool=pools.HybridReqToTokenPool,
        InsertParams=release.params.InsertParams,
        MatchPrefixParams=release.params.MatchPrefixParams,
        ReqToTokenPool=pools.ReqToTokenPool,
        TokenToKVPoolAllocator=release.allocator.TokenToKVPoolAllocator,
        UnifiedRadixCache=release.module("mem_cache.unified_radix_cache").UnifiedRadixCache,
        key=lambda tokens: key(array("q", tokens)),
        states=lambda rows: rows.mamba_allocator,
        more={"tree_core_backend": "python"},
    )


def make(kit: Any, kind: str) -> Any:
    """An empty tree; ``rows`` and ``slots`` are its pools."""
    shape = SimpleNamespace(conv=[(3, 2)], temporal=(2, 2, 1))
    dtype = SimpleNamespace(conv=torch.float32, temporal=torch.float32)
    if kind == "mamba":
        rows = kit.HybridReqToTokenPool(
            size=4,
            mamba_size=8,
            mamba_spec_state_size=0,
            max_context_len=32,
            device="cpu",
            enable_memory_saver=False,
            cache_params=SimpleNamespace(shape=shape, dtype=dtype, layers=[0, 1]),
            mamba_layer_ids=[0, 1],
            enable_mamba_extra_buffer=False,
        )
    else:
        rows = kit.ReqToTokenPool(4, 32, "cpu", False)
    slots = kit.TokenToKVPoolAllocator(32, torch.float32, "cpu", None, False)
    params = kit.CacheInitParams(
        disable=False,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=slots,
        page_size=1,
        tree_components=tuple(kit.ComponentType[name] for name in KINDS[kind]),
        **kit.more,
    )
    tree = kit.UnifiedRadixCache(params)
    return SimpleNamespace(tree=tree, rows=rows, slots=slots, kit=kit, kind=kind)


def insert(run: Any, tokens: list[int]) -> int:
    params = run.kit.InsertParams(key=run.kit.key(tokens), value=run.slots.alloc(len(tokens)))
    if run.kind == "mamba":
        params.mamba_value = run.kit.states(run.rows).alloc(1)
    result = run.tree.insert(params)
    if result.mamba_exist:
        run.kit.states(run.rows).free(params.mamba_value)
    return result.prefix_len


def match(run: Any, tokens: list[int]) -> Any:
    return run.tree.match_prefix(run.kit.MatchPrefixParams(key=run.kit.key(tokens)))


def free(run: Any) -> list[int]:
    found = [run.slots.available_size()]
    if run.kind == "mamba":
        found.append(run.kit.states(run.rows).available_size())
    return found


def answers(kit: Any, kind: str) -> list[Any]:
    """What the calls answer, one after the other."""
    run = make(kit, kind)
    told: list[Any] = []
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 4], [9], [1, 2, 3, 4]):
        told.append(["insert", tokens, insert(run, tokens), free(run)])
        for looked_up in ([1, 2, 3, 4, 0], [1, 2, 3, 4, 5, 6, 0], [1, 2, 0]):
            found = match(run, looked_up)
            slots = run.tree.path_device_indices(found.last_device_node)
            told.append(
                [
                    "match",
                    looked_up,
                    found.device_prefix_len,
                    slots.tolist(),
                    found.best_match_node == found.last_device_node,
                    found.full_kv_hit_length,
                    found.mamba_branching_seqlen,
                ]
            )
    node = match(run, [1, 2, 3, 4, 5, 6]).last_device_node
    held = run.tree.inc_lock_ref(node)
    told.append(["lock", held.delta, run.tree.full_protected_size()])
    evicted = run.tree.evict(kit.EvictParams(num_tokens=8, mamba_num=0))
    told.append(["evict", evicted.num_tokens_evicted, evicted.mamba_num_evicted, free(run)])
    run.tree.dec_lock_ref(node, held.to_dec_params())
    told.append(["unlock", run.tree.full_protected_size(), run.tree.full_evictable_size()])
    evicted = run.tree.evict(kit.EvictParams(num_tokens=8, mamba_num=0))
    told.append(["evict", evicted.num_tokens_evicted, evicted.mamba_num_evicted, free(run)])
    return told


if __name__ == "__main__":
    names = theirs()
    print(json.dumps({kind: answers(names, kind) for kind in KINDS}))
