"""The calls that the document quotes, as it writes them: each works, or is refused by name."""

import threading
from types import SimpleNamespace

import pytest
import torch

from refcache.allocator import PagedTokenToKVPoolAllocator
from refcache.controller import HiCacheController
from refcache.engine import (
    ModelConfig,
    SamplingParams,
    ScheduleBatch,
    Scheduler,
    TokenizedGenerateReqInput,
)
from refcache.engine.alloc import alloc_paged_token_slots_extend, write_cache_indices
from refcache.engine.model_runner import MemoryPoolConfig, ModelRunner, make_model
from refcache.engine.models.model import TagModel
from refcache.engine.scheduling.scheduler import make_tree
from refcache.errors import InvalidArgument, InvalidSlot, MemoryReleased, NotIdle, UnknownName
from refcache.events import AllBlocksCleared
from refcache.keys import RadixKey
from refcache.pool import MHATokenToKVPool, ReqToTokenPool, host_pool_for
from refcache.runtime import RaceFound, SimulatedRuntime, Tracker, eager, lazy
from refcache.tags import greedy
from refcache.tree.consensus import SingleRank
from refcache.types import MatchPrefixParams, ServerArgs, SpeculativeAlgorithm

VOCAB = 3
MODEL = ModelConfig(num_hidden_layers=2, vocab_size=VOCAB)


def args(**more):
    sizes = {"page_size": 4, "max_total_tokens": 64, "context_length": 48}
    return ServerArgs(**{**sizes, "max_running_requests": 2, **more})


def document_pool(server_args, **more):
    """``self.token_to_kv_pool = MHATokenToKVPool(...)``, with every argument of the document."""
    arguments = {
        "page_size": 4,
        "dtype": torch.int64,
        "head_num": 1,
        "head_dim": 2,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": server_args.enable_memory_saver,
        "start_layer": 3,
        "end_layer": 5,
        "enable_alt_stream": not server_args.enable_pdmux,
        "enable_kv_cache_copy": server_args.speculative_algorithm is not None,
    }
    return MHATokenToKVPool(64, **{**arguments, **more})


# ---- the pool ------------------------------------------------------------------------------------


def test_the_pool_takes_every_argument_of_the_document():
    pool = document_pool(args())
    assert (pool.start_layer, pool.end_layer, pool.layer_num) == (3, 5, 2)
    assert not pool.enable_kv_cache_copy
    rows = torch.ones(1, 1, 2, dtype=torch.int64)
    pool.set_kv_buffer(4, torch.tensor([7]), rows, rows)
    assert pool.get_key_buffer(4)[7].tolist() == [[1, 1]]
    assert pool.k_buffer[1][7].tolist() == [[1, 1]]
    for layer in (2, 5):
        with pytest.raises(InvalidArgument, match=f"layer {layer}: this pool holds layers 3 to 4"):
            pool.get_key_buffer(layer)


def test_layers_that_do_not_fit_their_number_are_refused():
    with pytest.raises(InvalidArgument, match="layers 3 to 4, the last not included: expected 2"):
        document_pool(args(), end_layer=4)


@pytest.mark.parametrize("mla", [False, True])
def test_runner_and_pool_count_layers_alike(mla):
    shape = {"kv_lora_rank": 3, "qk_rope_head_dim": 1} if mla else {}
    runner = ModelRunner(args(), ModelConfig(num_hidden_layers=3, **shape))
    pool = runner.token_to_kv_pool
    assert (pool.start_layer, pool.end_layer) == (runner.start_layer, runner.end_layer) == (0, 3)
    host = host_pool_for(pool, args())
    assert (host.start_layer, host.end_layer) == (0, 3)


