"""A caller written for SGLang's classes changes an import, and nothing else."""

import pytest
import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.engine.alloc import available_and_evictable_str
from refcache.errors import InvalidArgument, UnknownName
from refcache.events import BlockRemoved, BlockStored
from refcache.keys import RadixKey
from refcache.tree import RadixCache, TreeNode, strategies
from refcache.types import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
)


def tree(page_size: int = 1, **more: object) -> RadixCache:
    allocator = PagedTokenToKVPoolAllocator(16, page_size, torch.float16, "cpu", None)
    return RadixCache(CacheInitParams(False, None, allocator, page_size, **more))


# ---- the tree ------------------------------------------------------------------------------------


def test_what_a_scheduler_asks_a_tree():
    cache = tree()
    assert not cache.supports_mamba()
    assert not cache.supports_swa()
    assert not cache.is_chunk_cache()
    assert cache.is_tree_cache()
    slots = cache.token_to_kv_pool_allocator.alloc(3)
    cache.insert(InsertParams(RadixKey([1, 2, 3]), slots))
    cache.inc_lock_ref(cache.match_prefix(MatchPrefixParams(RadixKey([1]))).last_device_node)
    assert (cache.full_evictable_size(), cache.full_protected_size()) == (2, 1)
    assert (cache.swa_evictable_size(), cache.swa_protected_size()) == (0, 0)
    told = "Available tokens: 15 (available_size=13 + evictable_size=2)\n"
    assert cache.available_and_evictable_str() == told == available_and_evictable_str(cache)


def test_a_tree_says_what_it_was_made_with():
    cache = tree(enable_kv_cache_events=True, eviction_policy="SLRU", cache_ttl_seconds=None)
    assert cache.enable_kv_cache_events
    assert cache.device == torch.device("cpu")
    assert cache.eviction_policy == "slru"
    assert isinstance(cache.eviction_strategy, strategies.SLRUStrategy)


def test_a_time_to_live_is_refused():
    with pytest.raises(InvalidArgument, match=r"cache_ttl_seconds=2\.0: expected None"):
        tree(cache_ttl_seconds=2.0)


def test_parameters_and_results_have_every_field():
    params = InsertParams(RadixKey([1]), None, None, 0, 0, True, 7)
    assert (params.chunked, params.priority) == (True, 7)
    assert EvictParams(3, swa_num_tokens=1, mamba_num=2).num_tokens == 3
    assert EvictResult(3, 0, 0) == EvictResult(num_tokens_evicted=3)
    assert not InsertResult(0).mamba_exist
    assert IncLockRefResult().swa_uuid_for_lock is None


def test_a_recurrent_state_is_not_lost_silently():
    cache = tree()
    slots = cache.token_to_kv_pool_allocator.alloc(1)
    with pytest.raises(InvalidArgument, match="mamba_value"):
        cache.insert(InsertParams(RadixKey([1]), slots, mamba_value=slots))
    assert cache.total_size() == 0


def test_an_insert_without_slots_caches_the_whole_pages():
    cache = tree(page_size=2)
    cache.insert(InsertParams(RadixKey([8, 9, 7])))
    match = cache.match_prefix(MatchPrefixParams(RadixKey([8, 9, 7])))
    assert match.device_indices.tolist() == [8, 9]


def test_children_are_filed_as_sglang_files_them():
    single, paged = tree(), tree(page_size=2)
    for cache in (single, paged):
        cache.insert(InsertParams(RadixKey([1, 2])))
        cache.insert(InsertParams(RadixKey([3, 4], "lora")))
    assert list(single.root_node.children) == [1, ("lora", 3)]
    assert list(paged.root_node.children) == [(1, 2), ("lora", (3, 4))]


# ---- events and hashes ---------------------------------------------------------------------------


def test_events_carry_lists_and_nodes_hex_text():
    cache = tree(page_size=2, enable_kv_cache_events=True)
    cache.insert(InsertParams(RadixKey([1, 2, 3, 4]), cache.token_to_kv_pool_allocator.alloc(4)))
    assert len(cache.kv_event_queue) == 3
    _, first, second = cache.take_events()
    assert cache.kv_event_queue == []
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.token_ids, second.token_ids) == ([1, 2], [3, 4])
    assert second.parent_block_hash == first.block_hashes[0]
    (node,) = cache.root_node.children.values()
    assert [len(bytes.fromhex(text)) for text in node.hash_value] == [32, 32]
    assert node.get_last_hash_value() == node.hash_value[-1]
    upper = cache.match_prefix(MatchPrefixParams(RadixKey([1, 2]))).last_device_node
    (lower,) = upper.children.values()
    assert lower.get_prefix_hash_values(lower) == upper.hash_value + lower.hash_value
    assert lower.get_prefix_hash_values(None) == []
    cache.evict(EvictParams(4))
    removed = cache.take_events()
    assert removed == [BlockRemoved(s.block_hashes, "GPU") for s in (second, first)]


# ---- nodes and keys ------------------------------------------------------------------------------


def test_a_node_is_made_without_arguments():
    TreeNode.counter = 0
    first, named, third = TreeNode(), TreeNode(id=42), TreeNode(priority=3)
    assert (first.id, named.id, third.id) == (0, 42, 2)
    assert first < third
    assert not third < first
    assert (first.key, first.value, first.parent, first.hash_value) == (None,) * 4
    assert first.get_last_hash_value() is None
    assert repr(third) == "TreeNode(2, 0 tokens, -, lock 0)"


def test_the_ids_of_a_tree_do_not_depend_on_other_nodes():
    TreeNode()
    cache = tree()
    cache.insert(InsertParams(RadixKey([1])))
    assert [node.id for node in cache.nodes()] == [1]


def test_token_ids_of_a_key_are_a_list():
    assert RadixKey([1, 2, 3]).token_ids == [1, 2, 3]
    assert RadixKey([1, 2, 3])[1:].token_ids == [2, 3]
    assert RadixKey([(1, 2), (2, 3)], is_bigram=True).token_ids == [(1, 2), (2, 3)]


# ---- eviction strategies -------------------------------------------------------------------------


def node(**fields: float) -> TreeNode:
    made = TreeNode()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("name", "priority"),
    [
        ("LRU", 5),
        ("LFU", (3, 5)),
        ("FIFO", 2),
        ("MRU", -5),
        ("FILO", -2),
        ("Priority", (7, 5)),
        ("SLRU", (1, 5)),
    ],
)
def test_strategies_are_classes(name, priority):
    used = node(last_access_time=5, creation_time=2, hit_count=3, priority=7)
    strategy = getattr(strategies, f"{name}Strategy")()
    assert isinstance(strategy, strategies.EvictionStrategy)
    assert strategy.get_priority(used) == priority
    assert type(strategies.eviction_strategy(name)) is type(strategy)


def test_slru_has_a_threshold():
    assert strategies.SLRUStrategy().protected_threshold == 2
    strict = strategies.SLRUStrategy(protected_threshold=4)
    assert strict.get_priority(node(hit_count=3, last_access_time=1)) == (0, 1)
    with pytest.raises(InvalidArgument, match="protected_threshold=-1"):
        strategies.SLRUStrategy(-1)


def test_one_token_pages_go_to_either_allocator():
    allocator = TokenToKVPoolAllocator(4, torch.float16, "cpu", None)
    assert RadixCache(CacheInitParams(False, None, allocator, 1)).device == torch.device("cpu")
    with pytest.raises(UnknownName, match="did you mean 'slru'"):
        tree(eviction_policy="slr")
