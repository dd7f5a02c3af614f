"""``PrefillAdder`` by hand: budgets, locks, chunks, loads from a host tier."""

import pytest
import torch

from refcache.allocator import PagedTokenToKVPoolAllocator
from refcache.engine import AddReqResult, PrefillAdder, Req, SamplingParams
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.keys import RadixKey, token_array
from refcache.pool import ReqToTokenPool
from refcache.tree import RadixCache
from refcache.types import CacheInitParams, InsertParams

PAGE = 4


class Running:
    def __init__(self, *reqs):
        self.reqs = list(reqs)


def make(size=64, running=(), ratio=0.5, input_tokens=64, chunk=None, tree_class=RadixCache):
    allocator = PagedTokenToKVPoolAllocator(size, PAGE, torch.int64, "cpu", None)
    tree = tree_class(CacheInitParams(False, ReqToTokenPool(4, 64), allocator, PAGE))
    return PrefillAdder(PAGE, tree, allocator, Running(*running), ratio, input_tokens, chunk)


def make_req(adder, length, outputs=4, start=0):
    tokens = token_array(range(start, start + length))
    req = Req(f"r{start}", None, tokens, SamplingParams(outputs))
    req.init_next_round_input(adder.tree_cache)
    return req


def cache(adder, length, start=0):
    slots = adder.token_to_kv_pool_allocator.alloc(length)
    adder.tree_cache.insert(InsertParams(RadixKey(range(start, start + length)), slots))


