"""``RadixCache`` by hand: policies, refusals, and events, each with its small expected answer."""

from array import array

import pytest
import torch

from refcache.allocator import TokenToKVPoolAllocator
from refcache.errors import ForeignNode, InvalidArgument, LockUnderflow, UnknownName
from refcache.events import AllBlocksCleared, BlockRemoved, BlockStored
from refcache.keys import RadixKey
from refcache.pool import ReqToTokenPool
from refcache.tree import RadixCache
from refcache.types import CacheInitParams, EvictParams, InsertParams, MatchPrefixParams


def make(page_size=1, **kwargs):
    allocator = TokenToKVPoolAllocator(64, torch.float32, "cpu", None)
    return RadixCache(CacheInitParams(False, None, allocator, page_size, **kwargs))


def insert(cache, tokens, **kwargs):
    slots = cache.token_to_kv_pool_allocator.alloc(len(tokens))
    result = cache.insert(InsertParams(RadixKey(tokens), slots, **kwargs))
    cache.token_to_kv_pool_allocator.free(slots[: result.prefix_len])
    return result.prefix_len


def match(cache, tokens):
    return cache.match_prefix(MatchPrefixParams(RadixKey(tokens)))


def cached(cache):
    return {tuple(node.key) for node in cache.nodes()}


# a, b, c, d are single-node prompts; a is inserted first and used last, b has the most hits,
# c has the highest priority, d is the newest.
VICTIM = {
    "lru": (2, 2), "mru": (1, 1), "fifo": (1, 1), "filo": (4, 4), "lfu": (3, 3),
    "priority": (2, 2), "slru": (3, 3),
}  # fmt: skip


@pytest.mark.parametrize("policy", VICTIM)
def test_each_strategy_picks_its_victim(policy):
    cache = make(eviction_policy=policy)
    insert(cache, [1, 1])
    insert(cache, [2, 2])
    insert(cache, [2, 2])
    insert(cache, [3, 3], priority=5)
    insert(cache, [4, 4])
    insert(cache, [4, 4])
    insert(cache, [1, 1])
    before = cached(cache)
    assert cache.evict(EvictParams(1)).num_tokens_evicted == 2
    assert before - cached(cache) == {VICTIM[policy]}


@pytest.mark.parametrize(
    "slots",
    [[1.5, 2.7], [[1, 2], [3, 4]], [True, False], [1j, 2j]],
    ids=["floats", "rows", "mask", "complex"],
)
def test_only_slots_are_inserted(slots):
    cache = make()
    with pytest.raises(InvalidArgument, match="expected integers"):
        cache.insert(InsertParams(RadixKey([1, 2]), torch.tensor(slots)))
    assert not cache.nodes()


def test_a_tree_that_never_frees_takes_a_mask():
    """As SGLang's schedule policies insert it, to see which prompts share a prefix."""
    cache = RadixCache.create_simulated()
    cache.insert(InsertParams(RadixKey([1, 2]), torch.empty(2, dtype=torch.bool)))
    assert len(match(cache, [1, 2, 3]).device_indices) == 2


def test_a_parent_goes_after_its_last_child():
    cache = make()
    insert(cache, [1, 2, 3])
    insert(cache, [1, 2, 4])
    assert cache.evict(EvictParams(2)).num_tokens_evicted == 2
    assert cached(cache) == {(1, 2)}
    assert cache.evict(EvictParams(9)).num_tokens_evicted == 2
    assert cache.token_to_kv_pool_allocator.available_size() == 64


def test_a_split_keeps_lock_hits_and_priority():
    cache = make()
    insert(cache, [1, 2, 3, 4], priority=3)
    node = match(cache, [1, 2, 3, 4]).last_device_node
    cache.inc_lock_ref(node)
    upper = match(cache, [1, 2, 9]).last_device_node
    assert (upper.lock_ref, upper.hit_count, upper.priority) == (1, 1, 3)
    assert cache.protected_size() == 4
    assert cache.dec_lock_ref(node).delta == 4
    assert (upper.lock_ref, cache.evictable_size()) == (0, 4)


def test_refused_lock_calls_change_nothing():
    cache, other = make(), make()
    insert(cache, [1, 2])
    insert(other, [1, 2])
    mine = match(cache, [1, 2]).last_device_node
    foreign = match(other, [1, 2]).last_device_node
    for call in (cache.inc_lock_ref, cache.dec_lock_ref):
        with pytest.raises(ForeignNode):
            call(foreign)
    with pytest.raises(LockUnderflow):
        cache.dec_lock_ref(mine)
    assert (cache.evictable_size(), cache.protected_size(), foreign.lock_ref) == (2, 0, 0)
    cache.evict(EvictParams(2))
    with pytest.raises(ForeignNode):
        cache.inc_lock_ref(mine)