def test_the_alternative_stream_writes_v_while_k_is_written():
    machine = SimulatedRuntime(lazy, Tracker())
    pool = document_pool(args(), runtime=machine)
    rows = torch.ones(1, 1, 2, dtype=torch.int64)
    for pool.capture_mode in (False, True):
        pool.set_kv_buffer(3, torch.tensor([7]), rows, rows)
        machine.launch("attention", lambda: None, [pool.region(1, 3, 7)])
    machine.synchronize()
    assert [a.actor.name for a in machine.history if a.name == "set_kv_buffer"] == [
        "default",
        "default",
        "alt",
    ]
    assert pool.v_buffer[0][7].tolist() == [[1, 1]]
    assert document_pool(args(enable_pdmux=True)).alt_stream is None


@pytest.mark.parametrize("driver", [eager, lazy])
def test_the_loop_runs_with_the_alternative_stream_and_not_without_its_edge(driver):
    def serve(joined):
        machine = SimulatedRuntime(driver, Tracker())
        scheduler = Scheduler(args(), MODEL, runtime=machine)
        pool = scheduler.model_runner.token_to_kv_pool
        pool.capture_mode = True
        if not joined:
            scheduler.forward_stream.wait_stream = lambda other: (
                None
                if other is pool.alt_stream
                else type(scheduler.forward_stream).wait_stream(scheduler.forward_stream, other)
            )
        scheduler.submit(TokenizedGenerateReqInput("a", [0, 1, 2], SamplingParams(3)))
        scheduler.dispatch_event_loop()
        machine.synchronize()
        return list(scheduler.finished_reqs[0].output_ids)

    assert serve(True) == greedy([0, 1, 2], 3, VOCAB)
    with pytest.raises(RaceFound, match="plane 1"):
        serve(False)


def test_speculation_moves_the_kv_of_accepted_tokens():
    pool = document_pool(args(speculative_algorithm="EAGLE"))
    for layer in (3, 4):
        rows = torch.arange(4).view(2, 1, 2) + 10 * layer
        pool.set_kv_buffer(layer, torch.tensor([8, 9]), rows, rows)
    pool.move_kv_cache(torch.tensor([9, 12]), torch.tensor([8, 9]))
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        first = buffer[8].flatten().tolist()
        assert buffer[9].flatten().tolist() == first
        assert buffer[12].flatten().tolist() == [n + 2 for n in first]
    with pytest.raises(InvalidArgument, match="expected \\[n\\] each"):
        pool.move_kv_cache(torch.tensor([9]), torch.tensor([8, 9]))
    with pytest.raises(InvalidArgument, match="expected enable_kv_cache_copy=True"):
        document_pool(args()).move_kv_cache(torch.tensor([9]), torch.tensor([8]))
    runner = ModelRunner(args(speculative_algorithm="EAGLE3"), MODEL)
    assert runner.token_to_kv_pool.enable_kv_cache_copy


# ---- the memory saver ----------------------------------------------------------------------------


def serve(scheduler, rid):
    scheduler.submit(TokenizedGenerateReqInput(rid, range(12), SamplingParams(2)))
    scheduler.dispatch_event_loop()
    return scheduler.finished_reqs[-1]


@pytest.mark.parametrize("two_tiers", [False, True])
def test_released_memory_is_forgotten_on_every_tier(two_tiers):
    tiers = {"enable_hierarchical_cache": two_tiers, "enable_kv_cache_events": True}
    scheduler = Scheduler(args(enable_memory_saver=True, **tiers), MODEL)
    serve(scheduler, "a")
    assert serve(scheduler, "b").cached_tokens == 8
    scheduler.release_memory_occupation()
    assert scheduler.tree_cache.take_events()[-1] == AllBlocksCleared()
    pool = scheduler.model_runner.token_to_kv_pool
    for refused in (
        lambda: pool.get_key_buffer(0),
        lambda: pool.set_kv_buffer(0, torch.tensor([4]), *[torch.ones(1, 1, 1).long()] * 2),
        scheduler.release_memory_occupation,
        lambda: scheduler.handle_generate_request(TokenizedGenerateReqInput("c", [1])),
    ):
        with pytest.raises(MemoryReleased, match="expected resume first"):
            refused()
    assert scheduler.tree_cache.take_events() == []
    scheduler.resume_memory_occupation()
    assert serve(scheduler, "d").cached_tokens == 0
    assert scheduler.token_to_kv_pool_allocator.available_size() < 64


