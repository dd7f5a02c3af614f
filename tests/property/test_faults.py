"""A call that fails inside leaves nothing behind; a copy that fails is computed instead."""

from array import array
from contextlib import suppress

import pytest
import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.engine import ModelConfig, Req, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.engine.alloc import release_kv_cache
from refcache.engine.scheduling.observer import SchedulerObserver
from refcache.errors import CopyFailed, DoubleFree, ForeignNode, InvalidArgument, StaleMatch
from refcache.keys import RadixKey
from refcache.oracle import HiCacheDriver, resolve
from refcache.oracle.drivers.hicache.faults import InjectedFault, InnerSteps
from refcache.pool import ReqToTokenPool
from refcache.tags import greedy
from refcache.tree import RadixCache
from refcache.types import (
    WRITE_POLICIES,
    CacheInitParams,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    ServerArgs,
)

FAULT = RuntimeError("the link is down")


def driver(**config):
    config = {"size": 8, "host_size": 9, "delay": False} | config
    return HiCacheDriver(resolve("refcache"), **config)


def found(d, tokens):
    return d.tree.match_prefix(MatchPrefixParams(RadixKey(tokens)))


def free_host(d):
    return d.tree.token_to_kv_pool_host.available_size()


def locks(d):
    return {tuple(n.key): (n.lock_ref, n.host_ref_counter) for n in d.tree.nodes()}


def unwatched(d, *slots):
    """The driver's ledger lets these go."""
    d.ledger.clear()
    d.ledger.owner |= {int(slot): "test" for slot in torch.cat(slots)}
    d.ledger.may_free = lambda page: None


def breaks(d, monkeypatch, direction, times=1):
    """The next copies in that direction cannot be launched."""
    pool = d.tree.token_to_kv_pool_host if isinstance(d, HiCacheDriver) else d
    names = {
        "to host": ["backup_from_device_all_layer"],
        "to device": ["load_to_device_per_layer", "load_to_device_all_layer"],
    }[direction]
    left = [times]
    for name in names:
        original = getattr(pool, name)

        def broken(*args, original=original):
            if left[0]:
                left[0] -= 1
                raise FAULT
            return original(*args)

        monkeypatch.setattr(pool, name, broken)


# ---- what an operation took, it gives back -----------------------------------------------------


@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("later", WRITE_POLICIES)
@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_an_acknowledgement_gives_back_what_the_write_took(policy, later, write_back, waits):
    d = driver(write_policy=policy, delay=True)
    tree = d.tree
    slots = d.allocator.alloc(4)
    tree.insert(InsertParams(RadixKey([1, 2, 3, 4]), slots, chunked=True))
    node = found(d, [1, 2, 3, 4]).last_device_node
    tree.inc_lock_ref(node)  # a request
    assert tree.write_backup(node, write_back) == 4
    tree.write_policy = later
    found(d, [1, 2])  # the copy goes on in two nodes
    d.machine.synchronize()
    tree.writing_check(write_back=waits)
    assert not tree.ongoing_write_through
    assert locks(d) == {(1, 2): (1, 0), (3, 4): (1, 0)}
    assert tree.evict(EvictParams(4)).num_tokens_evicted == 0
    tree.dec_lock_ref(found(d, [1, 2, 3, 4]).last_device_node)
    assert tree.evict(EvictParams(4)).num_tokens_evicted == 4


def test_slots_that_were_freed_for_sorting_are_handed_out_when_sorting_is_off():
    allocator = TokenToKVPoolAllocator(4, torch.int64, "cpu", None, need_sort=True)
    allocator.free(allocator.alloc(4))
    allocator.need_sort = False
    assert allocator.available_size() == 4
    assert allocator.alloc(4).tolist() == [1, 2, 3, 4]


# ---- priority ----------------------------------------------------------------------------------