@pytest.mark.parametrize(("tokens", "slots"), [([1, 2, 3], 3), ([1, 2], 1), ([1, 2], 4)])
def test_inserts_that_do_not_fit_are_refused(tokens, slots):
    cache = RadixCache.create_simulated(page_size=2)
    with pytest.raises(InvalidArgument, match="insert of"):
        cache.insert(InsertParams(RadixKey(tokens), torch.arange(slots)))
    assert not cache.nodes()


def test_unknown_policies():
    with pytest.raises(UnknownName, match="lru"):
        make(eviction_policy="least")
    with pytest.raises(UnknownName, match="per_visit"):
        make(hit_policy="sometimes")


@pytest.mark.parametrize(
    ("hit_policy", "hits"), [("per_visit", 1), ("chunks_count", 2), ("per_request", 0)]
)
def test_hit_policies(hit_policy, hits):
    cache = make(hit_policy=hit_policy)
    insert(cache, [1, 2], chunked=True)
    insert(cache, [1, 2], counted_len=2)
    (node,) = cache.nodes()
    assert node.hit_count == hits


def test_nodes_own_their_slots():
    cache = make()
    slots = cache.token_to_kv_pool_allocator.alloc(4)
    cache.insert(InsertParams(RadixKey([1, 2, 3, 4]), slots))
    slots[:] = 99
    got = match(cache, [1, 2, 3, 4]).device_indices
    assert got.tolist() == [1, 2, 3, 4]
    match(cache, [1, 9])
    for node in cache.nodes():
        assert node.value.untyped_storage().nbytes() == 8 * len(node.key)


def test_events_follow_residency():
    cache = make(page_size=1, enable_kv_cache_events=True)
    assert cache.take_events() == [AllBlocksCleared()]
    insert(cache, [1, 2])
    stored = cache.take_events()
    assert [e.token_ids for e in stored] == [[1], [2]]
    assert stored[1].parent_block_hash == stored[0].block_hashes[0]
    cache.evict(EvictParams(2))
    removed = cache.take_events()
    assert removed == [BlockRemoved(e.block_hashes, "GPU") for e in stored]
    assert all(isinstance(e, BlockStored) for e in stored)
    cache.reset()
    assert cache.take_events() == [AllBlocksCleared()]


def test_eagle_caches_pairs():
    cache = make(is_eagle=True)
    result = cache.insert(InsertParams(RadixKey([1, 2, 3]), torch.tensor([5, 6, 7])))
    assert result.prefix_len == 0
    assert match(cache, [1, 2, 3]).device_indices.tolist() == [5, 6]
    assert match(cache, [1, 2, 9]).device_indices.tolist() == [5]
    assert match(cache, [1]).device_indices.tolist() == []


def test_disabled_it_caches_nothing():
    cache = RadixCache.create_simulated(disable=True)
    assert cache.insert(InsertParams(RadixKey([1]), torch.tensor([1]))).prefix_len == 0
    found = match(cache, [1])
    assert len(found.device_indices) == 0
    assert cache.inc_lock_ref(found.last_device_node).delta == 0
    assert cache.total_size() == 0


class Request:
    """A request with KV for all of its tokens, as far as a tree cache looks at it."""

    def __init__(self, pool, slots, tokens):
        self.req_pool_idx = None
        pool.alloc([self])
        pool.write((self.req_pool_idx, slice(0, len(slots))), slots)
        self.origin_input_ids = array("I", tokens)
        self.output_ids = array("I")
        self.fill_ids = self.origin_input_ids
        self.extra_key, self.priority, self.last_node = None, 0, None
        self.prefix_indices = slots[:0]
        self.cache_protected_len = 0

    def pop_committed_kv_cache(self):
        return len(self.fill_ids)


@pytest.mark.parametrize("is_insert", [True, False])
def test_disabled_it_still_gives_slots_back_and_lets_chunks_go_on(is_insert):
    allocator = TokenToKVPoolAllocator(8, torch.float32, "cpu", None)
    rows = ReqToTokenPool(2, 8)
    cache = RadixCache(CacheInitParams(True, rows, allocator, 1))
    slots = allocator.alloc(3)
    req = Request(rows, slots, [1, 2, 3])
    cache.cache_unfinished_req(req, chunked=True)
    assert req.prefix_indices.tolist() == slots.tolist()
    cache.cache_finished_req(req, is_insert)
    assert allocator.available_size() == 8


def test_finished_inserts_can_be_switched_off():
    allocator = TokenToKVPoolAllocator(8, torch.float32, "cpu", None)
    rows = ReqToTokenPool(2, 8)
    cache = RadixCache(CacheInitParams(False, rows, allocator, 1, disable_finished_insert=True))
    req = Request(rows, allocator.alloc(3), [1, 2, 3])
    req.last_node = cache.root_node
    cache.cache_finished_req(req)
    assert (allocator.available_size(), cache.total_size()) == (8, 0)