def test_a_prefix_that_survives_the_release_is_seen_as_garbage(monkeypatch):
    scheduler = Scheduler(args(enable_memory_saver=True), MODEL)
    serve(scheduler, "a")
    monkeypatch.setattr(scheduler, "flush_cache", lambda: None)
    scheduler.release_memory_occupation()
    scheduler.resume_memory_occupation()
    with pytest.raises(Exception, match="expected token 0 of request b"):
        serve(scheduler, "b")


def test_memory_is_not_released_under_a_request_nor_without_the_saver():
    scheduler = Scheduler(args(enable_memory_saver=True), MODEL)
    scheduler.submit(TokenizedGenerateReqInput("a", range(12), SamplingParams(2)))
    with pytest.raises(NotIdle, match="release_memory_occupation"):
        scheduler.release_memory_occupation()
    with pytest.raises(InvalidArgument, match="expected a release before it"):
        scheduler.resume_memory_occupation()
    without = Scheduler(args(), MODEL)
    for call in (without.release_memory_occupation, without.resume_memory_occupation):
        with pytest.raises(InvalidArgument, match="expected enable_memory_saver"):
            call()


# ---- the runner ----------------------------------------------------------------------------------


def test_pools_are_made_from_a_config():
    runner = ModelRunner(args(), MODEL)
    runner._init_pools(MemoryPoolConfig(max_total_num_tokens=32, max_running_requests=5))
    assert runner.token_to_kv_pool.size == runner.token_to_kv_pool_allocator.size == 32
    assert runner.req_to_token_pool.size == runner.max_running_requests == 5