def test_no_priority_is_priority_zero():
    d = driver()
    value = d.allocator.alloc(2)
    d.tree.insert(InsertParams(RadixKey([1, 2]), value, priority=None))
    assert found(d, [1, 2]).last_device_node.priority == 0


@pytest.mark.parametrize("finished", [True, False])
def test_a_request_without_a_priority_is_cached(finished):
    d = driver()
    d.admit((1, 2, 3, 4))
    req = d.requests[0]
    req.priority = None
    (d.finish if finished else d.cache)(0)
    assert found(d, [1, 2, 3, 4]).last_device_node.priority == 0


def test_a_priority_that_is_no_number_changes_nothing():
    d = driver()
    value = d.allocator.alloc(2)
    with pytest.raises(InvalidArgument, match="priority='high'"):
        d.tree.insert(InsertParams(RadixKey([1, 2]), value, priority="high"))
    assert d.tree.total_size() == 0


# ---- a failed copy -----------------------------------------------------------------------------


def test_a_write_that_fails_keeps_nothing(monkeypatch):
    d = driver()
    breaks(d, monkeypatch, "to host")
    value = d.allocator.alloc(4)
    d.tree.insert(InsertParams(RadixKey([1, 1, 1, 1]), value))
    node = found(d, [1, 1, 1, 1]).last_device_node
    assert not node.backuped
    assert free_host(d) == 9
    assert locks(d) == {(1, 1, 1, 1): (0, 0)}
    with pytest.raises(CopyFailed, match="the link is down") as failure:
        d.tree.check_hicache_events()
    assert failure.value.__cause__ is FAULT
    d.tree.check_hicache_events()  # once
    d.tree.insert(InsertParams(RadixKey([1, 1, 1, 1]), value))
    assert node.backuped


def test_a_write_that_is_asked_for_fails_at_once(monkeypatch):
    d = driver(write_policy="write_back")
    d.insert((1, 1, 1, 1))
    node = found(d, [1, 1, 1, 1]).last_device_node
    breaks(d, monkeypatch, "to host")
    with pytest.raises(CopyFailed):
        d.tree.write_backup(node)
    assert (free_host(d), locks(d)) == (9, {(1, 1, 1, 1): (0, 0)})
    d.tree.check_hicache_events()
    d.wind_down()


def test_an_eviction_whose_write_fails_drops_the_leaf(monkeypatch):
    d = driver(write_policy="write_back")
    d.insert((1, 1, 1, 1))
    breaks(d, monkeypatch, "to host")
    d.evict(4)
    assert (free_host(d), d.tree.nodes()) == (9, [])
    with pytest.raises(CopyFailed):
        d.tree.check_hicache_events()
    d.wind_down()


@pytest.mark.parametrize("small_loads", [True, False])
def test_a_load_that_fails_keeps_nothing(small_loads, monkeypatch):
    d = driver(small_loads=small_loads)
    d.admit((1, 1, 1, 1))
    d.cache(0)
    d.finish(0)
    d.settle()
    d.evict(4)
    tree, allocator, before = d.tree, d.allocator.inner, locks(d)
    match = found(d, [1, 1, 1, 1])
    slots, node = tree.init_load_back(InitLoadBackParams(match.last_host_node, 4))
    tree.inc_lock_ref(node)  # the request
    unwatched(d, slots)
    breaks(d, monkeypatch, "to device")
    with pytest.raises(CopyFailed, match="the link is down") as failure:
        tree.ready_to_load_host_cache()
    again = found(d, [1, 1, 1, 1])
    assert (len(again.device_indices), again.host_hit_length) == (0, 4)
    assert allocator.available_size() == 8
    assert not tree.ongoing_load_back
    assert not tree.cache_controller.load_queue
    assert locks(d) == before
    tree.dec_lock_ref(failure.value.moved[node])
    assert tree.ready_to_load_host_cache() == -1
    assert tree.cache_controller.layer_done_counter.producer_index == -1
    slots, _ = tree.init_load_back(InitLoadBackParams(again.last_host_node, 4))
    unwatched(d, slots)
    assert tree.ready_to_load_host_cache() == 0
    tree.check_hicache_events()
    assert tree.evict(EvictParams(4)).num_tokens_evicted == 4


