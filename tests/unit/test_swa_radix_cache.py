"""``SWARadixCache`` by hand: which windows live, who holds them, what an insert adopts.

The numbers are SGLang 0.5.10's own answers, except where it is said that it is wrong there.
"""

from array import array
from types import SimpleNamespace

import pytest
import torch

from refcache.allocator import SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.errors import InvalidArgument, LockUnderflow, StaleMatch
from refcache.keys import RadixKey
from refcache.pool import ReqToTokenPool
from refcache.tree import SWARadixCache
from refcache.types import (
    CacheInitParams,
    DecLockRefParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)


def make(window=4, full=32, swa=32, page_size=1, **more):
    return SWARadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, 32, "cpu", False),
            token_to_kv_pool_allocator=SWATokenToKVPoolAllocator(
                full, swa, page_size, torch.float32, "cpu", None
            ),
            page_size=page_size,
            sliding_window_size=window,
            **more,
        )
    )


def insert(tree, tokens, gone=0, owned=0):
    """As a request that gave back the window slots of its first ``gone`` tokens."""
    slots = tree.token_to_kv_pool_allocator.alloc(len(tokens))
    tree.token_to_kv_pool_allocator.free_swa(slots[:gone])
    params = InsertParams(RadixKey(tokens), slots, prev_prefix_len=owned, swa_evicted_seqlen=gone)
    return tree.insert(params).prefix_len


def match(tree, tokens):
    return tree.match_prefix(MatchPrefixParams(RadixKey(tokens)))


def found(tree, tokens):
    return len(match(tree, tokens).device_indices)


def evict(tree, tokens=0, swa=0):
    answer = tree.evict(EvictParams(tokens, swa_num_tokens=swa))
    return answer.num_tokens_evicted, answer.swa_num_tokens_evicted


def live(tree):
    """Each node's tokens, and whether it has its window slots; with the slots asked themselves."""
    mapping = tree.token_to_kv_pool_allocator.full_to_swa_index_mapping
    for node in tree.nodes():
        assert bool((mapping[node.value] > 0).all()) == (not node.swa_tombstone)
        assert bool((mapping[node.value] > 0).any()) == (not node.swa_tombstone)
    return {tuple(node.key): not node.swa_tombstone for node in tree.nodes()}


def free(tree):
    allocator = tree.token_to_kv_pool_allocator
    return allocator.full_available_size(), allocator.swa_available_size()


@pytest.fixture
def branches():
    """[1..4] above [5..8] and [9]."""
    tree = make()
    assert insert(tree, [1, 2, 3, 4, 5, 6, 7, 8]) == 0
    assert insert(tree, [1, 2, 3, 4, 9]) == 4
    return tree


