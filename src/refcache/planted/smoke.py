"""A fixed smoke test of 20 calls, such as a project without property tests would have.

A planted bug must pass it: a bug that any single use shows proves nothing about the suites.
"""

import tempfile
from array import array

import torch

from refcache.keys import TOKEN, RadixKey
from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.target.base import Target
from refcache.oracle.target.config import CacheConfig, HiCacheConfig, SequencesConfig
from refcache.runtime import SimulatedRuntime, eager
from refcache.types import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams


def smoke(target: Target) -> None:
    """Two sequences on an allocator, one prefix and one request on a tree, all with room to spare.

    Raises:
        AssertionError: an answer is not the expected one.
    """
    config = CacheConfig(page_size=2, size=64)
    allocator = target.allocator(config)
    one, two, ends, last = (torch.tensor([n]) for n in (0, 3, 4, -1))
    slots = allocator.alloc_extend(one, one, two, two, last, 3)  # 1
    assert len(slots) == 3
    slots = torch.cat([slots, allocator.alloc_decode(ends, ends, slots[-1:])])  # 2
    assert slots[-1] == slots[-2] + 1
    assert allocator.available_size() == 60  # 3
    allocator.free(slots)  # 4
    assert allocator.available_size() == 64  # 5
    allocator.free_group_begin()  # 6
    allocator.free_group_end()  # 7

    rows = target.req_to_token_pool(config)
    tree = target.tree(config, allocator, rows)
    key, longer = RadixKey([1, 2, 3, 4]), RadixKey([1, 2, 3, 4, 5, 6])
    value = allocator.alloc(4)  # 8
    assert tree.insert(InsertParams(key, value)).prefix_len == 0  # 9
    found = tree.match_prefix(MatchPrefixParams(longer))  # 10
    assert found.device_indices.tolist() == value.tolist()
    assert tree.inc_lock_ref(found.last_device_node).delta == -4  # 11
    assert tree.evict(EvictParams(4)).num_tokens_evicted == 0  # 12

    req = Request("smoke", [1, 2, 3, 4, 5], None, 0)
    rows.alloc([req])  # 13
    rows.write((req.req_pool_idx, slice(0, 6)), torch.cat([value, allocator.alloc(2)]))  # 14, 15
    req.cache_protected_len, req.last_node, req.computed = 4, found.last_device_node, 6
    req.prefix_indices, req.output_ids = value, array(TOKEN, [6])
    tree.cache_finished_req(req)  # 16
    rows.free(req)  # 17
    assert len(tree.match_prefix(MatchPrefixParams(longer)).device_indices) == 6  # 18
    assert tree.evict(EvictParams(2)).num_tokens_evicted == 2  # 19
    assert allocator.available_size() == 60  # 20
    if "hicache" in target.capabilities:
        hicache_smoke(target)
    if "offload" in target.capabilities:
        offload_smoke(target)
    if "storage" in target.capabilities:
        storage_smoke(target)
    if "sequences" in target.capabilities:
        sequences_smoke(target)


def hicache_smoke(target: Target) -> None:
    """One prompt through both tiers and back, with room to spare: what a demonstration shows.

    Raises:
        AssertionError: an answer is not the expected one.
    """
    config = HiCacheConfig(page_size=2, size=64, host_size=128, load_back_threshold=2)
    machine = SimulatedRuntime(eager)
    stream = machine.Stream()
    parts = target.hicache(config, machine, stream, lambda allocator: allocator)
    tree, pool, key = parts.tree, parts.pool, RadixKey([1, 2, 3, 4])
    slots = parts.allocator.alloc(4)  # 1
    for layer in range(pool.layer_num):
        rows = [torch.full((4, p.head_num, p.head_dim), 7 + layer) for p in pool.planes]
        pool.set_kv_buffer(layer, slots, *rows)  # 2, 3
    assert tree.insert(InsertParams(key, slots)).prefix_len == 0  # 4
    machine.synchronize()  # 5
    tree.check_hicache_events()  # 6
    assert tree.evict(EvictParams(4)).num_tokens_evicted == 4  # 7
    found = tree.match_prefix(MatchPrefixParams(key))  # 8
    assert (len(found.device_indices), found.host_hit_length) == (0, 4)
    loaded, node = tree.init_load_back(InitLoadBackParams(found.last_host_node, 4))  # 9
    assert len(loaded) == 4
    assert tree.ready_to_load_host_cache() == 0  # 10
    machine.synchronize()  # 11
    tree.check_hicache_events()  # 12
    assert bool((pool.get_key_buffer(0)[loaded] == 7).all())  # 13
    assert tree.match_prefix(MatchPrefixParams(key)).host_hit_length == 0  # 14
    tree.inc_lock_ref(node)  # 15
    tree.dec_lock_ref(node)  # 16
    assert tree.evict(EvictParams(4)).num_tokens_evicted == 4  # 17
    assert tree.evict_host(4) == 4  # 18
    assert parts.allocator.available_size() == 64  # 19
    tree.reset()  # 20


def offload_smoke(target: Target) -> None:
    """Two blocks to the host and back, with room to spare.

    Raises:
        AssertionError: an answer is not the expected one.
    """
    manager = target.offload(CacheConfig(page_size=2, size=16))
    keys = [bytes([0, n]) for n in range(2)]
    assert manager.lookup(keys) == 0  # 1
    slots = manager.prepare_store(keys)  # 2
    assert slots is not None
    manager.complete_store(keys, True)  # 3
    assert manager.lookup(keys) == 2  # 4
    assert list(manager.prepare_load(keys)) == [slots[key] for key in keys]  # 5
    manager.complete_load(keys)  # 6
    manager.touch(keys)  # 7


def storage_smoke(target: Target) -> None:
    """Two pages stored, read and cleared, in a directory of their own.

    Raises:
        AssertionError: an answer is not the expected one.
    """
    with tempfile.TemporaryDirectory() as path:
        store = target.storage({"model_name": "org/m"}, path)
        keys = ["34fb", "c57b"]
        pages = [torch.full((16,), n, dtype=torch.uint8) for n in range(2)]
        assert not store.exists(keys[0])  # 1
        assert store.set(keys[0], pages[0])  # 2
        assert store.batch_set(keys, pages)  # 3
        assert store.batch_exists(keys) == 2  # 4
        found = store.get(keys[1], torch.zeros(16, dtype=torch.uint8))  # 5
        assert found.equal(pages[1])
        targets = [torch.zeros(16, dtype=torch.uint8) for _ in keys]
        assert all(map(torch.equal, store.batch_get(keys, targets), pages))  # 6
        again = target.storage({"model_name": "org/m"}, path)
        assert again.batch_exists(keys) == 2  # 7
        again.clear()  # 8
        assert again.batch_exists(keys) == 0  # 9


def sequences_smoke(target: Target) -> None:
    """One sequence, and another with the same beginning, with room to spare.

    Raises:
        AssertionError: an answer is not the expected one.
    """
    cache = target.sequences(SequencesConfig(page_size=2, size=32))
    assert cache.start(0, (1, 2, 3), None) == 0  # 1
    assert cache.grow(0, (1, 2, 3), 3)  # 2
    cache.computed(0, (1, 2, 3), 3)  # 3
    assert len(cache.table(0)) == 2  # 4
    cache.finish(0, (1, 2, 3))  # 5
    assert cache.start(1, (1, 2, 4), None) == 2  # 6
    assert cache.grow(1, (1, 2, 4), 3)  # 7
    cache.finish(1, (1, 2, 4))  # 8