def test_what_was_inserted_below_a_load_that_fails_goes_with_it(monkeypatch):
    d = driver(size=12, host_size=16)
    d.insert((1, 1, 1, 1))
    d.insert((1, 1, 2, 2))
    d.settle()
    d.evict(8)
    tree = d.tree
    match = found(d, [1, 1, 1, 1])
    slots, _ = tree.init_load_back(InitLoadBackParams(match.last_host_node, 4))
    new = d.allocator.inner.alloc(2)
    tree.insert(InsertParams(RadixKey([1, 1, 1, 1, 3, 3]), torch.cat([slots, new])))
    below = found(d, [1, 1, 1, 1, 3, 3]).last_device_node
    tree.inc_lock_ref(below)
    unwatched(d, slots, new)
    breaks(d, monkeypatch, "to device")
    with pytest.raises(CopyFailed) as failure:
        tree.ready_to_load_host_cache()
    assert set(failure.value.moved.values()) == {tree.root_node}
    assert below in failure.value.moved
    assert d.allocator.inner.available_size() == 12
    assert (tree.evictable_size(), tree.protected_size(), tree.total_size()) == (0, 0, 0)
    assert all(n.lock_ref == n.host_ref_counter == 0 for n in tree.nodes())
    assert tree.evict_host(16) == 16 - d.tree.token_to_kv_pool_host.size + 8


class Failures(SchedulerObserver):
    def __init__(self):
        self.errors, self.loaded = [], []

    def on_copy_failed(self, error):
        self.errors.append(error)

    def on_batch(self, batch):
        if batch.forward_mode.is_extend():
            self.loaded.append((batch.extend_lens, batch.hicache_consumer_index))


def loop(observer, *, overlap=False, chunk=None, size=24):
    args = ServerArgs(
        max_total_tokens=size,
        max_running_requests=3,
        context_length=size,
        chunked_prefill_size=chunk,
        disable_overlap_schedule=not overlap,
        enable_hierarchical_cache=True,
        hicache_ratio=2,
    )
    scheduler = Scheduler(args, ModelConfig(num_hidden_layers=2, vocab_size=3), observer=observer)
    scheduler.tree_cache.load_back_threshold = 1
    return scheduler


def serve(scheduler, prompts, outputs=2):
    for rid, tokens in prompts.items():
        scheduler.submit(TokenizedGenerateReqInput(rid, tokens, SamplingParams(outputs)))
    while not scheduler.is_idle():
        scheduler.step()
    for req in scheduler.finished_reqs:
        if req.rid in prompts:
            assert list(req.output_ids) == greedy(prompts[req.rid], outputs, 3)


def only_on_host(scheduler):
    scheduler.step()
    scheduler.tree_cache.evict(EvictParams(24))
    assert scheduler.token_to_kv_pool_allocator.available_size() == 24


def all_is_free(scheduler):
    tree = scheduler.tree_cache
    scheduler.step()
    assert not tree.ongoing_load_back
    assert not tree.ongoing_write_through
    assert tree.protected_size() == 0
    tree.evict(EvictParams(scheduler.max_total_num_tokens))
    assert scheduler.token_to_kv_pool_allocator.available_size() == scheduler.max_total_num_tokens
    host = tree.token_to_kv_pool_host
    tree.evict_host(host.size)
    assert host.available_size() == host.size


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_prefill_whose_load_fails_computes_the_tokens(overlap, chunk, monkeypatch):
    seen = Failures()
    scheduler = loop(seen, overlap=overlap, chunk=chunk)
    long = [0, 1, 2, 0, 1, 2, 2, 1]
    serve(scheduler, {"first": long})
    only_on_host(scheduler)
    breaks(scheduler.tree_cache.token_to_kv_pool_host, monkeypatch, "to device")
    seen.loaded.clear()
    serve(scheduler, {"again": [*long, 1], "other": [2, 2, 2], "twin": [*long, 0]})
    assert [type(e) for e in seen.errors] == [CopyFailed]
    first = seen.loaded[0]
    assert first[1] == -1
    assert max(first[0]) >= 4  # computed, in chunks or at once
    only_on_host(scheduler)
    serve(scheduler, {"last": [*long, 2, 0]})
    assert max(consumer for _, consumer in seen.loaded) == 0  # loads work again
    all_is_free(scheduler)


