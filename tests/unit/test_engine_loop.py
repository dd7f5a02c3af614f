"""The serving loop by hand: outputs, hits, chunks, retraction, abort, refusal."""

from array import array

import pytest
import torch

from refcache.engine import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_TOKEN,
    AbortReq,
    ModelConfig,
    SamplingParams,
    Scheduler,
    SchedulerObserver,
    TokenizedGenerateReqInput,
)
from refcache.errors import DoubleFree, InvalidArgument, NotIdle
from refcache.tags import greedy
from refcache.types import ServerArgs

VOCAB = 5
MODEL = ModelConfig(num_hidden_layers=2, head_dim=2, v_head_dim=3, vocab_size=VOCAB)


def make(overlap=False, page=4, size=64, chunk=8, rows=4, model=MODEL, observer=None, **more):
    args = ServerArgs(
        page_size=page,
        max_total_tokens=size,
        max_running_requests=rows,
        context_length=64,
        chunked_prefill_size=chunk,
        disable_overlap_schedule=not overlap,
        **more,
    )
    return Scheduler(args, model, observer=observer)


def prompt(start, length):
    return [(start + i * i) % VOCAB for i in range(length)]


def request(rid, tokens, outputs=4, **more):
    return TokenizedGenerateReqInput(rid, tokens, SamplingParams(outputs), **more)


def said(tokens, outputs, extra_key=None):
    return greedy(tokens, outputs, VOCAB, extra_key)


def finish(scheduler, steps=500):
    for _ in range(steps):
        if scheduler.is_idle():
            break
        scheduler.step()
    assert scheduler.is_idle()
    free = scheduler.token_to_kv_pool_allocator.available_size()
    assert scheduler.tree_cache.protected_size() == 0
    assert free + scheduler.tree_cache.evictable_size() == scheduler.max_total_num_tokens
    assert scheduler.req_to_token_pool.available_size() == scheduler.max_running_requests
    return {r.rid: r for r in scheduler.finished_reqs}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("page", "chunk"), [(1, 3), (1, None), (2, 6), (4, 4), (4, None), (8, 8)])
def test_outputs_are_the_model_s_whatever_the_cache_does(overlap, page, chunk):
    scheduler = make(overlap, page, 48, chunk)
    sent = {f"r{i}": prompt(i % 2, 9 + 5 * (i % 4)) for i in range(7)}
    for rid, tokens in sent.items():
        scheduler.submit(request(rid, tokens, 6))
    done = finish(scheduler)
    for rid, tokens in sent.items():
        assert list(done[rid].output_ids) == said(tokens, 6)
        assert done[rid].finished_reason == FINISH_LENGTH(6)
    assert any(r.cached_tokens for r in done.values())
    assert scheduler.model_runner.check.rows_checked > 0


def test_both_loops_end_by_themselves():
    outputs = []
    for overlap in (False, True):
        scheduler = make(overlap)
        scheduler.submit(request("a", prompt(0, 11)))
        scheduler.submit(request("b", prompt(1, 3), 1))
        scheduler.dispatch_event_loop()
        assert scheduler.is_idle()
        outputs.append({r.rid: list(r.output_ids) for r in scheduler.finished_reqs})
    assert outputs[0] == outputs[1]


def test_a_match_leaves_the_last_token_to_compute():
    scheduler = make(page=4, chunk=None)
    for rid in ("a", "b"):
        scheduler.submit(request(rid, prompt(0, 12), 1))
        finish(scheduler)
    scheduler.submit(request("c", prompt(0, 13), 1))
    done = finish(scheduler)
    assert [done[rid].cached_tokens for rid in "abc"] == [0, 8, 12]


def test_a_match_counts_once_not_after_each_chunk():
    scheduler = make(page=4, chunk=4)
    scheduler.submit(request("a", prompt(0, 8), 1))
    finish(scheduler)
    scheduler.submit(request("b", prompt(0, 24), 1))
    done = finish(scheduler)
    assert done["b"].cached_tokens == 8


def test_namespaces_share_nothing():
    scheduler = make()
    for rid, key in (("a", None), ("b", "lora-1"), ("c", "lora-1")):
        scheduler.submit(request(rid, prompt(0, 10), 3, extra_key=key))
        done = finish(scheduler)
        assert list(done[rid].output_ids) == said(prompt(0, 10), 3, key)
    assert [done[rid].cached_tokens for rid in "abc"] == [0, 0, 8]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_stop_token_ends_a_request(overlap):
    tokens = prompt(0, 6)
    expected = said(tokens, 8)
    stop = expected[3]
    first = expected.index(stop)
    scheduler = make(overlap)
    params = SamplingParams(8, stop_token_ids=[stop])
    scheduler.submit(TokenizedGenerateReqInput("a", tokens, params))
    ignoring = SamplingParams(8, stop_token_ids=[stop], ignore_eos=True)
    scheduler.submit(TokenizedGenerateReqInput("b", tokens, ignoring))
    done = finish(scheduler)
    assert list(done["a"].output_ids) == expected[: first + 1]
    assert done["a"].finished_reason == FINISH_MATCHED_TOKEN(stop)
    assert list(done["b"].output_ids) == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_short_memory_retracts_and_outputs_stay(overlap):
    retracted = []

    class Watch(SchedulerObserver):
        def on_retract(self, req):
            retracted.append(req.rid)

    scheduler = make(overlap, page=2, size=64, chunk=None, observer=Watch())
    scheduler.new_token_ratio = scheduler.init_new_token_ratio = 0.0  # promise outputs nothing
    scheduler.min_new_token_ratio = scheduler.new_token_ratio_decay = 0.0
    for i in range(4):
        scheduler.submit(request(f"r{i}", [i, *prompt(i, 7)], 24))
        scheduler.step()  # one at a time, or the batch counts as full
    done = finish(scheduler)
    assert retracted
    assert scheduler.num_retracted_reqs == len(retracted)
    for i in range(4):
        assert list(done[f"r{i}"].output_ids) == said([i, *prompt(i, 7)], 24)


