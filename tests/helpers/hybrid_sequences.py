"""Published bugs of hybrid caches on one tier, each as its smallest sequence of calls.

A sequence is given the classes it runs on, refcache's or a release's, and returns what it found
wrong, in words; nothing when all is right. As a program, with the names of sequences: what they
find on SGLang 0.5.10, unpacked, as JSON.
"""

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

Kit = SimpleNamespace
"""Classes by their names, which both have."""
NAMES = {
    "allocator": ("SWATokenToKVPoolAllocator",),
    "pool": ("HybridLinearKVPool", "ReqToTokenPool", "SWAKVPool"),
    "controller": ("LayerDoneCounter",),
    "tree": ("SWARadixCache",),
    "keys": ("RadixKey",),
    "types": (
        "CacheInitParams",
        "DecLockRefParams",
        "EvictParams",
        "InsertParams",
        "MatchPrefixParams",
    ),
}
THEIRS = {
    "SWATokenToKVPoolAllocator": "mem_cache.swa_memory_pool",
    "SWAKVPool": "mem_cache.swa_memory_pool",
    "HybridLinearKVPool": "mem_cache.memory_pool",
    "ReqToTokenPool": "mem_cache.memory_pool",
    "LayerDoneCounter": "managers.cache_controller",
    "SWARadixCache": "mem_cache.swa_radix_cache",
    "RadixKey": "mem_cache.radix_cache",
    "CacheInitParams": "mem_cache.cache_init_params",
}


def ours() -> Kit:
    """refcache's classes."""
    import refcache.allocator
    import refcache.controller
    import refcache.keys
    import refcache.pool
    import refcache.tree
    import refcache.types

    found = {n: getattr(getattr(refcache, m), n) for m, names in NAMES.items() for n in names}
    return Kit(**found)


def theirs() -> Kit:
    """Those of SGLang 0.5.10."""
    from refcache.peers import device, engine
    from refcache.runtime import ImmediateRuntime

    release = engine.load("0.5.10")
    device.use(ImmediateRuntime())
    names = [name for group in NAMES.values() for name in group]
    modules = {name: THEIRS.get(name, "mem_cache.base_prefix_cache") for name in names}
    return Kit(**{name: getattr(release.module(m), name) for name, m in modules.items()})


# ---- what the sequences are made of --------------------------------------------------------------


def windows(
    kit: Kit, window: int, page: int = 1, full: int = 32, swa: int = 32, **more: Any
) -> Any:
    """A tree of windows; ``tree.slots`` is its allocator."""
    kv = kit.SWAKVPool(
        size=full,
        size_swa=swa,
        page_size=page,
        dtype=torch.float32,
        head_num=1,
        head_dim=1,
        swa_attention_layer_ids=[0],
        full_attention_layer_ids=[1],
        enable_kvcache_transpose=False,
        device="cpu",
    )
    slots = kit.SWATokenToKVPoolAllocator(
        size=full,
        size_swa=swa,
        page_size=page,
        dtype=torch.float32,
        device="cpu",
        kvcache=kv,
        need_sort=False,
    )
    params = kit.CacheInitParams(
        disable=False,
        req_to_token_pool=kit.ReqToTokenPool(4, 32, "cpu", False),
        token_to_kv_pool_allocator=slots,
        page_size=page,
        sliding_window_size=window,
        **more,
    )
    tree = kit.SWARadixCache(params)
    tree.slots = slots
    return tree


def insert(kit: Kit, tree: Any, tokens: list[int], gone: int = 0) -> None:
    """As a request that has given back the window slots of its first ``gone`` tokens."""
    slots = tree.slots.alloc(len(tokens))
    if gone:
        tree.slots.free_swa(slots[:gone])
    tree.insert(kit.InsertParams(kit.RadixKey(tokens), slots, swa_evicted_seqlen=gone))


def match(kit: Kit, tree: Any, tokens: list[int]) -> Any:
    return tree.match_prefix(kit.MatchPrefixParams(kit.RadixKey(tokens)))