def test_a_loop_whose_write_fails_goes_on(monkeypatch):
    seen = Failures()
    scheduler = loop(seen)
    breaks(scheduler.tree_cache.token_to_kv_pool_host, monkeypatch, "to host", times=2)
    serve(scheduler, {"a": [0, 1, 2, 0, 1], "b": [1, 1, 1, 2]})
    scheduler.step()
    assert [type(e) for e in seen.errors] == [CopyFailed] * 2
    all_is_free(scheduler)


# ---- a stale match -----------------------------------------------------------------------------


def on_host(d):
    d.insert((1, 1, 1, 1))
    d.settle()
    d.evict(4)
    return found(d, [1, 1, 1, 1])


def test_a_match_whose_node_is_gone_is_refused():
    d = driver()
    match = on_host(d)
    assert match.host_hit_length == 4
    d.tree.evict_host(9)
    with pytest.raises(ForeignNode):
        d.tree.init_load_back(InitLoadBackParams(match.last_host_node, 4))
    with pytest.raises(ForeignNode):
        d.tree.load_back(match.last_host_node)
    assert d.allocator.inner.available_size() == 8


def test_a_match_that_says_another_length_is_refused():
    d = driver()
    match = on_host(d)
    with pytest.raises(StaleMatch, match="4 tokens are on the host only, the match said 3"):
        d.tree.init_load_back(InitLoadBackParams(match.last_host_node, 3))
    assert not d.tree.ongoing_load_back
    d.load_back((1, 1, 1, 1))
    with pytest.raises(StaleMatch):
        d.tree.init_load_back(InitLoadBackParams(match.last_host_node, 4))
    assert d.tree.load_back(match.last_host_node) is None


def test_a_write_of_what_is_not_there_to_write_is_refused():
    d = driver()
    match = on_host(d)
    tree = d.tree
    with pytest.raises(ForeignNode):
        tree.write_backup(tree.root_node)
    with pytest.raises(InvalidArgument, match="on the device only"):
        tree.write_backup(match.last_host_node)
    tree.evict_host(9)
    with pytest.raises(ForeignNode):
        tree.write_backup(match.last_host_node)
    assert free_host(d) == 9


# ---- errors have names -------------------------------------------------------------------------


@pytest.mark.parametrize("is_bigram", [False, True])
def test_an_element_that_a_key_does_not_have_is_an_index_error(is_bigram):
    key = RadixKey([1, 2, 3, 4], "space", is_bigram)
    for index in range(-len(key), len(key)):
        assert list(key[index]) == [list(key)[index]]
        assert key[index].extra_key == "space"
    for index in (len(key), 10, -len(key) - 1, -10):
        with pytest.raises(IndexError):
            key[index]


def test_a_batch_that_has_not_run_is_refused():
    scheduler = loop(Failures())
    batch = scheduler._new_batch([])
    with pytest.raises(InvalidArgument, match="has not run"):
        batch.prepare_for_decode()
    with pytest.raises(InvalidArgument, match="has not run"):
        batch.merge_batch(batch)
    assert batch.reqs == []


# ---- a step of the loop that raises ------------------------------------------------------------


