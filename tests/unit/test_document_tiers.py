"""What the document says of the tree over two tiers, its controller and its pools, by hand."""

import pytest
import torch

from refcache.allocator import PagedTokenToKVPoolAllocator
from refcache.controller import HiCacheController, LayerDoneCounter
from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.errors import WrongTier
from refcache.keys import RadixKey
from refcache.pool import (
    HostTensorAllocator,
    HybridLinearKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    host_pool_for,
)
from refcache.tree import HiRadixCache, RadixCache
from refcache.types import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    ServerArgs,
)

MODEL = ModelConfig(num_hidden_layers=2, vocab_size=3)
SIZES = {"page_size": 2, "max_total_tokens": 32, "context_length": 32, "max_running_requests": 2}


def make(model=MODEL, **more):
    return Scheduler(ServerArgs(**{**SIZES, "enable_hierarchical_cache": True, **more}), model)


def insert(tree, tokens):
    slots = tree.token_to_kv_pool_allocator.alloc(len(tokens))
    tree.insert(InsertParams(RadixKey(tokens), slots))
    tree.check_hicache_events()


def match(tree, tokens):
    return tree.match_prefix(MatchPrefixParams(RadixKey(tokens)))


# ---- what is made --------------------------------------------------------------------------------


def test_the_argument_selects_the_tree():
    assert type(make().tree_cache) is HiRadixCache
    assert type(make(enable_hierarchical_cache=False).tree_cache) is RadixCache
    assert make().enable_hierarchical_cache


def test_tree_controller_pool_and_worker_share_one_counter():
    scheduler = make()
    controller = scheduler.tree_cache.cache_controller
    counter = controller.layer_done_counter
    assert isinstance(controller, HiCacheController)
    assert counter.num_layers == 2
    assert scheduler.model_runner.token_to_kv_pool.layer_transfer_counter is counter
    assert scheduler.tp_worker.hicache_layer_transfer_counter is counter


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ({}, MHATokenToKVPoolHost),
        ({"kv_lora_rank": 3, "qk_rope_head_dim": 1}, MLATokenToKVPoolHost),
    ],
)
def test_the_host_pool_goes_with_the_attention(shape, kind):
    host = make(ModelConfig(num_hidden_layers=2, **shape)).tree_cache.token_to_kv_pool_host
    assert type(host) is kind
    assert host.pin_memory
    assert isinstance(host.allocator, HostTensorAllocator)


@pytest.mark.parametrize(
    ("layout", "neighbours"),
    [("layer_first", "a layer's tokens"), ("page_first", "a token's layers")],
)
def test_a_layout_says_what_is_side_by_side(layout, neighbours):
    host = make(hicache_mem_layout=layout).tree_cache.token_to_kv_pool_host
    first = host.k_buffer
    shape = {"layer_first": (2, host.size), "page_first": (host.size, 2)}
    assert first.shape[:2] == shape[layout]
    one = first[0].flatten()
    assert one.is_contiguous()
    assert len(one) == {"a layer's tokens": host.size, "a token's layers": 2}[neighbours]


def test_the_controller_has_the_document_s_attributes():
    scheduler = make(hicache_write_policy="write_back")
    tree, pool = scheduler.tree_cache, scheduler.model_runner.token_to_kv_pool
    c = tree.cache_controller
    assert c.mem_pool_device_allocator is scheduler.token_to_kv_pool_allocator
    assert (c.mem_pool_device, c.mem_pool_host) == (pool, tree.token_to_kv_pool_host)
    assert (c.write_policy, c.page_size, c.io_backend) == ("write_back", 2, "auto")
    assert (c.device, c.layer_num, c.tp_group) == (pool.device, 2, None)
    for queue in (c.load_queue, c.write_queue, c.ack_load_queue, c.ack_write_queue):
        assert queue == []
    assert len({id(c.write_stream), id(c.load_stream), id(scheduler.forward_stream)}) == 3


def test_a_pool_without_planes_is_refused():
    allocator = PagedTokenToKVPoolAllocator(32, 2, torch.int64, "cpu", kvcache=object())
    with pytest.raises(WrongTier, match="a object as device pool: expected a KVCache"):
        host_pool_for(allocator.get_kvcache(), ServerArgs(**SIZES))


def test_the_controller_takes_the_part_with_kv():
    """Of a pool for a hybrid model, whose layers have the model's ids."""
    pool = HybridLinearKVPool(32, torch.int64, 2, 1, 1, [1, 4], False, "cpu", None)
    allocator = PagedTokenToKVPoolAllocator(32, 2, torch.int64, "cpu", pool)
    host = host_pool_for(pool.full_kv_pool, ServerArgs(**SIZES))
    controller = HiCacheController(allocator, host, 2)
    assert controller.mem_pool_device is pool.full_kv_pool
    assert controller.layer_num == 2
    assert pool.full_kv_pool.layer_transfer_counter is controller.layer_done_counter
    assert pool.layer_transfer_counter is None  # or a getter would wait twice