@pytest.mark.parametrize(
    ("free", "before", "tokens"),
    [
        (1.0, 1.0, 0.75 * (1 << 30) // 32 // 4 * 4),  # nothing was loaded
        (0.5, 1.0, 0.25 * (1 << 30) // 32 // 4 * 4),  # weights took half
        (0.5, None, 0.375 * (1 << 30) // 32 // 4 * 4),  # measured both times
    ],
)
def test_memory_is_measured_where_there_is_a_device(free, before, tokens, monkeypatch):
    asked = []

    def mem_get_info(device):
        asked.append(device)
        return int(free * (1 << 30)), 1 << 40

    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    runner = ModelRunner.__new__(ModelRunner)
    monkeypatch.setattr(ModelRunner, "_init_pools", lambda self, config: None)
    monkeypatch.setattr(ModelRunner, "initialize", lambda self, memory: None)
    sizes = args(device="cuda:1", max_total_tokens=None, mem_fraction_static=0.75)
    runner.__init__(sizes, MODEL)
    config = runner._resolve_memory_pool_config(free if before is None else before)
    assert config.max_total_num_tokens == tokens
    assert config.mem_fraction_static == 0.75
    assert asked[-1] == "cuda:1"


def test_without_a_device_or_a_size_memory_is_asked_for():
    with pytest.raises(InvalidArgument, match="expected max_total_tokens, or the GB"):
        ModelRunner(args(max_total_tokens=None), MODEL)
    with pytest.raises(InvalidArgument, match=r"mem_fraction_static=0\.75"):
        ModelRunner(args(mem_fraction_static=0.75), MODEL, pre_model_load_memory=1e-9)


# ---- the controller ------------------------------------------------------------------------------


def parts():
    pool = document_pool(args())
    allocator = PagedTokenToKVPoolAllocator(64, 4, torch.int64, "cpu", pool)
    return allocator, host_pool_for(pool, args())


def test_the_controller_without_an_io_backend_chooses_one():
    allocator, host = parts()
    controller = HiCacheController(
        token_to_kv_pool_allocator=allocator,
        mem_pool_host=host,
        page_size=4,
        tp_group=None,
        load_cache_event=threading.Event(),
        write_policy="write_through_selective",
        io_backend="",
        storage_backend=None,
        prefetch_threshold=256,
        model_name=None,
        storage_backend_extra_config=None,
        pp_rank=0,
        pp_size=1,
        enable_storage_metrics=False,
    )
    assert controller.io_backend == "auto"
    assert (controller.enable_storage, controller.storage_backend) == (False, None)
    assert (controller.storage_backend_type, controller.enable_storage_metrics) == (None, False)
    assert (controller.pp_rank, controller.pp_size) == (0, 1)
    slots = allocator.alloc(4)
    host_slots = controller.write(slots)
    loaded = controller.load(host_slots)
    assert controller.start_loading() == 0
    assert len(loaded) == 4
    with pytest.raises(InvalidArgument, match="unknown write_policy 'write_backup'"):
        HiCacheController(allocator, host, 4, write_policy="write_backup")
    assert issubclass(UnknownName, ValueError)  # what the document raises


# ---- the scheduler's arguments -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "eagle"),
    [
        (None, False),
        ("EAGLE", True),
        ("EAGLE3", True),
        ("nextn", True),
        ("STANDALONE", False),
        ("NGRAM", False),
    ],
)
def test_which_algorithms_have_bigram_keys(name, eagle):
    scheduler = Scheduler(args(speculative_algorithm=name), MODEL)
    assert scheduler.spec_algorithm.is_eagle() is eagle
    assert scheduler.spec_algorithm.is_none() is (name is None)
    assert scheduler.tree_cache.is_eagle is eagle
    assert list(serve(scheduler, "a").output_ids) == greedy(range(12), 2, VOCAB)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"speculative_algorithm": "EAGEL"}, "unknown speculative_algorithm 'EAGEL'"),
        ({"hicache_mem_layout": "layer_last"}, "unknown hicache_mem_layout 'layer_last'"),
        (
            {"enable_hierarchical_cache": True, "disable_radix_cache": True},
            "enable_hierarchical_cache with disable_radix_cache: expected one of both",
        ),
        (
            {"enable_dp_attention": True, "tp_size": 4, "dp_size": 3},
            "dp_size=3 with enable_dp_attention: expected a divisor of tp_size=4",
        ),
        ({"tp_size": 0}, "tp_size=0: expected at least 1"),
    ],
)
def test_server_arguments_are_checked(wrong, message):
    with pytest.raises(InvalidArgument, match=message):
        args(**wrong)


# ---- the batch, and running it -------------------------------------------------------------------


def test_a_batch_is_made_as_the_document_makes_it():
    scheduler = Scheduler(args(), MODEL)
    batch = ScheduleBatch.init_new(
        [],
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
        chunked_req=scheduler.chunked_req,
    )
    assert batch.model_config is MODEL
    assert batch.enable_overlap
    assert batch.spec_algorithm is SpeculativeAlgorithm.NONE
    assert batch.runtime is scheduler.runtime
    assert (batch.hicache_consumer_index, batch.return_logprob) == (-1, False)


def overlap_step(scheduler, batch):
    """The body of the document's ``run_batch``."""
    model_worker_batch = batch.get_model_worker_batch()
    rows = model_worker_batch.req_pool_indices
    future_indices = scheduler.future_map.future_indices(rows)
    with scheduler.forward_stream_ctx:
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        scheduler.future_map.resolve_future(model_worker_batch)
        batch_result = scheduler.tp_worker.forward_batch_generation(model_worker_batch)
        batch_result.copy_done = scheduler.runtime.Event()
        if batch_result.delay_sample_func is None:
            scheduler.future_map.store_to_map(future_indices, batch_result)
            batch_result.copy_to_cpu(return_logprob=batch.return_logprob)
        else:
            batch_result.future_indices = future_indices
    batch.output_ids = -future_indices.indices
    return batch_result