@pytest.mark.parametrize("overlap", [False, True])
def test_forced_retraction_changes_no_output(overlap):
    scheduler = make(overlap, size=128)
    for i in range(3):
        scheduler.submit(request(f"r{i}", prompt(i, 9), 12))
    steps = 0
    while not scheduler.is_idle():
        scheduler.step()
        steps += 1
        if steps % 3 == 0:
            scheduler.force_retraction()
        assert steps < 300
    done = finish(scheduler)
    assert scheduler.num_retracted_reqs >= 3
    assert sum(r.retraction_count for r in done.values()) == scheduler.num_retracted_reqs > 0
    for i in range(3):
        assert list(done[f"r{i}"].output_ids) == said(prompt(i, 9), 12)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", range(9))
def test_abort_at_every_step(overlap, after):
    """While waiting, at each chunk boundary, before and after the first token, while decoding."""
    scheduler = make(overlap, page=4, chunk=4)
    scheduler.submit(request("other", prompt(3, 5), 9))
    scheduler.submit(request("gone", prompt(0, 18), 9))
    for _ in range(after):
        scheduler.step()
    scheduler.submit(AbortReq("gone"))
    done = finish(scheduler)
    assert done["gone"].finished_reason == FINISH_ABORT()
    assert list(done["gone"].output_ids) == said(prompt(0, 18), 9)[: len(done["gone"].output_ids)]
    assert list(done["other"].output_ids) == said(prompt(3, 5), 9)
    scheduler.submit(request("again", prompt(0, 18), 9))
    assert list(finish(scheduler)["again"].output_ids) == said(prompt(0, 18), 9)


def test_abort_at_a_chunk_boundary_computes_no_further_chunk():
    scheduler = make(page=4, chunk=4)
    scheduler.submit(request("gone", prompt(0, 32), 9))
    scheduler.step()
    scheduler.step()
    scheduler.abort_request(AbortReq("gone"))
    assert scheduler.step() is None
    assert scheduler.finished_reqs[0].kv_committed_len == 8
    assert scheduler.tree_cache.evictable_size() == 8


def test_abort_of_nobody_is_no_error():
    scheduler = make()
    scheduler.submit(AbortReq("nobody"))
    scheduler.step()
    assert scheduler.is_idle()


def test_what_never_fits_is_refused_and_what_just_fits_runs():
    scheduler = make(page=4, size=16, chunk=4)
    scheduler.submit(request("long", prompt(0, 15), 1))
    scheduler.submit(request("empty", [], 1))
    scheduler.submit(request("fits", prompt(0, 14), 9))
    done = finish(scheduler)
    assert isinstance(done["long"].finished_reason, FINISH_ABORT)
    assert "prompt of 15 tokens: expected 1 to 14" in done["long"].finished_reason.message
    assert isinstance(done["empty"].finished_reason, FINISH_ABORT)
    assert list(done["fits"].output_ids) == said(prompt(0, 14), 1)


