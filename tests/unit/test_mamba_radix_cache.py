"""``MambaRadixCache`` by hand: states at nodes, copies for requests, what goes with what.

The numbers are SGLang 0.5.10's own answers, except where it is said that it is wrong there.
"""

from array import array
from types import SimpleNamespace

import pytest
import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.errors import (
    AmbiguousSize,
    BrokenAccounts,
    InvalidArgument,
    LockUnderflow,
    OutOfSlots,
    StaleMatch,
    UnknownName,
)
from refcache.keys import RadixKey
from refcache.pool import (
    BaseLinearStateParams,
    HybridReqToTokenPool,
    Mamba2StateDType,
    StateShape,
)
from refcache.tree import MambaRadixCache
from refcache.types import CacheInitParams, EvictParams, InsertParams, MatchPrefixParams


def make(states=8, page_size=1, chunk=4, tokens=32, extra=False, **more):
    rows = HybridReqToTokenPool(
        size=4,
        mamba_size=states,
        mamba_spec_state_size=0,
        max_context_len=32,
        device="cpu",
        enable_memory_saver=False,
        cache_params=BaseLinearStateParams(
            shape=StateShape(conv=[(3, 2)], temporal=(2, 2, 1)),
            layers=[0, 1],
            dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32),
        ),
        mamba_layer_ids=[0, 1],
        enable_mamba_extra_buffer=extra,
    )
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(tokens, torch.float32, "cpu", None)
    else:
        allocator = PagedTokenToKVPoolAllocator(tokens, page_size, torch.float32, "cpu", None)
    return MambaRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            enable_mamba_extra_buffer=extra,
            mamba_cache_chunk_size=chunk,
            **more,
        )
    )


def pool_of(tree):
    return tree.req_to_token_pool.mamba_pool


def mark(tree, slot, value):
    for plane in pool_of(tree).planes:
        plane.buffer[:, int(slot)] = value


def marks(tree, slot):
    return {
        v for plane in pool_of(tree).planes for v in plane.buffer[:, int(slot)].flatten().tolist()
    }


def insert(tree, tokens, state=None):
    """As a caller does it: a state of its own, marked with the length; given back if not taken."""
    kv = tree.token_to_kv_pool_allocator.alloc(len(tokens))
    if state is None:
        state = pool_of(tree).alloc(1)
        mark(tree, state, len(tokens))
    result = tree.insert(InsertParams(RadixKey(tokens), kv, mamba_value=state))
    if result.mamba_exist:
        pool_of(tree).free(state)
    return result.prefix_len, result.mamba_exist


def match(tree, tokens, req=None):
    return tree.match_prefix(
        MatchPrefixParams(RadixKey(tokens), cow_mamba=req is not None, req=req)
    )


def found(tree, tokens):
    """(tokens, branching length) of a match."""
    answer = match(tree, tokens)
    return len(answer.device_indices), answer.mamba_branching_seqlen


def evict(tree, tokens=0, mamba=0):
    answer = tree.evict(EvictParams(tokens, mamba_num=mamba))
    return answer.num_tokens_evicted, answer.mamba_num_evicted


def order(tree, name):
    return [list(node.key) for node in tree.least_recent(name)]


def request(tree, prompt, **more):
    """A request that has matched nothing, with KV and states for its whole prompt."""
    req = SimpleNamespace(
        req_pool_idx=None,
        mamba_pool_idx=None,
        mamba_ping_pong_track_buffer=None,
        mamba_next_track_idx=None,
        mamba_last_track_seqlen=None,
        origin_input_ids=array("q", prompt),
        output_ids=array("q"),
        fill_ids=array("q", prompt),
        extra_key=None,
        prefix_indices=torch.empty(0, dtype=torch.int64),
        cache_protected_len=0,
        last_node=tree.root_node,
        priority=None,
        kv_committed_len=len(prompt),
        kv_committed_freed=False,
        **more,
    )
    req.pop_committed_kv_cache = lambda: req.kv_committed_len
    return req


def admit(tree, prompt):
    req = request(tree, prompt)
    assert tree.req_to_token_pool.alloc([req]) is not None
    tree.inc_lock_ref(req.last_node)
    write(tree, req, 0, len(prompt))
    return req