def test_ceil_paged_tokens():
    assert [make().ceil_paged_tokens(n) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_running_requests_are_promised_a_share_of_what_they_may_need():
    a = Req("a", None, [1], SamplingParams(21))
    a.output_ids.append(7)
    b = Req("b", None, [1], SamplingParams(100_000))
    adder = make(size=4096, running=(a, b))
    assert adder.rem_total_tokens == 4096 - 0.5 * (20 + 4096)
    assert adder.cur_rem_tokens == 4096


def test_a_request_takes_its_input_its_outputs_and_a_page():
    adder = make()
    assert adder.add_one_req(make_req(adder, 10)) is AddReqResult.CONTINUE
    assert adder.rem_total_tokens == 64 - 12 - 4 - PAGE
    assert adder.cur_rem_tokens == 64 - 12 - PAGE
    assert adder.rem_input_tokens == 64 - 12


@pytest.mark.parametrize(("length", "result"), [(59, "CONTINUE"), (60, "NO_TOKEN")])
def test_all_its_tokens_must_fit_with_one_to_spare(length, result):
    adder = make(input_tokens=999)
    expected = AddReqResult.NO_TOKEN  # also when added: then nothing is left
    assert adder.add_one_req(make_req(adder, length)) is expected
    assert bool(adder.can_run_list) == (result == "CONTINUE")


def test_what_is_cached_is_room_until_it_is_locked():
    adder = make(size=32, input_tokens=999)
    cache(adder, 16)
    assert adder.rem_total_tokens == 32
    # 5 + 12 tokens of its own, 16 shared: 33 in all
    assert adder.add_one_req(make_req(adder, 21, 12)) is AddReqResult.NO_TOKEN
    assert adder.can_run_list == []
    assert adder.tree_cache.protected_size() == 0
    assert adder.add_one_req(make_req(adder, 21, 10)) is not AddReqResult.OTHER
    assert adder.tree_cache.protected_size() == 16


def test_the_first_request_may_exceed_the_input_budget_and_no_other():
    adder = make(input_tokens=8)
    assert adder.add_one_req(make_req(adder, 12)) is AddReqResult.OTHER
    assert len(adder.can_run_list) == 1
    adder = make(input_tokens=16)
    adder.add_one_req(make_req(adder, 8))
    assert adder.add_one_req(make_req(adder, 12, start=50)) is AddReqResult.OTHER
    assert len(adder.can_run_list) == 1


def test_a_long_prompt_is_cut_at_the_chunk_in_whole_pages():
    adder = make(chunk=12)
    short = make_req(adder, 5)
    assert adder.add_one_req(short) is AddReqResult.CONTINUE
    long = make_req(adder, 20, start=30)
    assert adder.add_one_req(long) is AddReqResult.OTHER
    assert adder.new_chunked_req is long
    assert long.extend_input_len == len(long.fill_ids) == 4
    # outputs are promised with the last chunk only
    assert adder.rem_total_tokens == 64 - (8 + 4 + PAGE) - (4 + PAGE)
    assert adder.add_one_req(make_req(adder, 20, start=60)) is AddReqResult.OTHER
    assert len(adder.can_run_list) == 2


def test_a_chunked_request_goes_on_until_it_is_done():
    adder = make(chunk=8)
    req = make_req(adder, 18, 3)
    adder.add_one_req(req)
    for at, left in ((8, 10), (16, 2)):
        req.prefix_indices = torch.arange(at)
        req.init_next_round_input()
        assert req.extend_input_len == left
        again = make(chunk=8)
        still = again.add_chunked_req(req)
        assert still is (req if left > 8 else None)
        assert again.can_run_list == [req]
        outputs = 0 if left > 8 else 3
        assert again.rem_total_tokens == 64 - again.ceil_paged_tokens(min(left, 8)) - outputs - 4


@pytest.mark.parametrize(("taken", "length"), [(56, 8), (60, 4), (64, None)])
def test_a_chunk_takes_what_is_free_now_when_all_is_promised(taken, length):
    running = Req("a", None, [1], SamplingParams(100))
    adder = make(running=[running], ratio=1.0, chunk=16)
    adder.token_to_kv_pool_allocator.alloc(taken)
    req = make_req(adder, 30)
    assert adder.add_chunked_req(req) is req
    assert [r.extend_input_len for r in adder.can_run_list] == ([] if length is None else [length])


@pytest.mark.parametrize(
    ("total", "current", "inputs", "chunk", "state"),
    [
        (1, 1, 1, 1, "CONTINUE"),
        (1, 1, 1, None, "CONTINUE"),
        (0, 1, 1, 1, "NO_TOKEN"),
        (1, 0, 1, 1, "NO_TOKEN"),
        (1, 1, 0, 1, "OTHER"),
        (1, 1, 1, 0, "OTHER"),
    ],
)
def test_budget_state(total, current, inputs, chunk, state):
    adder = make()
    adder.rem_total_token_offset = 64 - total
    adder.cur_rem_token_offset = 64 - current
    adder.rem_input_tokens, adder.rem_chunk_tokens = inputs, chunk
    assert adder.budget_state() is AddReqResult[state]


def test_lock_node_is_undone_also_by_an_exception():
    adder = make()
    cache(adder, 8)
    req = make_req(adder, 9)
    seen = []

    def fail():
        with adder._lock_node(req.last_node):
            seen.append(adder.tree_cache.protected_size())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [8]
    assert adder.tree_cache.protected_size() == 0


class HostTier(RadixCache):
    """Says that the ``more`` tokens after a device hit are on the host; loads them, or not."""

    more, refuses = 8, False

    def match_prefix(self, params):
        return super().match_prefix(params)._replace(host_hit_length=self.more)

    def init_load_back(self, params):
        self.asked = params
        if self.refuses:
            return torch.empty(0, dtype=torch.int64), params.last_host_node
        return self.token_to_kv_pool_allocator.alloc(self.more), params.last_host_node


def test_a_host_hit_is_loaded_and_need_not_be_computed():
    adder = make(tree_class=HostTier)
    cache(adder, 4)
    req = make_req(adder, 15, 2)
    assert (len(req.prefix_indices), req.extend_input_len) == (4, 11)
    assert adder.add_one_req(req) is AddReqResult.CONTINUE
    assert (len(req.prefix_indices), req.extend_input_len, req.cache_protected_len) == (12, 3, 12)
    assert req.cached_tokens == 12
    asked = adder.tree_cache.asked
    assert (asked.host_hit_length, asked.mem_quota, asked.req) == (8, 60, req)


def test_a_load_that_is_refused_is_computed():
    adder = make(tree_class=HostTier)
    adder.tree_cache.refuses = True
    req = make_req(adder, 15, 2)
    assert adder.add_one_req(req) is AddReqResult.CONTINUE
    assert (len(req.prefix_indices), req.extend_input_len, req.cached_tokens) == (0, 15, 0)


@pytest.mark.parametrize(("selected", "tokens"), [(None, 8), ([1], 0), ([0, 1], 4), ([], 0)])
def test_tokens_that_the_next_decode_takes(selected, tokens):
    """A request opens a page when its last one is full."""
    batch = ScheduleBatch.__new__(ScheduleBatch)
    batch.token_to_kv_pool_allocator = make().token_to_kv_pool_allocator
    batch.seq_lens_cpu = torch.tensor([4, 5, 8])
    assert batch.new_tokens_required_next_decode(selected) == tokens
