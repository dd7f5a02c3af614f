"""What the serving loop does for windows and states: fixed points, refusals, owners."""

from types import SimpleNamespace

import pytest
import torch

from refcache.allocator import SWATokenToKVPoolAllocator
from refcache.engine import AbortReq, ModelConfig, SamplingParams, Scheduler
from refcache.engine import TokenizedGenerateReqInput as Request
from refcache.engine.hybrid import evict_window, track_point
from refcache.engine.models.linear_attention import state_params
from refcache.engine.models.transformer import make_transformer
from refcache.errors import InvalidArgument
from refcache.pool import ReqToTokenPool
from refcache.tree import ChunkCache, MambaRadixCache, SWAChunkCache, SWARadixCache
from refcache.types import CacheInitParams, EvictParams, MatchPrefixParams, ServerArgs


@pytest.mark.parametrize(
    ("prefix", "extend", "branching", "chunk", "expected"),
    [
        (0, 63, None, 64, None),
        (0, 64, None, 64, (64, 64)),
        (0, 100, None, 64, (100, 64)),
        (0, 128, None, 64, (128, 128)),
        (64, 100, None, 64, (164, 128)),
        (0, 200, 64, 64, (65, 64)),
        (0, 200, 128, 64, (129, 128)),
        (64, 100, 64, 64, (164, 128)),
        (64, 200, 100, 64, (264, 256)),
        (0, 300, None, 256, (300, 256)),
        (256, 300, None, 256, (556, 512)),
    ],
)
def test_where_a_prefill_leaves_a_snapshot(prefix, extend, branching, chunk, expected):
    """Computed by SGLang 0.5.10."""
    assert track_point(prefix, extend, branching, chunk) == expected


@pytest.mark.parametrize(
    ("page", "window", "protected", "evicted", "pre_len", "freed", "now"),
    [
        (1, 4, 0, 0, 10, range(6), 6),
        (1, 4, 8, 0, 10, range(0), 8),
        (1, 4, 0, 6, 12, range(6, 8), 8),
        (4, 4, 0, 0, 10, range(4), 4),
        (4, 2, 0, 0, 10, range(8), 8),
    ],
)
def test_what_falls_out_of_a_window(page, window, protected, evicted, pre_len, freed, now):
    """Computed by SGLang 0.5.10."""
    allocator = SWATokenToKVPoolAllocator(32, 32, page, torch.float32, "cpu", None)
    rows = ReqToTokenPool(1, 32, "cpu")
    none = torch.tensor([-1])
    lens = torch.tensor([0]), torch.tensor([0]), torch.tensor([12]), torch.tensor([12])
    slots = allocator.alloc(12) if page == 1 else allocator.alloc_extend(*lens, none, 12)
    rows.write((0, slice(0, 12)), slots)
    req = SimpleNamespace(req_pool_idx=0, swa_evicted_seqlen=evicted, cache_protected_len=protected)
    tree = SimpleNamespace(
        page_size=page,
        sliding_window_size=window,
        req_to_token_pool=rows,
        token_to_kv_pool_allocator=allocator,
    )
    evict_window(tree, req, pre_len)
    gone = (allocator.full_to_swa_index_mapping[slots] == 0).nonzero().flatten().tolist()
    assert gone == list(freed)
    assert req.swa_evicted_seqlen == now


# ---- the loop ------------------------------------------------------------------------------------

SHAPE = {"num_hidden_layers": 2, "head_dim": 2, "vocab_size": 24, "dtype": torch.float64}
STATES = ModelConfig(**SHAPE, mamba2_cache_params=state_params((0,), 1, 2))
WINDOWS = ModelConfig(**SHAPE, swa_attention_layer_ids=(1,), sliding_window_size=3)


def loop(config, **args):
    args = {"max_total_tokens": 40, "context_length": 30, "max_running_requests": 4} | args
    return Scheduler(
        ServerArgs(**args),
        config,
        make_model=lambda runner: make_transformer(runner, 1),
    )


def send(scheduler, rid, prompt, outputs=2, **more):
    scheduler.submit(Request(rid, prompt, SamplingParams(outputs), **more))