def accounts(tree: Any, requests: int = 0) -> Iterator[str]:
    """Window slots that are neither free, nor a node's, nor a request's; nodes without theirs."""
    available, size = tree.slots.swa_available_size(), tree.slots.size_swa
    cached = tree.swa_evictable_size() + tree.swa_protected_size()
    if available + cached + requests != size:
        yield f"of {size} window slots {available} are free, {cached} cached, {requests} running"
    mapping = tree.slots.full_to_swa_index_mapping
    below = [tree.root_node]
    while below:
        node = below.pop()
        below += node.children.values()
        if (
            node is not tree.root_node
            and not node.swa_tombstone
            and (mapping[node.value] < 1).any()
        ):
            yield f"a node of {len(node.key)} tokens counts window slots that are gone"


def request(kit: Kit, tree: Any, tokens: list[int], gone: int) -> Any:
    """A running request that has given back the window slots of its first ``gone`` tokens."""
    req = SimpleNamespace(
        req_pool_idx=0,
        origin_input_ids=tokens,
        output_ids=[],
        fill_ids=tokens,
        extra_key=None,
        prefix_indices=torch.empty(0, dtype=torch.int64),
        cache_protected_len=0,
        last_node=tree.root_node,
        priority=None,
        swa_uuid_for_lock=None,
        swa_evicted_seqlen=gone,
        kv_committed_len=len(tokens),
        kv_committed_freed=False,
        pop_committed_kv_cache=lambda: len(tokens),
    )
    slots = tree.slots.alloc(len(tokens))
    tree.slots.free_swa(slots[:gone])
    tree.req_to_token_pool.req_to_token[0, : len(tokens)] = slots.to(torch.int32)
    tree.inc_lock_ref(tree.root_node)
    return req


# ---- the sequences -------------------------------------------------------------------------------


def h01(kit: Kit) -> Iterator[str]:
    """Layers 0 and 1 have states, 5 has KV: three events for the three layers, waited for by id."""
    pool = kit.HybridLinearKVPool(
        size=4,
        dtype=torch.float32,
        page_size=1,
        head_num=1,
        head_dim=1,
        full_attention_layer_ids=[5],
        enable_kvcache_transpose=False,
        device="cpu",
        enable_memory_saver=False,
        mamba_pool=None,
    )
    for events in (6, 3):
        counter = kit.LayerDoneCounter(events)
        counter.set_consumer(counter.update_producer())
        pool.register_layer_transfer_counter(counter)
        try:
            pool.get_key_buffer(5)
        except Exception as error:
            refused = isinstance(error, ValueError) and events == 3
            if not refused:
                yield f"{events} events: {error!r}"


def w01(kit: Kit) -> Iterator[str]:
    """Window slots of a whole key are gone when it is cached."""
    tree = windows(kit, window=4)
    insert(kit, tree, [1, 2, 3, 4, 5, 6], gone=6)
    yield from accounts(tree)


def w02(kit: Kit) -> Iterator[str]:
    """A decode needs a page of each pool, and the window's is short."""
    tree = windows(kit, window=4, page=4, full=32, swa=8)

    def lengths(n: int) -> torch.Tensor:
        return torch.tensor([n])

    zero = lengths(0)
    last = tree.slots.alloc_extend(zero, zero, lengths(4), lengths(4), lengths(-1), 4)[-1:]
    last = tree.slots.alloc_decode(lengths(5), lengths(5), last)
    before = tree.slots.full_available_size()
    for length in (6, 7, 8):
        last = tree.slots.alloc_decode(lengths(length), lengths(length), last)
    if tree.slots.alloc_decode(lengths(9), lengths(9), last) is None:
        after = tree.slots.full_available_size()
        if after != before:
            yield f"a decode was refused, and {before} free tokens became {after}"


def w03(kit: Kit) -> Iterator[str]:
    """A request that goes on is cached with window slots that it has given back."""
    tree = windows(kit, window=2)
    tree.cache_unfinished_req(request(kit, tree, [1, 2, 3, 4, 5, 6], gone=3))
    yield from accounts(tree)


