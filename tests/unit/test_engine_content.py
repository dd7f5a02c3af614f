"""Every way in which a KV row can be wrong is found by the forward that reads it, and explained."""

from types import SimpleNamespace

import pytest
import torch

from refcache.engine import (
    ContentViolation,
    ModelConfig,
    RowCheck,
    SampledRows,
    SamplingParams,
    Scheduler,
    TokenizedGenerateReqInput,
    read_nothing,
)
from refcache.engine.schedule_batch import ForwardMode
from refcache.types import ServerArgs

PAGE, LAYERS = 4, 2


def make(check=None, overlap=False, **model):
    args = ServerArgs(
        page_size=PAGE,
        max_total_tokens=256,
        max_running_requests=4,
        context_length=128,
        disable_overlap_schedule=not overlap,
    )
    config = ModelConfig(num_hidden_layers=LAYERS, head_dim=2, v_head_dim=3, vocab_size=9, **model)
    return Scheduler(args, config, check=check)


def submit(scheduler, rid, length=17, outputs=8, start=0):
    tokens = range(start, start + length)
    scheduler.submit(TokenizedGenerateReqInput(rid, tokens, SamplingParams(outputs)))


def started(**kwargs):
    """Two requests that have decoded a little."""
    scheduler = make(**kwargs)
    submit(scheduler, "a", 17)
    submit(scheduler, "b", 17, start=50)
    for _ in range(3):
        scheduler.step()
    return scheduler


def rows(scheduler, rid):
    req = scheduler.live_reqs[rid]
    return scheduler.req_to_token_pool.req_to_token[req.req_pool_idx]


def serve(scheduler):
    for _ in range(20):
        scheduler.step()


def violation(scheduler):
    with pytest.raises(ContentViolation) as caught:
        serve(scheduler)
    return caught.value.wrong


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_misplaced_row_is_named(overlap, plane, layer):
    scheduler = started(overlap=overlap)
    buffer = scheduler.model_runner.token_to_kv_pool.planes[plane].buffer
    slot, other = int(rows(scheduler, "a")[5]), int(rows(scheduler, "b")[6])
    buffer[layer, slot] = buffer[layer, other]
    wrong = violation(scheduler)
    assert (wrong.rid, wrong.position, wrong.slot) == ("a", 5, slot)
    assert (wrong.layer, wrong.plane, wrong.column) == (layer, plane, 0)
    assert wrong.explanation == f"token 6 of request b, layer {layer}, plane {plane}, column 0"
    assert str(wrong).startswith(
        f"slot {slot}, layer {layer}, plane {plane}, word 0: holds token 6"
    )
    assert "expected token 5 of request a" in str(wrong)


@pytest.mark.parametrize(
    ("content", "explanation"),
    [
        (lambda k, slot: k[0][slot], "token 2 of request a, layer 0, plane 0, column 0"),
        (lambda k, slot: 0, "zero (never written)"),
        (lambda k, slot: 12345, "no known token, layer or plane"),
    ],
)
def test_a_row_of_another_layer_or_of_nobody_is_named(content, explanation):
    scheduler = started()
    k, slot = scheduler.model_runner.token_to_kv_pool.k_buffer, int(rows(scheduler, "a")[2])
    k[1][slot] = content(k, slot)
    assert violation(scheduler).explanation == explanation


def test_one_wrong_word_of_a_wide_row_is_enough():
    scheduler = started()
    scheduler.model_runner.token_to_kv_pool.v_buffer[0][int(rows(scheduler, "b")[3]), 0, 2] += 1
    wrong = violation(scheduler)
    assert (wrong.rid, wrong.position, wrong.plane, wrong.column) == ("b", 3, 1, 2)


def test_a_request_row_that_points_elsewhere_is_found():
    scheduler = started()
    rows(scheduler, "a")[4:8] = rows(scheduler, "b")[4:8].clone()
    wrong = violation(scheduler)
    assert (wrong.rid, wrong.position) == ("a", 4)
    assert wrong.explanation == "token 4 of request b, layer 0, plane 0, column 0"


def test_the_same_tokens_in_another_namespace_are_other_content():
    scheduler = make()
    for rid, key in (("a", "x"), ("b", "y")):
        scheduler.submit(TokenizedGenerateReqInput(rid, [1] * 9, SamplingParams(9), extra_key=key))
    scheduler.step()
    k = scheduler.model_runner.token_to_kv_pool.k_buffer[0]
    k[int(rows(scheduler, "a")[0])] = k[int(rows(scheduler, "b")[0])]
    assert violation(scheduler).explanation.startswith("token 0 of request b")