def test_the_tree_is_the_one_of_the_model():
    assert isinstance(loop(STATES).tree_cache, MambaRadixCache)
    assert not loop(STATES).enable_overlap
    extra = {"mamba_scheduler_strategy": "extra_buffer", "mamba_track_interval": 4}
    assert loop(STATES, **extra).enable_overlap
    assert loop(STATES, **extra).req_to_token_pool.mamba_pool.size == 4 * 5
    assert isinstance(loop(WINDOWS).tree_cache, SWARadixCache)
    assert isinstance(loop(WINDOWS, disable_radix_cache=True).tree_cache, SWAChunkCache)
    for config in (STATES, WINDOWS):
        with pytest.raises(InvalidArgument, match="one tier"):
            loop(config, enable_hierarchical_cache=True)
    with pytest.raises(InvalidArgument, match="max_mamba_cache_size=1: expected at least 2"):
        loop(STATES, max_mamba_cache_size=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mamba2_cache_params": state_params((0, 1), 1, 2)},
        {"mamba2_cache_params": state_params((2,), 1, 2)},
        {"mamba2_cache_params": state_params((0,), 1, 2), "v_head_dim": 3},
        {"swa_attention_layer_ids": (1,)},
        {"swa_attention_layer_ids": (1,), "sliding_window_size": 2, "kv_lora_rank": 2},
        {
            "swa_attention_layer_ids": (1,),
            "sliding_window_size": 2,
            "mamba2_cache_params": state_params((0,), 1, 2),
        },
    ],
)
def test_a_mix_without_a_pool_is_refused(wrong):
    with pytest.raises(InvalidArgument):
        ModelConfig(**SHAPE | {"num_hidden_layers": 2 + ("kv_lora_rank" in wrong)} | wrong)


def test_admission_waits_for_states_and_asserts_nothing():
    """SGLang 0.5.10 counts tokens only, and fails with rows and states already taken."""
    scheduler = loop(STATES, max_mamba_cache_size=3)
    for i in range(5):
        send(scheduler, f"r{i}", [i, 1, 2, 3], outputs=4)
    most = 0
    while not scheduler.is_idle():
        scheduler.step()
        most = max(most, scheduler.running_batch.batch_size())
    assert most == 3
    pool, tree = scheduler.req_to_token_pool.mamba_pool, scheduler.tree_cache
    assert pool.available_size() + tree.mamba_evictable_size() == 3


def test_a_request_that_waits_holds_no_state():
    """H10: it keeps the copy that its match made, when it is not admitted or is aborted."""
    scheduler = loop(STATES, max_mamba_cache_size=6, max_total_tokens=26)
    send(scheduler, "first", [1, 2, 3, 4])
    scheduler.event_loop_normal()
    send(scheduler, "long", [5] * 12, outputs=8)
    scheduler.step()
    send(scheduler, "waits", [1, 2, 3, 4, *range(5, 15)], outputs=6)
    scheduler.step()
    (req,) = scheduler.waiting_queue
    assert len(req.prefix_indices) == 4
    assert req.mamba_pool_idx is None
    scheduler.submit(AbortReq("waits"))
    scheduler.event_loop_normal()
    pool, tree = scheduler.req_to_token_pool.mamba_pool, scheduler.tree_cache
    assert pool.available_size() + tree.mamba_evictable_size() == 6


def test_a_branching_point_is_snapshotted_and_the_next_request_starts_there():
    scheduler = loop(
        STATES,
        mamba_scheduler_strategy="extra_buffer",
        mamba_track_interval=8,
        mamba_cache_chunk_size=4,
        max_total_tokens=80,
    )
    common = [1, 2, 3, 4, 5]
    for i, tail in enumerate(([6] * 8, [7] * 8, [8] * 8)):
        send(scheduler, f"r{i}", common + tail, outputs=1)
        scheduler.event_loop_normal()
    assert [req.cached_tokens for req in scheduler.finished_reqs] == [0, 0, 4]


def test_preemption_counts_states():
    scheduler = loop(
        STATES,
        max_mamba_cache_size=2,
        max_running_requests=2,
        enable_priority_scheduling=True,
        schedule_conservativeness=0.01,
    )
    for i in range(2):
        send(scheduler, f"low{i}", [i, 1, 2], outputs=8, priority=0)
    scheduler.step()
    scheduler.step()
    assert scheduler.running_batch.batch_size() == 2
    send(scheduler, "high", [9, 1, 2], outputs=2, priority=50)
    while not any(req.rid == "high" for req in scheduler.finished_reqs):
        scheduler.step()
    assert scheduler.num_retracted_reqs == 1
    scheduler.event_loop_normal()
    assert len(scheduler.finished_reqs) == 3


def test_no_tree_shares_nothing_and_frees_all():
    allocator = SWATokenToKVPoolAllocator(8, 8, 1, torch.float32, "cpu", None)
    rows = ReqToTokenPool(1, 8, "cpu")
    cache = SWAChunkCache(CacheInitParams(True, rows, allocator, 1, sliding_window_size=2))
    assert cache.is_chunk_cache()
    assert cache.supports_swa()
    assert not cache.supports_mamba()
    assert not ChunkCache(CacheInitParams(True, rows, allocator, 1)).supports_swa()
    match = cache.match_prefix(MatchPrefixParams(None))
    assert len(match.device_indices) == 0
    assert match.last_device_node is None
    assert cache.evict(EvictParams(3)).num_tokens_evicted == 0
    assert cache.protected_size() == cache.evictable_size() == 0
    for wrong in (None, 0):
        with pytest.raises(InvalidArgument, match="sliding_window_size"):
            SWAChunkCache(CacheInitParams(True, rows, allocator, 1, sliding_window_size=wrong))