def test_what_comes_after_a_request_that_is_refused_is_served():
    scheduler = loop(Failures())
    for rid in ("a", "a", "b"):
        scheduler.submit(TokenizedGenerateReqInput(rid, [0, 1, 2], SamplingParams(2)))
    with pytest.raises(InvalidArgument, match="rid 'a'"):
        scheduler.step()
    while not scheduler.is_idle():
        scheduler.step()
    assert [r.rid for r in scheduler.finished_reqs] == ["a", "b"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "inner",
    [
        "tp_worker.forward_batch_generation",
        "tree_cache.cache_unfinished_req",
        "tree_cache.cache_finished_req",
        "token_to_kv_pool_allocator.alloc",
        "req_to_token_pool.write",
        "req_to_token_pool.free",
        "runtime.launch",
    ],
)
def test_a_step_that_raises_makes_its_requests_wait_again(overlap, inner, monkeypatch):
    for nth in range(4):
        scheduler = loop(Failures(), overlap=overlap, chunk=4)
        owner, name = inner.split(".")
        original, calls = getattr(getattr(scheduler, owner), name), []

        def broken(*args, original=original, calls=calls, nth=nth, **kwargs):
            calls.append(0)
            if len(calls) == nth + 1:
                raise FAULT
            return original(*args, **kwargs)

        monkeypatch.setattr(getattr(scheduler, owner), name, broken)
        prompts = {"a": [0, 1, 2, 0, 1, 2, 2], "b": [1, 1, 1], "c": [0, 1, 2, 0, 1]}
        for rid, tokens in prompts.items():
            scheduler.submit(TokenizedGenerateReqInput(rid, tokens, SamplingParams(3)))
        raised = 0
        while not scheduler.is_idle():
            with suppress(type(FAULT)):
                scheduler.step()
                continue
            raised += 1
            assert scheduler.token_to_kv_pool_allocator.available_size() == 24
        assert raised == (len(calls) > nth)
        for req in scheduler.finished_reqs:
            assert list(req.output_ids) == greedy(prompts[req.rid], 3, 3)
        assert len(scheduler.finished_reqs) == 3
        all_is_free(scheduler)


# ---- what a request holds is given back wholly, or not at all -----------------------------------


class Plain:
    """An allocator of somebody else: SGLang's calls, and nothing of refcache's own."""

    def __init__(self, inner, names):
        self.inner, self.names = inner, names

    def __getattr__(self, name):
        if name not in self.names:
            raise AttributeError(name)
        return getattr(self.inner, name)


ALLOCATOR = ("alloc", "free", "available_size", "device")


@pytest.mark.parametrize(
    "offers", [(), ("free_each",), ("backup_state", "restore_state")], ids=["plain", "each", "undo"]
)
@pytest.mark.parametrize("is_insert", [True, False])
def test_a_finish_whose_tail_cannot_be_freed_changes_nothing(offers, is_insert):
    inner = PagedTokenToKVPoolAllocator(64, 4, torch.int64, "cpu", None)
    allocator = Plain(inner, ALLOCATOR + offers)
    rows = ReqToTokenPool(4, 64)
    tree = RadixCache(CacheInitParams(False, rows, allocator, 4))

    def computed(rid):
        req = Req(rid, "", array("I", [1, 2, 3, 4, 5, 6]), SamplingParams(4))
        rows.alloc([req])
        req.last_node = tree.root_node
        req.kv_committed_len = req.kv_allocated_len = 6
        rows.write((req.req_pool_idx, slice(0, 6)), allocator.alloc(8)[:6])
        return req

    tree.cache_finished_req(computed("first"))
    second = computed("second")
    tail = rows.read(second.req_pool_idx, slice(4, 6))
    allocator.free(tail)
    before = inner.free_pages.tolist()
    with pytest.raises(DoubleFree):
        tree.cache_finished_req(second, is_insert=is_insert)
    assert not second.kv_committed_freed
    if not offers:
        return  # nobody can take the first of two frees back
    assert inner.free_pages.tolist() == before
    allocator.alloc(4)  # the page that was lost
    tree.cache_finished_req(second, is_insert=is_insert)
    assert inner.available_size() == 60
    assert tree.evict(EvictParams(4)).num_tokens_evicted == 4