def test_a_name_in_use_and_a_bad_token_are_errors():
    scheduler = make()
    scheduler.submit(request("a", prompt(0, 4)))
    scheduler.submit(request("a", prompt(1, 4)))
    with pytest.raises(InvalidArgument, match="rid 'a'"):
        scheduler.step()
    with pytest.raises(InvalidArgument, match="token_ids"):
        make().handle_generate_request(request("b", [-1]))
    with pytest.raises(InvalidArgument, match="max_new_tokens=-1"):
        SamplingParams(-1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_chunk_is_cut_to_what_is_free_and_gives_up_when_nothing_is(overlap):
    """Somebody else (a copy in flight, say) takes memory that the first chunk could count on."""
    lengths, retracted = [], []

    class Watch(SchedulerObserver):
        def on_batch(self, batch):
            lengths.extend(len(r.fill_ids) for r in batch.reqs if r.rid == "b")

        def on_retract(self, req):
            retracted.append(req.rid)

    scheduler = make(overlap, page=4, size=64, chunk=16, observer=Watch())
    scheduler.new_token_ratio = 0.9
    scheduler.submit(request("a", prompt(1, 4), 13))
    scheduler.step()
    scheduler.submit(request("b", prompt(2, 38), 2))
    scheduler.step()
    taken = scheduler.token_to_kv_pool_allocator.alloc(24)
    while not retracted:
        scheduler.step()
    assert retracted == ["b"]
    # 20 tokens free less 10.8 promised to "a"; then all 8 that are free; then none is
    assert lengths == [16, 25, 33]
    scheduler.token_to_kv_pool_allocator.free(taken)
    done = finish(scheduler)
    assert list(done["a"].output_ids) == said(prompt(1, 4), 13)
    assert list(done["b"].output_ids) == said(prompt(2, 38), 2)


def test_longest_prefix_first():
    order = []

    class Watch(SchedulerObserver):
        def on_batch(self, batch):
            order.extend(r.rid for r in batch.reqs if batch.forward_mode.is_extend())

    scheduler = make(chunk=None, rows=1, schedule_policy="lpm", observer=Watch())
    scheduler.submit(request("seed", prompt(0, 12), 1))
    finish(scheduler)
    scheduler.submit(request("cold", prompt(1, 12), 1))
    scheduler.submit(request("warm", prompt(0, 12), 1))
    finish(scheduler)
    assert order == ["seed", "warm", "cold"]


def test_flush_forgets_and_refuses_while_busy():
    scheduler = make()
    scheduler.submit(request("a", prompt(0, 12), 1))
    with pytest.raises(NotIdle, match="flush_cache"):
        scheduler.flush_cache()
    finish(scheduler)
    scheduler.flush_cache()
    assert scheduler.token_to_kv_pool_allocator.available_size() == 64
    scheduler.submit(request("b", prompt(0, 12), 1))
    assert finish(scheduler)["b"].cached_tokens == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_without_a_radix_cache_nothing_is_kept(overlap):
    scheduler = make(overlap, disable_radix_cache=True)
    for rid in ("a", "b"):
        scheduler.submit(request(rid, prompt(0, 19), 5))
        done = finish(scheduler)
        assert list(done[rid].output_ids) == said(prompt(0, 19), 5)
        assert done[rid].cached_tokens == 0
    assert scheduler.token_to_kv_pool_allocator.available_size() == 64


def test_many_short_requests_between_two_decodes_leave_a_future_alone():
    """Prefill goes first: a running request's future waits until the queue is empty."""
    scheduler = make(overlap=True, page=1, size=64, chunk=None, rows=2)
    scheduler.submit(request("long", prompt(0, 5), 6))
    scheduler.step()
    for i in range(40):
        scheduler.submit(request(f"r{i}", prompt(i, 3), 1))
    done = finish(scheduler)
    assert list(done["long"].output_ids) == said(prompt(0, 5), 6)


def test_committed_length_is_asked_once():
    scheduler = make()
    scheduler.submit(request("a", prompt(0, 4), 1))
    req = finish(scheduler)["a"]
    with pytest.raises(DoubleFree, match="request a: 4 tokens freed twice"):
        req.pop_committed_kv_cache()
    with pytest.raises(DoubleFree, match="request a"):
        req.pop_overallocated_kv_cache()


def test_kv_is_not_kept_on_demand():
    args = ServerArgs(max_total_tokens=64, context_length=64, max_running_requests=2)
    scheduler = Scheduler(args, ModelConfig(vocab_size=VOCAB), keep_kv=False)
    scheduler.submit(request("a", prompt(0, 9), 5))
    assert list(finish(scheduler)["a"].output_ids) == said(prompt(0, 9), 5)
    assert scheduler.model_runner.token_to_kv_pool is None
    assert scheduler.model_runner.check.rows_checked == 0


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(kv_lora_rank=3, qk_rope_head_dim=1, vocab_size=VOCAB),
        ModelConfig(num_key_value_heads=2, head_dim=4, dtype=torch.bfloat16, vocab_size=VOCAB),
        ModelConfig(num_key_value_heads=2, head_dim=4, v_head_dim=8, vocab_size=VOCAB),
    ],
)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3", "bf16"])
def test_any_pool_that_holds_words(model, kv_cache_dtype):
    elements = 4 if model.is_mla else 8
    itemsize = {"auto": model.dtype.itemsize, "bf16": 2, "fp8_e4m3": 1}[kv_cache_dtype]
    if elements * itemsize % 8:
        with pytest.raises(InvalidArgument, match="expected a multiple of 8"):
            make(model=model, kv_cache_dtype=kv_cache_dtype)
        return
    scheduler = make(model=model, kv_cache_dtype=kv_cache_dtype)
    scheduler.submit(request("a", prompt(0, 9), 5))
    assert list(finish(scheduler)["a"].output_ids) == said(prompt(0, 9), 5)


def test_prompts_may_come_as_arrays_and_are_not_changed():
    tokens = array("I", prompt(0, 9))
    before = tokens[:]
    scheduler = make()
    scheduler.submit(request("a", tokens, 5))
    finish(scheduler)
    assert tokens == before