def test_a_prefix_needs_its_last_window_or_all_from_the_root(branches):
    match(branches, [1, 2, 3, 4, 5, 6, 7, 8])
    assert evict(branches, swa=1) == (1, 1)  # the leaf [9]
    assert evict(branches, swa=1) == (0, 4)
    assert live(branches) == {(1, 2, 3, 4): False, (5, 6, 7, 8): True}
    assert found(branches, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert found(branches, [1, 2, 3, 4, 5, 6, 7]) == 0
    assert found(branches, [1, 2, 3, 4]) == 0
    assert found(branches, [1, 2, 3, 4, 5, 6, 7, 8]) == 8


def test_locks_cover_one_window_and_their_end_stays_with_the_upper_half():
    tree = make()
    insert(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    match(tree, [1, 2, 3])
    match(tree, [1, 2, 3, 4, 5])
    last = match(tree, [1, 2, 3, 4, 5, 6, 7, 8]).last_device_node
    held = tree.inc_lock_ref(last)
    middle = last.parent
    assert held.swa_uuid_for_lock == middle.swa_uuid
    assert [n.swa_lock_ref for n in (last, middle, middle.parent)] == [1, 1, 0]
    assert (tree.full_protected_size(), tree.swa_protected_size()) == (8, 5)
    assert evict(tree, swa=10) == (0, 3)
    assert live(tree) == {(1, 2, 3): False, (4, 5): True, (6, 7, 8): True}
    match(tree, [1, 2, 3, 4])
    assert middle.swa_uuid is None
    assert middle.parent.swa_uuid == held.swa_uuid_for_lock
    tree.dec_lock_ref(last, DecLockRefParams(held.swa_uuid_for_lock))
    assert (tree.full_evictable_size(), tree.swa_evictable_size()) == (8, 5)
    assert (tree.full_protected_size(), tree.swa_protected_size()) == (0, 0)
    assert evict(tree, 8) == (8, 5)
    assert free(tree) == (32, 32)


def test_an_unlock_needs_what_the_lock_gave(branches):
    """0.5.10 unlocks to the root, below zero."""
    last = match(branches, [1, 2, 3, 4, 5, 6, 7, 8]).last_device_node
    held = branches.inc_lock_ref(last)
    for wrong in (None, DecLockRefParams(None), DecLockRefParams(99)):
        with pytest.raises(InvalidArgument, match="swa_uuid_for_lock"):
            branches.dec_lock_ref(last, wrong)
    assert (branches.full_protected_size(), branches.swa_protected_size()) == (8, 4)
    branches.dec_lock_ref(last, DecLockRefParams(held.swa_uuid_for_lock))
    with pytest.raises(LockUnderflow):
        branches.dec_lock_ref(last, DecLockRefParams(held.swa_uuid_for_lock))


def test_what_lost_its_window_cannot_be_held(branches):
    node = match(branches, [1, 2, 3, 4]).last_device_node
    match(branches, [1, 2, 3, 4, 9])
    assert evict(branches, swa=5) == (4, 8)
    assert node.swa_tombstone
    with pytest.raises(StaleMatch, match="match again"):
        branches.inc_lock_ref(node)
    assert branches.full_protected_size() == 0


@pytest.mark.parametrize(
    ("gone", "nodes", "slots"),
    [
        (0, {(1, 2, 3, 4): True, (5, 6): True, (7, 8): True}, [13, 14, 15, 16]),
        (2, {(1, 2): False, (3, 4): True, (5, 6): True, (7, 8): True}, [1, 2, 15, 16]),
        (4, {(1, 2, 3, 4): False, (5, 6): True, (7, 8): True}, [1, 2, 3, 4]),
    ],
)
def test_a_tombstone_adopts_what_still_has_a_window(gone, nodes, slots):
    tree = make(window=2)
    insert(tree, [1, 2, 3, 4, 5, 6])
    insert(tree, [1, 2, 3, 4, 7, 8])
    upper = next(node for node in tree.nodes() if tuple(node.key) == (1, 2, 3, 4))
    tree.windows.evict(upper)
    assert live(tree) == {(1, 2, 3, 4): False, (5, 6): True, (7, 8): True}
    assert upper.value.tolist() == [1, 2, 3, 4]
    assert insert(tree, [1, 2, 3, 4, 5, 6], gone) == 6
    assert live(tree) == nodes
    path = match(tree, [1, 2, 3, 4, 5, 6])
    assert path.device_indices.tolist() == [*slots, 5, 6]
    evict(tree, 32)
    assert free(tree) == (32, 32)


def test_what_is_new_splits_where_the_window_begins():
    tree = make(window=2)
    assert insert(tree, [1, 2, 3, 4, 5, 6], gone=4) == 0
    assert live(tree) == {(1, 2, 3, 4): False, (5, 6): True}
    assert found(tree, [1, 2, 3, 4, 5]) == 0
    assert found(tree, [1, 2, 3, 4, 5, 6]) == 6


def test_a_key_whose_windows_are_all_gone_leaves_nothing():
    """0.5.10 makes a live node of it; its window slots are counted and never come back."""
    tree = make(window=2)
    assert insert(tree, [1, 2, 3], gone=3) == 0
    assert insert(tree, [1, 2, 3], gone=4) == 0
    assert live(tree) == {}
    assert free(tree) == (32, 32)
    assert tree.total_size() == (0, 0)


@pytest.mark.parametrize("held", [False, True])
def test_a_tombstone_that_somebody_holds_keeps_its_slots(held):
    """0.5.10 frees slots that the holder's row names."""
    tree = make(window=2)
    insert(tree, [1, 2, 3, 4, 5, 6], gone=4)
    last = match(tree, [1, 2, 3, 4, 5, 6]).last_device_node
    if held:
        tree.inc_lock_ref(last)
    assert insert(tree, [1, 2, 3, 4, 5, 6]) == 6
    assert last.parent.value.tolist() == ([1, 2, 3, 4] if held else [7, 8, 9, 10])
    assert live(tree) == {(1, 2, 3, 4): not held, (5, 6): True}
    assert free(tree) == (26, 30 if held else 26)


def test_what_the_tree_owns_already_is_not_freed_again():
    tree = make(window=2)
    insert(tree, [1, 2, 3])
    own = match(tree, [1, 2, 3]).device_indices
    more = torch.cat([own, tree.token_to_kv_pool_allocator.alloc(2)])
    params = InsertParams(RadixKey([1, 2, 3, 4, 5]), more, prev_prefix_len=3)
    assert tree.insert(params).prefix_len == 3
    assert found(tree, [1, 2, 3, 4, 5]) == 5
    assert free(tree) == (27, 27)


def request(tree, prompt, gone=0):
    """A request with KV for its prompt, the first ``gone`` tokens without window slots."""
    req = SimpleNamespace(
        req_pool_idx=None,
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
        swa_evicted_seqlen=gone,
        swa_uuid_for_lock=None,
    )
    req.pop_committed_kv_cache = lambda: req.kv_committed_len
    assert tree.req_to_token_pool.alloc([req]) is not None
    slots = tree.token_to_kv_pool_allocator.alloc(len(prompt))
    tree.token_to_kv_pool_allocator.free_swa(slots[:gone])
    tree.req_to_token_pool.write((req.req_pool_idx, slice(0, len(prompt))), slots)
    tree.inc_lock_ref(req.last_node)
    return req


def test_an_unfinished_request_says_where_its_windows_begin():
    """0.5.10 says 0 here: a live node with window slots that are gone."""
    tree = make(window=2)
    req = request(tree, [1, 2, 3, 4, 5, 6], gone=3)
    tree.cache_unfinished_req(req)
    assert live(tree) == {(1, 2, 3): False, (4, 5, 6): True}
    assert req.cache_protected_len == 6
    assert req.swa_uuid_for_lock is not None
    assert (tree.full_protected_size(), tree.swa_protected_size()) == (6, 3)
    tree.cache_finished_req(req)
    assert (tree.full_protected_size(), tree.swa_protected_size()) == (0, 0)
    assert evict(tree, 6) == (6, 3)
    assert free(tree) == (32, 32)


@pytest.mark.parametrize("gone", [5, 6])
def test_a_request_without_a_window_at_its_end_goes_on_uncached(gone):
    tree = make(window=2)
    req = request(tree, [1, 2, 3, 4, 5, 6], gone=gone)
    tree.cache_unfinished_req(req)
    assert (len(req.prefix_indices), req.cache_protected_len) == (6, 0)
    assert live(tree) == {}
    tree.cache_finished_req(req)
    evict(tree, 6)
    assert free(tree) == (32, 32)


def test_a_finished_request_shares_and_gives_back():
    tree = make(window=2)
    first, second = (request(tree, [1, 2, 3, 4]) for _ in range(2))
    tree.cache_unfinished_req(first)
    tree.cache_unfinished_req(second)
    assert second.prefix_indices.tolist() == [1, 2, 3, 4]
    assert free(tree) == (28, 28)
    tree.cache_finished_req(first)
    tree.cache_finished_req(second, is_insert=False)
    assert tree.total_size() == (4, 4)
    assert evict(tree, 4) == (4, 4)
    assert free(tree) == (32, 32)


def test_sizes_and_refusals():
    tree = make()
    assert tree.supports_swa()
    assert not tree.supports_mamba()
    with pytest.raises(NotImplementedError, match=r"full_.*swa_"):
        tree.evictable_size()
    with pytest.raises(InvalidArgument, match="sliding_window_size"):
        make(window=0)
    plain = TokenToKVPoolAllocator(8, torch.float32, "cpu", None)
    with pytest.raises(InvalidArgument, match="SWATokenToKVPoolAllocator"):
        SWARadixCache(CacheInitParams(False, None, plain, 1, sliding_window_size=2))
    with pytest.raises(InvalidArgument, match="swa_evicted_seqlen"):
        insert(tree, [1, 2], gone=-1)
    with pytest.raises(InvalidArgument, match="mamba_value"):
        tree.insert(InsertParams(RadixKey([1]), torch.tensor([1]), mamba_value=torch.tensor([1])))


@pytest.mark.parametrize(
    ("rule", "order"),
    [("path", [[9], [1, 2], [3, 4], [5, 6]]), ("used", [[1, 2], [9], [3, 4], [5, 6]])],
)
def test_what_a_hit_refreshes(rule, order):
    tree = make(window=4, hit_refreshes=rule)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [9]):
        insert(tree, tokens)
    match(tree, [1, 2, 3, 4, 5, 6])
    assert [list(node.key) for node in tree.least_recent("swa")] == order
    assert [list(node.key) for node in tree.least_recent()] == [[9], [1, 2], [3, 4], [5, 6]]