def test_the_document_s_step_gives_the_loop_s_tokens():
    scheduler = Scheduler(args(), MODEL)
    scheduler.submit(TokenizedGenerateReqInput("a", range(5), SamplingParams(3)))
    scheduler.process_input_requests(scheduler.recv_requests())
    made = []
    for _ in range(3):
        batch = scheduler.get_next_batch_to_run()
        result = overlap_step(scheduler, batch)
        assert result.copy_done.query()
        made += result.tokens()
        scheduler.process_batch_result(batch.copy(), result)
        scheduler.last_batch = batch
    assert made == greedy(range(5), 3, VOCAB)
    assert scheduler.is_idle()


def test_log_probabilities_are_refused():
    scheduler = Scheduler(args(), MODEL)
    scheduler.submit(TokenizedGenerateReqInput("a", range(5), SamplingParams(3)))
    scheduler.process_input_requests(scheduler.recv_requests())
    batch = scheduler.get_next_batch_to_run()
    batch.return_logprob = True
    with pytest.raises(InvalidArgument, match="return_logprob=True"):
        overlap_step(scheduler, batch)


class Delayed(TagModel):
    """Picks tokens only when it is asked again, as a grammar makes it."""

    waiting = 0

    def forward(self, batch, backend):
        hidden, out = self._embed(batch)
        for layer in self.layers:
            k, v = self._project(layer, hidden)
            out = layer.forward(hidden, k, v, batch, backend)
        self.waiting += 1
        most = max(self.waiting, getattr(self, "most", 0))
        self.most = most

        def sample():
            self.waiting -= 1
            return self._sample(out)

        return sample


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("driver", [eager, lazy])
def test_sampling_may_wait_until_the_results_before_it_are_known(overlap, driver):
    def delayed(runner):
        model = make_model(runner)
        model.__class__ = Delayed
        return model

    machine = SimulatedRuntime(driver, Tracker())
    scheduler = Scheduler(
        args(disable_overlap_schedule=not overlap), MODEL, runtime=machine, make_model=delayed
    )
    seen = []
    inner = scheduler.process_batch_result

    def processed(batch, result):
        seen.append(scheduler.model_runner.model.waiting)
        inner(batch, result)

    scheduler.process_batch_result = processed
    for rid in ("a", "b"):
        scheduler.submit(TokenizedGenerateReqInput(rid, [0, 1, *range(3)], SamplingParams(4)))
    scheduler.dispatch_event_loop()
    machine.synchronize()
    for req in scheduler.finished_reqs:
        assert list(req.output_ids) == greedy([0, 1, *range(3)], 4, VOCAB)
    # in the overlap loop the next forward is launched, and its sampling is not, when a result is
    # processed
    assert max(seen) == (1 if overlap else 0)


# ---- metadata ------------------------------------------------------------------------------------


def prepared(scheduler, rid="a"):
    scheduler.submit(TokenizedGenerateReqInput(rid, range(5), SamplingParams(3)))
    scheduler.process_input_requests(scheduler.recv_requests())
    return scheduler.get_next_batch_to_run().get_model_worker_batch()


def test_a_forward_reads_its_own_page_table():
    scheduler = Scheduler(args(disable_overlap_schedule=True), MODEL)
    backend = scheduler.model_runner.attn_backend
    assert backend.forward_metadata is None
    batch = prepared(scheduler)
    scheduler.tp_worker.forward_batch_generation(batch)
    assert backend.forward_metadata.batch is batch
    assert [len(page) for page in backend.forward_metadata.pages] == [5]