def write(tree, req, start, end):
    """KV for tokens [start, end) of the row; with pages, whole pages are taken."""
    whole = -(-end // tree.page_size) * tree.page_size - start
    slots = tree.token_to_kv_pool_allocator.alloc(whole)
    tree.req_to_token_pool.write((req.req_pool_idx, slice(start, end)), slots[: end - start])


@pytest.fixture
def branches():
    """[1..6] and [1,2,3,4,7,8]: the part they share is a tombstone."""
    tree = make()
    assert insert(tree, [1, 2, 3, 4, 5, 6]) == (0, False)
    assert insert(tree, [1, 2, 3, 4, 7, 8]) == (4, False)
    return tree


def test_a_match_ends_at_a_state_and_says_where_one_would_help(branches):
    assert found(branches, [1, 2, 3, 4, 9]) == (0, 4)
    assert match(branches, [1, 2, 3, 4, 9]).last_device_node is branches.root_node
    assert found(branches, [1, 2, 3, 4, 5, 6]) == (6, None)
    assert found(branches, [1, 2, 3]) == (0, None)
    assert found(branches, []) == (0, None)


def test_a_tombstone_is_filled_once(branches):
    match(branches, [1, 2, 3])
    assert insert(branches, [1, 2, 3, 4]) == (4, False)
    assert found(branches, [1, 2, 3, 4, 9]) == (4, None)
    assert insert(branches, [1, 2, 3, 4]) == (4, True)
    assert branches.total_size() == (8, 3)
    assert pool_of(branches).available_size() == 5
    assert branches.token_to_kv_pool_allocator.available_size() == 32 - 8


def test_what_is_evicted_and_what_goes_with_it(branches):
    """0.5.10 tells of an eviction only the kind that was asked for."""
    match(branches, [1, 2, 3, 4, 5, 6])
    match(branches, [1, 2, 3])
    insert(branches, [1, 2, 3, 4])
    match(branches, [1, 2, 3, 4, 9])
    insert(branches, [1, 2, 3, 4])
    assert order(branches, "full") == [[7, 8], [5, 6], [1, 2, 3], [4]]
    assert order(branches, "mamba") == [[7, 8], [5, 6], [4]]
    assert evict(branches, mamba=1) == (2, 1)
    assert order(branches, "full") == [[5, 6], [1, 2, 3], [4]]
    assert evict(branches, 1) == (2, 1)
    assert evict(branches, 1) == (4, 1)
    assert order(branches, "full") == []
    assert pool_of(branches).available_size() == 8
    assert branches.token_to_kv_pool_allocator.available_size() == 32


def test_evicting_the_state_of_an_inner_node_leaves_its_tokens():
    tree = make()
    insert(tree, [1, 2])
    insert(tree, [1, 2, 3])
    assert evict(tree, mamba=1) == (0, 1)
    assert order(tree, "full") == [[1, 2], [3]]
    assert order(tree, "mamba") == [[3]]
    assert found(tree, [1, 2, 9, 9])[0] == 0
    assert found(tree, [1, 2, 3]) == (3, None)


def test_a_lock_holds_one_state_and_the_tokens_of_its_path():
    tree = make()
    insert(tree, [1, 2, 3, 4])
    node = match(tree, [1, 2, 3, 4]).last_device_node
    tree.inc_lock_ref(node)
    match(tree, [1, 2, 9])
    upper = node.parent
    assert (upper.full_lock_ref, upper.mamba_lock_ref) == (1, 0)
    assert (node.full_lock_ref, node.mamba_lock_ref) == (1, 1)
    assert evict(tree, 4, 4) == (0, 0)
    assert (tree.full_protected_size(), tree.mamba_protected_size()) == (4, 1)
    tree.dec_lock_ref(node)
    with pytest.raises(LockUnderflow):
        tree.dec_lock_ref(node)
    assert (tree.full_evictable_size(), tree.mamba_evictable_size()) == (4, 1)
    assert (node.full_lock_ref, node.mamba_lock_ref) == (0, 0)
    assert evict(tree, 4) == (4, 1)


def test_a_node_without_a_state_cannot_be_held():
    tree = make()
    insert(tree, [1, 2])
    node = match(tree, [1, 2]).last_device_node
    insert(tree, [1, 2, 3])
    evict(tree, mamba=1)
    with pytest.raises(StaleMatch, match="match again"):
        tree.inc_lock_ref(node)
    assert (node.full_lock_ref, tree.full_protected_size()) == (0, 0)


def test_a_state_that_matched_is_copied_and_another_makes_room():
    tree = make(states=2)
    insert(tree, [1, 2, 3])
    insert(tree, [5, 6])
    req = request(tree, [1, 2, 3])
    assert len(match(tree, [1, 2, 3], req).device_indices) == 3
    assert int(req.mamba_pool_idx) == 2
    assert marks(tree, 2) == {3}
    assert order(tree, "full") == [[1, 2, 3]]
    mark(tree, 2, 9)
    match(tree, [1, 2, 3], req)
    assert int(req.mamba_pool_idx) == 2
    assert marks(tree, 2) == {3}


def test_a_copy_without_a_slot_is_refused_before_anything_changes():
    """0.5.10 asserts in the middle of the match."""
    tree = make(states=1)
    insert(tree, [1, 2, 3])
    before = order(tree, "full")
    req = request(tree, [1, 2, 3])
    with pytest.raises(OutOfSlots, match="cow_mamba"):
        match(tree, [1, 2, 3], req)
    assert req.mamba_pool_idx is None
    assert order(tree, "full") == before
    assert evict(tree, mamba=1) == (3, 1)


def test_a_miss_after_a_match_gives_the_copy_back():
    """0.5.10 leaves the state of the earlier match with a request that has no prefix."""
    tree = make()
    insert(tree, [1, 2, 3])
    req = request(tree, [1, 2, 3, 4])
    match(tree, [1, 2, 3, 4], req)
    evict(tree, 3)
    assert len(match(tree, [1, 2, 3, 4], req).device_indices) == 0
    assert req.mamba_pool_idx is None
    assert pool_of(tree).available_size() == 8


def test_without_buffer_the_tree_gets_a_copy_first_and_the_state_at_the_end():
    tree = make(states=4)
    req = admit(tree, [1, 2, 3, 4])
    mark(tree, 1, 4)
    tree.cache_unfinished_req(req)
    node = req.last_node
    assert (node.mamba_value.tolist(), int(req.mamba_pool_idx)) == ([2], 1)
    assert marks(tree, 2) == {4}
    assert (node.full_lock_ref, node.mamba_lock_ref) == (1, 1)
    assert pool_of(tree).free_slots.tolist() == [3, 4]
    assert req.cache_protected_len == 4
    req.output_ids.append(5)
    write(tree, req, 4, 5)
    req.kv_committed_len = 5
    mark(tree, 1, 5)
    tree.cache_finished_req(req)
    leaf = match(tree, [1, 2, 3, 4, 5]).last_device_node
    assert (list(leaf.key), leaf.mamba_value.tolist()) == ([5], [1])
    assert pool_of(tree).free_slots.tolist() == [3, 4]
    assert req.mamba_pool_idx is None
    assert (tree.full_protected_size(), tree.mamba_protected_size()) == (0, 0)


def test_with_a_buffer_what_was_tracked_is_cached():
    tree = make(page_size=4, extra=True)
    req = admit(tree, [1, 2, 3, 4, 5, 6])
    assert req.mamba_ping_pong_track_buffer.tolist() == [2, 3]
    tree.cache_unfinished_req(req)
    assert len(req.prefix_indices) == 6
    assert order(tree, "full") == []
    mark(tree, 2, 4)
    req.mamba_last_track_seqlen, req.mamba_next_track_idx = 4, 1
    tree.cache_unfinished_req(req)
    assert req.last_node.mamba_value.tolist() == [4]
    assert marks(tree, 4) == {4}
    assert (req.cache_protected_len, len(req.prefix_indices)) == (4, 6)
    assert req.mamba_last_track_seqlen is None
    tree.cache_finished_req(req)
    assert sorted(pool_of(tree).free_slots.tolist()) == [1, 2, 3, 5, 6, 7, 8]
    assert order(tree, "full") == [[1, 2, 3, 4]]
    assert tree.token_to_kv_pool_allocator.available_size() == 32 - 4


def test_with_a_buffer_the_tree_takes_the_slot_written_last():
    tree = make(page_size=4, extra=True)
    req = admit(tree, [1, 2, 3, 4, 5, 6])
    mark(tree, 2, 4)
    req.mamba_last_track_seqlen, req.mamba_next_track_idx = 4, 1
    tree.cache_finished_req(req)
    assert match(tree, [1, 2, 3, 4]).last_device_node.mamba_value.tolist() == [2]
    assert marks(tree, 2) == {4}
    assert sorted(pool_of(tree).free_slots.tolist()) == [1, 3, 4, 5, 6, 7, 8]
    assert req.mamba_ping_pong_track_buffer is None


@pytest.mark.parametrize("extra", [False, True])
def test_an_aborted_request_gives_everything_back(extra):
    tree = make(extra=extra)
    req = admit(tree, [1, 2, 3])
    tree.cache_finished_req(req, is_insert=False)
    assert pool_of(tree).available_size() == 8
    assert tree.token_to_kv_pool_allocator.available_size() == 32
    assert order(tree, "full") == []


def test_without_a_state_for_the_copy_a_request_goes_on_uncached():
    """0.5.10 asserts."""
    tree = make(states=1)
    req = admit(tree, [1, 2, 3])
    tree.cache_unfinished_req(req)
    assert (len(req.prefix_indices), req.cache_protected_len) == (3, 0)
    assert order(tree, "full") == []
    tree.cache_finished_req(req)
    assert order(tree, "mamba") == [[1, 2, 3]]


def test_an_insert_brings_one_state_that_is_nobody_s():
    tree = make()
    insert(tree, [1, 2])
    kv = tree.token_to_kv_pool_allocator.alloc(2)
    for state in (None, torch.tensor(3), torch.tensor([3.0]), torch.tensor([1])):
        with pytest.raises(InvalidArgument, match="mamba_value"):
            tree.insert(InsertParams(RadixKey([7, 8]), kv, mamba_value=state))
    with pytest.raises(InvalidArgument, match="prev_prefix_len"):
        tree.insert(
            InsertParams(
                RadixKey([7, 8]), kv, mamba_value=pool_of(tree).alloc(1), prev_prefix_len=-1
            )
        )
    assert order(tree, "full") == [[1, 2]]


def test_each_kind_has_its_size():
    tree = make()
    for ask in (tree.evictable_size, tree.protected_size):
        with pytest.raises(AmbiguousSize, match=r"full_.*mamba_"):
            ask()
    with pytest.raises(NotImplementedError):
        tree.evictable_size()
    with pytest.raises(InvalidArgument, match="lru"):
        make(eviction_policy="lfu")
    with pytest.raises(InvalidArgument, match="enable_mamba_extra_buffer"):
        make(page_size=4)
    assert tree.supports_mamba()
    assert not tree.supports_swa()
    assert make(chunk=None).mamba_cache_chunk_size == 64


@pytest.mark.parametrize("spoil", ["size", "order", "value"])
def test_accounts_that_are_wrong_are_noticed(spoil, branches):
    branches.sanity_check()
    if spoil == "size":
        branches.states.evictable_size += 1
    elif spoil == "order":
        branches.states.lru.popitem()
    else:
        branches.states.of(next(iter(branches.states.lru))).value = None
    with pytest.raises(BrokenAccounts, match="mamba"):
        branches.sanity_check()


@pytest.mark.parametrize(
    ("rule", "gone", "left"), [("path", [9, 8], (3, 0)), ("used", [1], (3, 2))]
)
def test_what_a_hit_refreshes(rule, gone, left):
    """With the whole path, states that nobody starts from keep another session's from staying."""
    tree = make(hit_refreshes=rule)
    for tokens in ([1], [1, 2], [1, 2, 3], [9, 8]):
        insert(tree, tokens)
    match(tree, [1, 2, 3])
    assert order(tree, "mamba")[0] == gone
    evict(tree, mamba=1)
    assert (found(tree, [1, 2, 3])[0], found(tree, [9, 8])[0]) == left


def test_a_rule_of_refreshing_has_a_name():
    with pytest.raises(UnknownName, match="did you mean 'path'"):
        make(hit_refreshes="paht")