def w04(kit: Kit) -> Iterator[str]:
    """Half a page's window slots are given back, then the other half's, with another owner."""
    tree = windows(kit, window=4, page=4, full=32, swa=4)
    table = tree.slots.full_to_swa_index_mapping
    first, second = (tree.slots.full_attn_allocator.alloc(4) for _ in range(2))
    table[first] = tree.slots.swa_attn_allocator.alloc(4)
    tree.slots.free_swa(first[:2])
    table[second] = tree.slots.swa_attn_allocator.alloc(4)
    tree.slots.free_swa(first[2:])
    if tree.slots.swa_available_size():
        yield "a page of window slots was freed that another page of tokens has"


def w05(kit: Kit) -> Iterator[str]:
    """The node where a holder's locks end is split, and the window above it goes."""
    tree = windows(kit, window=4)
    insert(kit, tree, [1, 2, 3, 4, 5, 6, 7, 8])
    for length in (3, 6):
        match(kit, tree, list(range(1, length + 1)))
    last = match(kit, tree, [1, 2, 3, 4, 5, 6, 7, 8]).last_device_node
    uuid = tree.inc_lock_ref(last).swa_uuid_for_lock
    tree.evict(kit.EvictParams(0, swa_num_tokens=8))
    match(kit, tree, [1, 2, 3, 4, 5])
    tree.dec_lock_ref(last, kit.DecLockRefParams(uuid))
    locked = tree.full_protected_size(), tree.swa_protected_size()
    if locked != (0, 0):
        yield f"nobody holds anything, and {locked} is locked"
    yield from accounts(tree)
    tree.evict(kit.EvictParams(8, swa_num_tokens=8))
    if tree.slots.full_available_size() != 32:
        yield "a leaf cannot be evicted"


def w07(kit: Kit) -> Iterator[str]:
    """Keys of pairs are one shorter than the tokens whose window slots are counted."""
    tree = windows(kit, window=2, is_eagle=True)
    slots = tree.slots.alloc(6)
    tree.slots.free_swa(slots)
    key = kit.RadixKey([1, 2, 3, 4, 5, 6], None, False)
    tree.insert(kit.InsertParams(key, slots, swa_evicted_seqlen=6))
    yield from accounts(tree)


def w08(kit: Kit) -> Iterator[str]:
    """The window's pool is short, and tokens of it are asked for."""
    tree = windows(kit, window=2, full=32, swa=8)
    insert(kit, tree, [1, 2, 3, 4, 5, 6], gone=4)
    insert(kit, tree, [7, 8, 9])
    before = tree.slots.swa_available_size()
    told = tree.evict(kit.EvictParams(0, swa_num_tokens=4)).swa_num_tokens_evicted
    grown = tree.slots.swa_available_size() - before
    if grown < 4 or told != grown:
        yield f"4 were asked for; the answer is {told}, and {grown} are free"


def w09(kit: Kit) -> Iterator[str]:
    """What lies behind the window has lost its slots; the prefix is usable all the same."""
    tree = windows(kit, window=2)
    insert(kit, tree, [1, 2, 3, 4, 5, 6], gone=4)
    insert(kit, tree, [1, 2, 3, 4, 5, 6, 7, 8], gone=4)
    for length, usable in ((8, 8), (6, 6), (5, 0)):
        found = len(match(kit, tree, list(range(1, length + 1))).device_indices)
        if found != usable:
            yield f"of {length} tokens {found} were found, {usable} are usable"


SEQUENCES: dict[str, Callable[[Kit], Iterator[str]]] = {
    f.__name__.upper(): f for f in (h01, w01, w02, w03, w04, w05, w07, w08, w09)
}

if __name__ == "__main__":
    classes = theirs()
    print(json.dumps({name: list(SEQUENCES[name](classes)) for name in sys.argv[1:]}))