def owners(page_size, need_sort):
    """Two allocators in one state: pages 2 to 8 are handed out, and freed ones wait."""
    for _ in range(2):
        if page_size == 1:
            made = TokenToKVPoolAllocator(8, torch.int64, "cpu", None, need_sort)
        else:
            made = PagedTokenToKVPoolAllocator(
                8 * page_size, page_size, torch.int64, "cpu", None, need_sort
            )
        made.alloc(8 * page_size)
        made.free(torch.tensor([page_size]))
        yield made


def lists_of(made):
    queued = [pages.tolist() for pages in made.free_group]
    return made.free_pages.tolist(), made.release_pages.tolist(), queued, made._held.tolist()


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_lists_freed_in_one_call_are_freed_in_turn(page_size, need_sort, grouped):
    together, in_turn = owners(page_size, need_sort)
    pages = ([6, 3], [], [5], [8, 2])
    lists = [torch.tensor(some, dtype=torch.int64) * page_size for some in pages]
    for made in (together, in_turn):
        if grouped:
            made.free_group_begin()
    together.free_each(lists)
    for slots in lists:
        in_turn.free(slots)
    assert lists_of(together) == lists_of(in_turn)
    if grouped:
        together.free_group_end()
        in_turn.free_group_end()
        assert lists_of(together) == lists_of(in_turn)


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    "second", [[1], [3], [0], [9], [-1], [1.5]],
    ids=["free", "in the first", "dummy", "beyond", "negative", "floats"],
)  # fmt: skip
def test_of_lists_one_of_which_is_refused_none_is_freed(page_size, grouped, second):
    made, _ = owners(page_size, False)
    if grouped:
        made.free_group_begin()
    before = lists_of(made)
    with pytest.raises((DoubleFree, InvalidArgument)):
        made.free_each([torch.tensor([4, 3]) * page_size, torch.tensor(second) * page_size])
    assert lists_of(made) == before


@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_free_inside_which_something_fails_frees_nothing(page_size, need_sort, grouped):
    made, _ = owners(page_size, need_sort)
    if grouped:
        made.free_group_begin()
    before, lists = (
        lists_of(made),
        [torch.tensor([4, 3]) * page_size, torch.tensor([page_size * 7])],
    )
    steps = InnerSteps((), tensors=True)
    for number in range(1, 200):
        with suppress(InjectedFault), steps.armed(number):
            made.free_each(lists)
        if steps.raised is None:
            break
        assert lists_of(made) == before, number
    assert number > 5
    assert lists_of(made) != before


@pytest.mark.parametrize("part", ["committed", "allocated", "row"])
def test_a_release_that_fails_half_way_can_be_made_again(part):
    allocator = PagedTokenToKVPoolAllocator(64, 4, torch.int64, "cpu", None)
    rows = ReqToTokenPool(4, 64)
    tree = RadixCache(CacheInitParams(False, rows, allocator, 4))
    req = Req("r", "", array("I", range(6)), SamplingParams(4))
    rows.alloc([req])
    req.last_node = tree.root_node
    req.kv_committed_len, req.kv_allocated_len = 6, 12
    rows.write((req.req_pool_idx, slice(0, 12)), allocator.alloc(12))
    owner, nth = {"committed": (allocator, 1), "allocated": (allocator, 2), "row": (rows, 1)}[part]
    free, calls = owner.free, []

    def fails(given):
        calls.append(given)
        if len(calls) == nth:
            raise FAULT
        free(given)

    owner.free = fails
    with pytest.raises(RuntimeError, match="the link is down"):
        release_kv_cache(req, tree)
    release_kv_cache(req, tree)
    assert (allocator.available_size(), tree.evictable_size()) == (60, 4)
    assert rows.available_size() == 4
    with pytest.raises(DoubleFree):
        release_kv_cache(req, tree)