def test_a_stale_prefix_is_found_when_it_is_hit():
    scheduler = make(check=RowCheck(SampledRows(seed=1)))
    submit(scheduler, "a", outputs=1)
    while not scheduler.is_idle():
        scheduler.step()
    slot = int(scheduler.tree_cache.all_values_flatten()[7])
    scheduler.model_runner.token_to_kv_pool.k_buffer[0][slot] += 1
    submit(scheduler, "b", outputs=1)
    wrong = violation(scheduler)
    assert (wrong.rid, wrong.position) == ("b", 7)


def test_violations_can_be_collected():
    found = []
    scheduler = started(check=RowCheck(on_wrong=found.append))
    scheduler.model_runner.token_to_kv_pool.k_buffer[0][int(rows(scheduler, "a")[1])] += 1
    for _ in range(3):
        scheduler.step()
    assert [w.position for w in found] == [1, 1, 1]


def test_a_sampled_decode_reads_the_new_rows_and_as_many_as_it_may_draw():
    check = RowCheck(SampledRows(per_step=10, seed=3))
    scheduler = started(check=check)
    before = check.rows_checked
    scheduler.step()
    assert check.rows_checked - before == (2 + 10) * LAYERS * 2


def decode_of(rows, lengths):
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.tensor(rows),
        seq_lens_cpu=torch.tensor(lengths),
    )


def drawn_by(plan, rows, lengths):
    [cells] = plan(decode_of(rows, lengths))
    return list(zip(cells.rows.tolist(), cells.columns.tolist(), strict=True))


def test_a_sampled_decode_draws_from_every_row_up_to_its_newest():
    plan, rows, lengths = SampledRows(per_step=8, seed=1), [7, 2, 5], [1, 3, 9]
    newest = [(7, 0), (2, 2), (5, 8)]
    seen = set()
    for _ in range(100):
        cells = drawn_by(plan, rows, lengths)
        assert cells[:3] == newest
        assert len(cells) == 3 + 8
        seen |= set(cells[3:])
    assert seen == {(r, j) for r, n in zip(rows, lengths, strict=True) for j in range(n)}


def test_what_is_drawn_depends_on_the_seed_and_the_step_alone():
    def steps(seed):
        plan = SampledRows(per_step=64, seed=seed)
        return [drawn_by(plan, [0, 1], [50, 60]) for _ in range(2)]

    first = steps(3)
    torch.manual_seed(9)
    assert steps(3) == first
    assert first[0] != first[1]
    assert steps(4)[0] != first[0]


def test_every_decode_reads_all_rows():
    scheduler = started()
    check = scheduler.model_runner.check
    before = check.rows_checked
    scheduler.step()
    lengths = sum(r.kv_committed_len for r in scheduler.live_reqs.values())
    assert check.rows_checked - before == lengths * LAYERS * 2


def test_nothing_is_compared_when_switched_off():
    scheduler = started(check=RowCheck(read_nothing))
    scheduler.model_runner.token_to_kv_pool.k_buffer[0][int(rows(scheduler, "a")[1])] += 1
    while not scheduler.is_idle():
        scheduler.step()
    assert scheduler.model_runner.check.rows_checked == 0


def test_the_next_token_is_what_the_newest_row_says():
    scheduler = started(check=RowCheck(read_nothing))
    k = scheduler.model_runner.token_to_kv_pool.k_buffer[LAYERS - 1]
    write = scheduler.model_runner.token_to_kv_pool.set_kv_buffer

    def spoil(layer, loc, cache_k, cache_v):
        write(layer, loc, cache_k, cache_v)
        k[loc] += 1

    tokens = {rid: r.output_ids[:] for rid, r in scheduler.live_reqs.items()}
    scheduler.step()
    right = {rid: r.output_ids[-1] for rid, r in scheduler.live_reqs.items()}
    again = started(check=RowCheck(read_nothing))
    k = again.model_runner.token_to_kv_pool.k_buffer[LAYERS - 1]
    write = again.model_runner.token_to_kv_pool.set_kv_buffer
    again.model_runner.token_to_kv_pool.set_kv_buffer = spoil
    again.step()
    for rid, req in again.live_reqs.items():
        assert req.output_ids[:-1] == tokens[rid]
        assert req.output_ids[-1] == (right[rid] + 1) % 9