def test_attention_without_metadata_or_with_another_batch_s_is_refused():
    scheduler = Scheduler(args(disable_overlap_schedule=True), MODEL)
    runner, batch = scheduler.model_runner, prepared(scheduler)
    with pytest.raises(InvalidArgument, match=r"no forward metadata for a batch of \['a'\]"):
        runner.model.forward(batch, runner.attn_backend)
    runner.init_forward_metadata(batch)
    runner.model.forward(batch, runner.attn_backend)
    later = prepared(scheduler, "b")
    with pytest.raises(InvalidArgument, match="another batch's forward metadata"):
        runner.model.forward(later, runner.attn_backend)


# ---- a match -------------------------------------------------------------------------------------


class OwnsLess:
    """A tree that says it owns fewer slots than it gives; and one that keeps states."""

    def __init__(self, tree, owned, mamba=None):
        self.tree, self.owned, self.mamba, self.asked = tree, owned, mamba, []

    def __getattr__(self, name):
        return getattr(self.tree, name)

    def supports_mamba(self):
        return self.mamba is not None

    def match_prefix(self, params):
        self.asked.append(params.cow_mamba)
        found = self.tree.match_prefix(params)
        return found._replace(cache_protected_len=self.owned, mamba_branching_seqlen=self.mamba)


@pytest.mark.parametrize(("owned", "expected"), [(None, 8), (4, 4), (0, 0)])
def test_what_a_tree_says_it_owns_is_believed(owned, expected):
    scheduler = Scheduler(args(), MODEL)
    serve(scheduler, "a")
    tree = OwnsLess(scheduler.tree_cache, owned)
    scheduler.handle_generate_request(TokenizedGenerateReqInput("b", range(12)))
    req = scheduler.waiting_queue[-1]
    req.init_next_round_input(tree)
    assert len(req.prefix_indices) == 8
    assert req.cache_protected_len == expected


@pytest.mark.parametrize("mamba", [None, 16])
def test_a_tree_is_asked_whether_it_keeps_states(mamba):
    scheduler = Scheduler(args(), MODEL)
    tree = OwnsLess(scheduler.tree_cache, None, mamba)
    scheduler.handle_generate_request(TokenizedGenerateReqInput("b", range(12)))
    req = scheduler.waiting_queue[-1]
    req.init_next_round_input(tree)
    assert tree.asked == [mamba is not None]
    assert req.mamba_branching_seqlen == mamba


def test_slots_of_a_pool_are_checked_before_anything_is_launched():
    pool = document_pool(args())
    rows = torch.ones(1, 1, 2, dtype=torch.int64)
    with pytest.raises(InvalidSlot, match="slots 68 to 68"):
        pool.set_kv_buffer(3, torch.tensor([68]), rows, rows)
    assert isinstance(ReqToTokenPool(1, 2, "cpu", True), ReqToTokenPool)


def test_buffers_have_the_document_s_shapes():
    pool = document_pool(args(), v_head_dim=3, dtype=torch.float8_e4m3fn)
    assert pool.store_dtype == torch.uint8
    assert [tuple(k.shape) for k in pool.k_buffer] == [(68, 1, 2)] * 2  # 64 + a page
    assert [tuple(v.shape) for v in pool.v_buffer] == [(68, 1, 3)] * 2
    buffers = [*pool.k_buffer, *pool.v_buffer]
    assert not any(buffer.any() for buffer in buffers)
    assert {buffer.dtype for buffer in buffers} == {torch.uint8}
    assert pool.data_ptrs.dtype == torch.uint64
    addresses = [buffer.data_ptr() for buffer in buffers]
    assert pool.data_ptrs.tolist() == addresses
    assert pool.k_data_ptrs.tolist() + pool.v_data_ptrs.tolist() == addresses
    assert pool.data_strides.tolist() == [2, 2, 3, 3]  # bytes
    assert pool.planes[0].buffer[1].data_ptr() == pool.k_buffer[1].data_ptr()


