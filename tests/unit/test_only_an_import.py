"""A caller written for SGLang's classes changes an import, and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.controller import CacheOperation
from refcache.controller.hicache_controller import rank_of
from refcache.engine import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    AbortReq,
    AddReqResult,
    PrefillAdder,
    Req,
    SamplingParams,
    ScheduleBatch,
    Scheduler,
    TokenizedGenerateReqInput,
)
from refcache.engine.alloc import (
    alloc_for_decode,
    alloc_paged_token_slots_extend,
    available_and_evictable_str,
)
from refcache.errors import InvalidArgument, UnknownName
from refcache.events import BlockRemoved, BlockStored
from refcache.keys import RadixKey, compose_extra_key
from refcache.pool import (
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    ReqToTokenPool,
)
from refcache.tree import HiRadixCache, RadixCache, TreeNode, strategies
from refcache.tree.consensus import SingleRank
from refcache.types import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    ServerArgs,
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


# ---- requests and the loop -----------------------------------------------------------------------


def test_a_request_is_made_as_sglang_makes_one():
    params = SamplingParams(7, stop_token_ids=[3])
    req = Req("r", "some text", [1, 2], params, lora_id="x", routing_key="k", eos_token_ids={5})
    assert (req.rid, req.origin_input_text) == ("r", "some text")
    assert req.origin_input_ids.tolist() == [1, 2]
    assert req.sampling_params.max_new_tokens == 7
    assert req.stop_token_ids == {3, 5}
    assert req.extra_key == compose_extra_key(lora_id="x")
    assert (req.routing_key, req.priority) == ("k", None)
    req.time_stats.wait_queue_entry_time = 4
    assert Req("r", None, [1], SamplingParams(ignore_eos=True)).stop_token_ids == set()


def test_what_is_not_modelled_is_refused_by_name():
    assert Req("r", "", [1], SamplingParams(), return_logprob=False, session=None).rid == "r"
    with pytest.raises(InvalidArgument, match="return_logprob=True of request 'r'"):
        Req("r", "", [1], SamplingParams(), return_logprob=True)
    with pytest.raises(InvalidArgument, match="prioritee=3 of Req: expected no such argument"):
        Req("r", "", [1], SamplingParams(), prioritee=3)
    with pytest.raises(InvalidArgument, match="n=2 of SamplingParams: expected 1"):
        SamplingParams(n=2)
    assert SamplingParams(stop=[], temperature=0.7, top_p=0.9).stop_token_ids == frozenset()
    with pytest.raises(InvalidArgument, match=r"stop='x' of SamplingParams"):
        SamplingParams(8, "x")
    with pytest.raises(InvalidArgument, match=r"input_embeds=.* of request 'r'"):
        TokenizedGenerateReqInput(rid="r", input_ids=[1], input_embeds=[[0.5]])
    with pytest.raises(InvalidArgument, match="dllm_config=1 of PrefillAdder"):
        PrefillAdder(1, None, None, None, 1.0, 1, None, dllm_config=1)
    with pytest.raises(InvalidArgument, match="token_per_req=2: expected 1"):
        alloc_for_decode(None, token_per_req=2)


def test_finish_reasons_are_told_to_a_client():
    assert FINISH_LENGTH(3).to_json() == {"type": "length", "length": 3}
    assert FINISH_MATCHED_TOKEN(7).to_json() == {"type": "stop", "matched": 7}
    told = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert FINISH_ABORT().to_json() == told
    assert FINISH_ABORT("no room", 503).to_json() == told | {
        "message": "no room",
        "status_code": 503,
    }
    assert (FINISH_ABORT().is_error, FINISH_LENGTH(3).is_error) == (True, False)


def test_a_batch_of_requests_needs_no_pools():
    req = Req("r", None, [1], SamplingParams())
    batch = ScheduleBatch(reqs=[req])
    assert batch.reqs == [req]
    batch.filter_batch(chunked_req_to_exclude=req)
    assert batch.is_empty()


def test_a_budget_shrinks_by_what_decodes_in_the_same_batch():
    allocator = PagedTokenToKVPoolAllocator(64, 4, torch.float16, "cpu", None)
    cache = RadixCache(CacheInitParams(False, None, allocator, 4))
    adder = PrefillAdder(4, cache, allocator, None, 1.0, 64, 32, mixed_with_decode_tokens=3)
    assert (adder.rem_input_tokens, adder.rem_chunk_tokens) == (61, 29)
    assert (adder.rem_total_tokens, adder.cur_rem_tokens) == (61, 61)


def test_a_prompt_is_cut_where_the_truncation_is_aligned():
    allocator = PagedTokenToKVPoolAllocator(64, 4, torch.float16, "cpu", None)
    cache = RadixCache(CacheInitParams(False, None, allocator, 4))
    for align, cut in ((None, 20), (8, 16), (64, None)):
        adder = PrefillAdder(4, cache, allocator, None, 1.0, 64, 20, prefill_max_requests=1)
        req = Req("r", None, range(30), SamplingParams(1))
        req.init_next_round_input(cache)
        adder.add_one_req(req, has_chunked_req=False, truncation_align_size=align)
        assert [r.extend_input_len for r in adder.can_run_list] == ([cut] if cut else [])
        assert adder.log_input_tokens == (cut or 0)
        if cut:
            assert adder.add_one_req(req, False, align) is AddReqResult.OTHER  # one a batch
            cache.dec_lock_ref(req.last_node)


def test_slots_come_with_the_state_before_them():
    cache = tree(page_size=4)
    allocator = cache.token_to_kv_pool_allocator
    one = torch.tensor([0]), torch.tensor([0]), torch.tensor([6]), torch.tensor([6])
    slots, state = alloc_paged_token_slots_extend(
        cache, *one, torch.tensor([-1]), 6, backup_state=True
    )
    assert (len(slots), allocator.available_size()) == (6, 8)
    allocator.restore_state(state)
    assert allocator.available_size() == 16


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_decode_slot_is_for_the_token_behind_the_lengths(page_size):
    rows = ReqToTokenPool(2, 16)
    allocator = PagedTokenToKVPoolAllocator(16, page_size, torch.float16, "cpu", None)
    cache = RadixCache(CacheInitParams(False, rows, allocator, page_size))
    req = Req("r", None, range(4), SamplingParams(4))
    (row,) = rows.alloc([req])
    rows.write((row, slice(0, 4)), allocator.alloc(4))
    batch = ScheduleBatch([req], rows, allocator, cache)
    batch.maybe_evict_swa()
    batch.req_pool_indices = torch.tensor([row])
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor([4])
    slot = alloc_for_decode(batch, token_per_req=1)
    assert rows.read(row, slice(0, 5)).tolist()[4] == slot.item() == 4 + page_size
    assert batch.seq_lens.tolist() == [4]


def serving(**more: object) -> Scheduler:
    args = ServerArgs(max_total_tokens=64, context_length=64, chunked_prefill_size=-1, **more)
    assert args.chunked_prefill_size is None
    return Scheduler(args)


def run(scheduler: Scheduler, steps: int | None = None) -> list[str]:
    """Some steps, or all there are; the names of what has finished, in order."""
    while not scheduler.is_idle() and steps != 0:
        scheduler.step()
        steps = None if steps is None else steps - 1
    return [req.rid for req in scheduler.finished_reqs]


def request(rid: str, outputs: int, **more: object) -> TokenizedGenerateReqInput:
    tokens = [len(rid), *rid.encode()]
    return TokenizedGenerateReqInput(rid, tokens, SamplingParams(outputs), **more)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_takes_the_place_of_one_of_lower_priority(overlap):
    scheduler = serving(
        max_running_requests=1,
        enable_priority_scheduling=True,
        disable_overlap_schedule=not overlap,
    )
    scheduler.submit(request("low", 20, priority=1))
    run(scheduler, 4)
    scheduler.submit(request("near", 2, priority=11))  # not higher by more than 10
    run(scheduler, 3)
    assert scheduler.num_retracted_reqs == 0
    scheduler.abort_request(AbortReq("near"))
    scheduler.submit(request("high", 2, priority=12))
    assert run(scheduler) == ["near", "high", "low"]
    assert scheduler.num_retracted_reqs == 1
    assert [len(req.output_ids) for req in scheduler.finished_reqs] == [0, 2, 20]
    (low,) = (req for req in scheduler.finished_reqs if req.rid == "low")
    assert low.retraction_count == 1
    assert (
        scheduler.token_to_kv_pool_allocator.available_size()
        + (scheduler.tree_cache.evictable_size())
        == 64
    )


def test_a_preempted_request_is_not_lost_when_nothing_is_added(monkeypatch):
    scheduler = serving(max_running_requests=1, enable_priority_scheduling=True)
    scheduler.submit(request("low", 20, priority=1))
    run(scheduler, 4)
    with monkeypatch.context() as once:
        once.setattr(PrefillAdder, "add_one_req", lambda *_, **__: AddReqResult.NO_TOKEN)
        scheduler.submit(request("high", 2, priority=12))
        run(scheduler, 1)
    assert [req.rid for req in scheduler.waiting_queue] == ["high", "low"]
    assert run(scheduler) == ["high", "low"]
    assert [len(req.output_ids) for req in scheduler.finished_reqs] == [2, 20]


def test_preemption_can_be_off():
    scheduler = serving(
        max_running_requests=1, enable_priority_scheduling=True, disable_priority_preemption=True
    )
    scheduler.submit(request("low", 20, priority=0))
    run(scheduler, 4)
    scheduler.submit(request("high", 2, priority=99))
    assert run(scheduler) == ["low", "high"]


def test_an_abort_names_one_request_or_all():
    scheduler = serving()
    for rid in ("1", "10", "2"):
        scheduler.submit(request(rid, 9))
    run(scheduler, 2)
    scheduler.submit(AbortReq(rid="1", abort_message="enough"))
    run(scheduler, 2)
    assert run(scheduler, 0) == ["1"]  # "10" goes on
    assert scheduler.finished_reqs[0].finished_reason == FINISH_ABORT("enough")
    scheduler.submit(AbortReq(abort_all=True))
    assert sorted(run(scheduler)) == ["1", "10", "2"]
    assert {type(req.finished_reason) for req in scheduler.finished_reqs} == {FINISH_ABORT}


def test_an_adapter_is_a_part_of_the_namespace():
    scheduler = serving()
    scheduler.submit(TokenizedGenerateReqInput("r", [1, 2, 3], SamplingParams(2), lora_id="x"))
    run(scheduler)
    found = [
        len(scheduler.tree_cache.match_prefix(MatchPrefixParams(key)).device_indices)
        for key in (RadixKey([1, 2, 3]), RadixKey([1, 2, 3], compose_extra_key(lora_id="x")))
    ]
    assert found == [0, 3]


# ---- pools and the controller --------------------------------------------------------------------


def test_a_device_pool_is_asked_as_sglang_s():
    pool = MHATokenToKVPool(4, 2, torch.float16, 2, 3, 2, "cpu", False, 5, None, None, None, 1, 3)
    assert (pool.start_layer, pool.end_layer) == (1, 3)
    k, v = pool.get_kv_size_bytes()
    assert (k, v) == (2 * 6 * 2 * 3 * 2, 2 * 6 * 2 * 5 * 2)
    assert pool.mem_usage == (k + v) / 2**30
    rows = torch.ones(1, 2, 3), torch.ones(1, 2, 5)
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), torch.tensor([3]), *rows, layer_id_override=2)
    assert [int(pool.k_buffer[layer][3].sum()) for layer in (0, 1)] == [0, 6]
    with pytest.raises(InvalidArgument, match=r"v_scale=2\.0 of set_kv_buffer"):
        pool.set_kv_buffer(1, torch.tensor([3]), *rows, v_scale=2.0)
    with pytest.raises(InvalidArgument, match="swa_head_num=1"):
        MHATokenToKVPool(4, 2, torch.float16, 2, 3, 2, "cpu", swa_head_num=1)


def test_a_latent_row_comes_back_in_its_parts():
    pool = MLATokenToKVPool(4, 2, torch.float32, 3, 2, 1, "cpu")
    assert pool.get_kv_size_bytes() == 6 * 5 * 4
    latent, rope = torch.rand(2, 1, 3), torch.rand(2, 1, 2)
    slots = torch.tensor([2, 5])
    pool.set_mla_kv_buffer(0, slots, latent, rope)
    got = pool.get_mla_kv_buffer(SimpleNamespace(layer_id=0), slots.flip(0), torch.float64)
    assert torch.equal(got[0], latent.flip(0).double())
    assert torch.equal(got[1], rope.flip(0).double())
    with pytest.raises(InvalidArgument, match="use_nsa=True"):
        MLATokenToKVPool(4, 2, torch.float32, 3, 2, 1, "cpu", use_nsa=True)


def test_a_getter_waits_on_the_counter_by_that_name():
    waited = []
    pool = MLATokenToKVPool(4, 2, torch.float32, 3, 2, 1, "cpu")
    pool.register_layer_transfer_counter(
        layer_transfer_counter=SimpleNamespace(wait_until=waited.append)
    )
    pool.get_key_buffer(0)
    assert waited == [0]


def test_host_pools_know_their_widths():
    mha = MHATokenToKVPool(4, 2, torch.float16, 2, 3, 2, "cpu", v_head_dim=5)
    host = MHATokenToKVPoolHost(mha, 2.0, 0, 2, "layer_first")
    assert (host.head_num, host.head_dim, host.get_ksize_per_token()) == (2, 3, 2 * 3 * 2 * 2)
    mla = MLATokenToKVPool(4, 2, torch.float16, 3, 2, 1, "cpu")
    latent = MLATokenToKVPoolHost(mla, 2.0, 0, 2, "page_first")
    assert (latent.kv_lora_rank, latent.qk_rope_head_dim, latent.kv_cache_dim) == (3, 2, 5)
    assert latent.get_ksize_per_token() == latent.get_size_per_token() == 10
    assert latent.allocator.dims is not None
    assert latent.allocator.dtype == torch.float16


def two_tier(group: object = None) -> HiRadixCache:
    pool = MLATokenToKVPool(8, 1, torch.float16, 3, 2, 1, "cpu")
    allocator = TokenToKVPoolAllocator(8, torch.float16, "cpu", pool)
    params = CacheInitParams(False, None, allocator, 1, tp_cache_group=group)
    return HiRadixCache(params, ServerArgs(enable_hierarchical_cache=True))


def test_a_two_tier_tree_and_its_controller_know_the_ranks():
    cache = two_tier()
    controller = cache.cache_controller
    assert (controller.tp_rank, controller.tp_world_size, cache.tp_world_size) == (0, 1, 1)
    assert (cache.pp_rank, cache.pp_size, cache.enable_storage) == (0, 1, False)
    assert cache.kv_cache is controller.mem_pool_device
    cache.shutdown()
    ranks = SimpleNamespace(rank=lambda: 1, size=lambda: 2)  # as torch.distributed's groups
    assert rank_of(ranks) == (1, 2)
    assert two_tier(SingleRank()).tp_world_size == 1


def test_the_height_of_a_node():
    cache = two_tier()
    for key in ([1, 2], [1, 3]):
        slots = cache.token_to_kv_pool_allocator.alloc(2)
        cache.insert(InsertParams(RadixKey(key), slots))
    leaf = cache.match_prefix(MatchPrefixParams(RadixKey([1, 3]))).last_device_node
    assert [cache.get_height(n) for n in (cache.root_node, leaf.parent, leaf)] == [0, 1, 2]


def test_operations_are_counted_by_the_class():
    CacheOperation.counter = 0
    slots = torch.tensor([1])
    made = [CacheOperation(slots, slots, node_id=7) for _ in range(2)]
    assert [op.id for op in made] == [0, 1]
    assert (CacheOperation.counter, made[0].data) == (2, None)
    assert made[0] < made[1]


def test_an_allocator_describes_itself():
    allocator = PagedTokenToKVPoolAllocator(16, 4, torch.float16, "cpu", None, need_sort=True)
    allocator.free(allocator.alloc(4))
    assert allocator.debug_print() == "3 free, 1 released pages"