def test_a_counter_starts_with_no_load():
    counter = LayerDoneCounter(3)
    assert (counter.num_layers, counter.num_counters, len(counter.events)) == (3, 3, 3)
    assert (counter.producer_index, counter.consumer_index) == (-1, -1)
    assert [counter.update_producer() for _ in range(4)] == [0, 1, 2, 0]
    counter.set_consumer(2)
    assert (counter.producer_index, counter.consumer_index) == (0, 2)
    counter.reset()
    assert (counter.producer_index, counter.consumer_index) == (-1, -1)


# ---- what it does --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_under_write_back_nothing_is_written_before_an_eviction(policy):
    tree = make(hicache_write_policy=policy).tree_cache
    insert(tree, [1, 2, 3, 4])
    written = {"write_through": 1, "write_through_selective": 2, "write_back": 99}[policy]
    assert tree.root_node.children
    (node,) = tree.nodes()
    assert node.backuped is (written <= 1)
    insert(tree, [1, 2, 3, 4])
    assert node.backuped is (written <= 2)
    tree.evict(EvictParams(4))
    assert (node.evicted, node.backuped) == (True, True)


def two_nodes(tree):
    """``[1, 2]`` above ``[3, 4]``, both on the host only; the nodes."""
    insert(tree, [1, 2])
    insert(tree, [1, 2, 3, 4])
    tree.evict(EvictParams(4))
    upper, lower = sorted(tree.nodes(), key=lambda n: n.key.token_ids[0])
    assert upper.evicted
    assert lower.evicted
    return upper, lower


def test_a_match_has_four_results():
    tree = make().tree_cache
    insert(tree, [1, 2])
    insert(tree, [1, 2, 3, 4])
    tree.evict(EvictParams(2))
    upper, lower = sorted(tree.nodes(), key=lambda n: n.key.token_ids[0])
    found = match(tree, [1, 2, 3, 4, 5, 6])
    assert found.device_indices.tolist() == upper.value.tolist()
    assert (found.last_device_node, found.last_host_node) == (upper, lower)
    assert found.host_hit_length == 2
    nothing = match(tree, [9, 9])
    assert (nothing.last_device_node, nothing.last_host_node) == (tree.root_node, tree.root_node)
    assert (len(nothing.device_indices), nothing.host_hit_length) == (0, 0)
    one = match(tree, [1, 2, 3])  # whole pages only
    assert (len(one.device_indices), one.host_hit_length) == (2, 0)


def test_host_copies_go_from_the_leaf_to_the_root():
    tree = make().tree_cache
    upper, lower = two_nodes(tree)
    assert tree.evict_host(1) == 2
    assert set(tree.nodes()) == {upper}
    assert tree.evict_host(99) == 2
    assert not tree.nodes()
    assert lower.parent is None


def test_a_load_brings_the_path_from_the_root_on():
    tree = make().tree_cache
    tree.load_back_threshold = 1
    upper, lower = two_nodes(tree)
    host_slots = torch.cat([upper.host_value, lower.host_value])
    found = match(tree, [1, 2, 3, 4])
    slots, node = tree.init_load_back(InitLoadBackParams(found.last_host_node, 4))
    assert node is lower
    assert slots.tolist() == [*upper.value.tolist(), *lower.value.tolist()]
    (queued,) = tree.cache_controller.load_queue
    assert queued.host_indices.tolist() == host_slots.tolist()
    assert queued.device_indices.tolist() == slots.tolist()
    assert tree.ready_to_load_host_cache() == 0
    assert tree.cache_controller.load_queue == []


@pytest.mark.parametrize(
    ("threshold", "quota", "loaded"), [(4, None, 4), (5, None, 0), (4, 4, 4), (4, 3, 0)]
)
def test_loads_that_are_too_small_or_too_large_are_refused(threshold, quota, loaded):
    tree = make().tree_cache
    tree.load_back_threshold = threshold
    two_nodes(tree)
    found = match(tree, [1, 2, 3, 4])
    slots, node = tree.init_load_back(InitLoadBackParams(found.last_host_node, 4, quota))
    assert len(slots) == loaded
    assert node is (found.last_host_node if loaded else tree.root_node)


def test_the_largest_prefill_is_remembered():
    scheduler = make()
    for rid, tokens in {"a": [1, 2, 3], "b": [2, 2, 2]}.items():
        scheduler.submit(TokenizedGenerateReqInput(rid, tokens, SamplingParams(1)))
    scheduler.dispatch_event_loop()
    assert scheduler.max_prefill_bs == 2