def test_slot_0_is_nobody_s():
    pool = document_pool(args())
    allocator = PagedTokenToKVPoolAllocator(64, 4, torch.int64, "cpu", pool)
    assert allocator.get_kvcache() is pool
    slots = allocator.alloc(64)
    assert slots.tolist() == list(range(4, 68))
    with pytest.raises(InvalidSlot):
        allocator.free(torch.tensor([0]))
    with pytest.raises(InvalidArgument, match="expected a multiple of page_size=4"):
        allocator.alloc(6)


def test_a_look_at_a_buffer_does_not_wait():
    class Counter:
        waits = 0

        def wait_until(self, threshold):
            self.waits += 1

    pool, counter = document_pool(args()), Counter()
    pool.register_layer_transfer_counter(counter)
    assert pool._get_key_buffer(3).data_ptr() == pool.k_buffer[0].data_ptr()
    assert counter.waits == 0
    pool.get_key_buffer(3)
    assert counter.waits == 1


def test_the_tree_gets_the_document_s_parameters():
    made = []

    def tree(params, server_args):
        made.append(params)
        return make_tree(params, server_args)

    server_args = args(
        enable_metrics=True, radix_eviction_policy="lfu", enable_kv_cache_events=True
    )
    scheduler = Scheduler(server_args, MODEL, make_tree=tree, tp_cpu_group=SingleRank())
    (params,) = made
    runner = scheduler.model_runner
    assert params.req_to_token_pool is runner.req_to_token_pool is scheduler.req_to_token_pool
    assert params.token_to_kv_pool_allocator is runner.token_to_kv_pool_allocator
    assert isinstance(params.tp_cache_group, SingleRank)
    assert (params.page_size, params.chunked_prefill_size) == (4, 8192)
    assert (params.disable, params.is_eagle, params.eviction_policy) == (False, False, "lfu")
    assert (params.enable_metrics, params.enable_kv_cache_events) == (True, True)
    assert (params.pp_rank, params.pp_size, params.sliding_window_size) == (0, 1, None)
    assert params.enable_mamba_extra_buffer is False


def test_slots_for_an_extend_are_asked_for_as_the_document_asks():
    scheduler = Scheduler(args(), MODEL)
    serve(scheduler, "a")
    tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
    found = tree.match_prefix(MatchPrefixParams(RadixKey(list(range(8)))))
    tree.inc_lock_ref(found.last_device_node)
    prefix, last_loc = found.device_indices[:6], found.device_indices[5:6]  # half a page of it
    lengths = torch.tensor([6, 0]), torch.tensor([11, 3])
    out_cache_loc = alloc_paged_token_slots_extend(
        tree_cache=tree,
        prefix_lens=lengths[0],
        prefix_lens_cpu=lengths[0],
        seq_lens=lengths[1],
        seq_lens_cpu=lengths[1],
        last_loc=torch.cat([last_loc, torch.tensor([-1])]),
        extend_num_tokens=8,
    )
    assert out_cache_loc[:2].tolist() == [int(last_loc) + 1, int(last_loc) + 2]
    assert out_cache_loc[2:5].tolist() == list(range(int(out_cache_loc[2]), 3 + out_cache_loc[2]))
    assert out_cache_loc[2] % 4 == out_cache_loc[5] % 4 == 0
    assert out_cache_loc[2] != out_cache_loc[5]

    rows = ReqToTokenPool(2, 16)
    reqs = [
        SimpleNamespace(req_pool_idx=0, prefix_indices=prefix),
        SimpleNamespace(req_pool_idx=1, prefix_indices=prefix[:0]),
    ]
    batch = SimpleNamespace(
        reqs=reqs, req_to_token_pool=rows, prefix_lens=[6, 0], extend_lens=[5, 3]
    )
    write_cache_indices(batch, out_cache_loc)
    assert rows.read(0, slice(0, 11)).tolist() == [*prefix.tolist(), *out_cache_loc[:5].tolist()]
    assert rows.read(1, slice(0, 4)).tolist() == [*out_cache_loc[5:].tolist(), 0]
    allocator.free(torch.cat([out_cache_loc[2:5], out_cache_loc[5:]]))
