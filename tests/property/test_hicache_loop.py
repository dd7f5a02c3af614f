"""The serving loop on two tiers, on the simulated machine: right in every drawn order, no race.

Every token depends on the KV that was read, so a wrong row gives a wrong output, and the stand-in
model compares every row of every forward besides.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.reference import LAYOUTS
from refcache.runtime import RaceFound, SimulatedRuntime, Tracker, drawn, eager, lazy
from refcache.tags import greedy
from refcache.types import WRITE_POLICIES, ServerArgs

VOCAB = 3


def make(driver, *, page=1, size=24, host=1, policy="write_through", overlap=True, **more):
    args = ServerArgs(
        page_size=page,
        max_total_tokens=size,
        max_running_requests=2,
        context_length=32,
        chunked_prefill_size=4,
        disable_overlap_schedule=not overlap,
        enable_hierarchical_cache=True,
        hicache_ratio=1 + host * page / size,
        hicache_write_policy=policy,
        **more,
    )
    machine = SimulatedRuntime(driver, Tracker())
    scheduler = Scheduler(args, ModelConfig(num_hidden_layers=2, vocab_size=VOCAB), runtime=machine)
    scheduler.tree_cache.load_back_threshold = 1
    return scheduler


def serve(scheduler, prompts, outputs=4, retract_at=()):
    for i, tokens in enumerate(prompts):
        scheduler.submit(TokenizedGenerateReqInput(f"r{i}", tokens, SamplingParams(outputs)))
    for step in range(400):
        if scheduler.is_idle():
            break
        if step in retract_at:
            scheduler.force_retraction()
        if scheduler.step() is None:
            scheduler.runtime.synchronize()  # time passes: copies finish
    assert scheduler.is_idle()
    scheduler.runtime.synchronize()
    scheduler.tree_cache.check_hicache_events()
    for i, tokens in enumerate(prompts):
        done = next(r for r in scheduler.finished_reqs if r.rid == f"r{i}")
        assert list(done.output_ids) == greedy(tokens, outputs, VOCAB)
    tree = scheduler.tree_cache
    assert not tree.ongoing_write_through
    assert not tree.ongoing_load_back
    free = scheduler.token_to_kv_pool_allocator.available_size()
    assert free + tree.evictable_size() == scheduler.max_total_num_tokens


A, B, C = [0, 1, 2, 0, 1, 2, 0, 1, 2], [1, 1, 1, 2, 2, 2, 0, 0], [2, 1, 0, 2, 1, 0, 2]
PROMPTS = [A, B, C, A, [*B, 1], C, [*A, 2, 2], B]


@pytest.mark.parametrize("driver", [eager, lazy])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("policy", WRITE_POLICIES)
@pytest.mark.parametrize("page", [1, 4])
def test_prompts_come_back_from_the_host(policy, page, overlap, driver):
    scheduler = make(driver, page=page, host=40, policy=policy, overlap=overlap)
    loads = []
    start_loading = scheduler.tree_cache.cache_controller.start_loading

    def counted():
        index = start_loading()
        loads.append(index)
        return index

    scheduler.tree_cache.cache_controller.start_loading = counted
    serve(scheduler, PROMPTS, retract_at=(9,))
    assert any(index >= 0 for index in loads)


@settings(max_examples=40, deadline=None)
@given(
    choices=st.lists(st.integers(0, 5), max_size=400),
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=11), min_size=2, max_size=8),
    retract_at=st.sets(st.integers(0, 20), max_size=2),
    page=st.sampled_from([1, 2, 4]),
    host=st.sampled_from([1, 1, 4]),
    policy=st.sampled_from(WRITE_POLICIES),
    overlap=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    io_backend=st.sampled_from(["kernel", "direct"]),
)
def test_any_order(choices, prompts, retract_at, page, host, policy, overlap, layout, io_backend):
    scheduler = make(
        drawn(choices),
        page=page,
        host=host,
        policy=policy,
        overlap=overlap,
        hicache_mem_layout=layout,
        hicache_io_backend=io_backend,
    )
    serve(scheduler, prompts, retract_at=retract_at)


def test_without_the_fence_a_load_races_with_the_forward():
    """B07: slots of a finished request are loaded into while its last forward may write them."""
    seen = 0
    for size in range(14, 24):
        scheduler = make(lazy, size=size)
        controller = scheduler.tree_cache.cache_controller
        controller.register_forward_stream(None)
        try:
            serve(scheduler, PROMPTS)
        except RaceFound:
            seen += 1
    assert seen
