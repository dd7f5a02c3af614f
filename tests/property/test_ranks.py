"""Ranks of one group: other timing, same decisions, same collective calls in the same order."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ranks_program
from ranks_program import decided, scheduler_of
from refcache.engine import SamplingParams, TokenizedGenerateReqInput
from refcache.errors import InvalidArgument
from refcache.oracle import RanksDriver, Violation, resolve
from refcache.oracle.drivers.ranks.group import RankGroup
from refcache.planted import all_bugs, find
from refcache.runtime import drawn, eager, lazy
from refcache.testing import hunt, run_suite
from refcache.tree.consensus import SingleRank, consensus_of
from refcache.types import WRITE_POLICIES

WRITES = "writing_check > _finished_everywhere"
LOADS = "loading_check > _finished_everywhere"

# ---- the group itself ----------------------------------------------------------------------------


def test_a_group_reduces_by_the_smallest():
    group = RankGroup(3)

    def rank(number):
        def act():
            member = group.member(number)
            return member.all_reduce_min([number, 5 - number]), member.all_reduce_min([number + 7])

        return act

    assert group.together([rank(i) for i in range(3)]) == [([0, 3], [7])] * 3
    assert group.calls == [["run > act", "run > act"]] * 3


def test_a_call_that_one_rank_omits_is_told_and_does_not_hang():
    group = RankGroup(2)
    with pytest.raises(Violation, match=r"rank 1 reduces 1 value\(s\) in .*, rank 0 is done"):
        group.together([lambda: 0, lambda: group.member(1).all_reduce_min([1])])


def test_two_different_calls_are_not_taken_for_one():
    group = RankGroup(2)

    def first():
        return group.member(0).all_reduce_min([1])

    def second():
        return group.member(1).all_reduce_min([1])

    with pytest.raises(
        Violation, match=r"rank 0 reduces.* in run > first, rank 1.* in run > second"
    ):
        group.together([first, second])


def test_an_error_of_one_rank_comes_before_what_the_others_make_of_it():
    group = RankGroup(2)
    with pytest.raises(ZeroDivisionError):
        group.together([lambda: group.member(0).all_reduce_min([1]), lambda: 1 / 0])


def test_what_may_be_given_as_a_group():
    assert isinstance(consensus_of(None), SingleRank)
    member = RankGroup(1).member(0)
    assert consensus_of(member) is member
    assert SingleRank().all_reduce_min([3]) == [3]


# ---- replicas ------------------------------------------------------------------------------------


def test_replicas_agree():
    result = run_suite("hicache.ranks", resolve("refcache"), max_examples=100, seed=3)
    assert result.verdict == "ok", result.failure and result.failure.text


@pytest.mark.parametrize(
    "bug", [b for b in all_bugs() if b.suite == "hicache.ranks"], ids=lambda b: b.name
)
def test_its_planted_bug_is_caught(bug):
    caught = hunt(bug)
    assert caught.counts, caught.failure and caught.failure.text


def test_a_slow_rank_keeps_what_the_others_have_finished():
    d = RanksDriver(resolve("refcache"), size=8, delays=(False, True))
    d.admit((0, 1, 2))
    d.finish(0)
    d.poll()  # rank 0 has finished the copy, rank 1 has not: locked on both
    assert [rank.tree.evictable_size() for rank in d.ranks] == [0, 0]
    d.work(1, (0,) * 9)
    d.poll()
    assert [rank.tree.evictable_size() for rank in d.ranks] == [3, 3]
    d.wind_down()
    assert d.bench.group.calls[0] == d.bench.group.calls[1]
    assert d.bench.group.calls[0] == [WRITES, LOADS] * 3


def test_the_rank_that_decides_alone_is_named():
    d = RanksDriver(resolve("refcache"), size=8, delays=(False, True))
    d.admit((0, 1, 2))
    d.finish(0)
    with find("own-acks-counted").active(), pytest.raises(Violation) as caught:
        d.poll()
    assert caught.value.id == "Z2"
    assert "copies in flight: [] on rank 0, [('write', 1)] on rank 1" in str(caught.value)
    assert "rank 1:\n" in d.describe()


def test_a_group_of_nobody_is_refused():
    with pytest.raises(InvalidArgument, match="delays"):
        RanksDriver(resolve("refcache"), delays=())


# ---- the serving loop ----------------------------------------------------------------------------


def serve(drivers, prompts, policy, retract_at=-1):
    """All ranks serve the prompts; yields, for each step, the batch of rank 0 and its calls."""
    group = RankGroup(len(drivers))
    ranks = [
        scheduler_of(d, group.member(i), policy, page_size=1, max_running_requests=2)
        for i, d in enumerate(drivers)
    ]
    for i, tokens in enumerate(prompts):
        for scheduler in ranks:
            scheduler.submit(TokenizedGenerateReqInput(f"r{i}", tokens, SamplingParams(3)))
    for number in range(200):
        if ranks[0].is_idle():
            break
        if number == retract_at:
            for scheduler in ranks:
                scheduler.force_retraction()
        before = len(group.calls[0])
        running = not ranks[0].running_batch.is_empty() or ranks[0].last_batch is not None
        batches = group.together([scheduler.step for scheduler in ranks])
        first, *others = [decided(s, b) for s, b in zip(ranks, batches, strict=True)]
        assert all(other == first for other in others)
        yield batches[0], group.calls[0][before:], running
        if batches[0] is None:
            for scheduler in ranks:
                scheduler.runtime.synchronize()
    assert all(scheduler.is_idle() for scheduler in ranks)
    assert all(calls == group.calls[0] for calls in group.calls)


@given(
    choices=st.lists(st.lists(st.integers(0, 5), max_size=200), min_size=2, max_size=3),
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=11), min_size=2, max_size=8),
    retract_at=st.integers(-1, 20),
    policy=st.sampled_from(WRITE_POLICIES),
)
def test_schedulers_take_the_same_steps(choices, prompts, retract_at, policy):
    for _ in serve([drawn(c) for c in choices], prompts, policy, retract_at):
        pass


@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_every_step_makes_the_same_calls_also_with_nothing_to_report(policy):
    prompts = [[0, 1, 2, 0, 1], [1, 1, 2], [0, 1, 2, 0, 1, 2, 2], [2, 2], [0, 1, 2, 0, 2]]
    kinds = set()
    for batch, calls, running in serve([eager, lazy], prompts, policy):
        prefill = batch is not None and batch.forward_mode.is_extend()
        kinds.add((prefill, running))
        assert calls == [WRITES, LOADS] + [WRITES] * (running and not prefill)
    assert {(True, False), (True, True), (False, True)} <= kinds


@pytest.mark.parametrize("bug", ["own-acks-counted", "reduce-only-with-news"])
def test_without_agreement_schedulers_drift_apart(bug):
    prompts = [[i % 3, 1, 2, 0, i % 2, 1, 1] for i in range(8)]
    with find(bug).active(), pytest.raises((AssertionError, Violation)):
        for _ in serve([eager, lazy], prompts, "write_through"):
            pass


# ---- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_processes_decide_the_same_and_drift_apart_without_agreement(count, tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [sys.executable, "-m", *torchrun, str(ranks_program.__file__), str(tmp_path)]
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert ran.returncode == 0, ran.stderr[-3000:]
    logs = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
    alone = [log.pop("alone") for log in logs]
    assert any(log != alone[0] for log in alone)
    assert len(logs[0]) == 2 * len(WRITE_POLICIES)
    for part, steps in logs[0].items():
        assert steps[-1][-1] > 0, f"{part}: no collective call was made"
        for number, step in enumerate(steps):
            for rank, log in enumerate(logs):
                assert log[part][number] == step, (part, number, rank)
