"""Groups under DP attention: the ranks that serve the same requests agree, and no others."""

import pytest

from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.engine.model_config import get_attention_tp_size
from refcache.errors import InvalidArgument
from refcache.oracle import Violation
from refcache.oracle.drivers.ranks.group import RankGroup
from refcache.runtime import SimulatedRuntime, Tracker, eager, lazy
from refcache.tags import greedy
from refcache.tree.consensus import SingleRank
from refcache.types import ServerArgs

ARGS = ServerArgs(
    page_size=2,
    max_total_tokens=24,
    max_running_requests=2,
    context_length=32,
    tp_size=4,
    dp_size=2,
    enable_dp_attention=True,
    enable_hierarchical_cache=True,
    hicache_ratio=1.5,
)
MODEL = ModelConfig(num_key_value_heads=4, vocab_size=3)
PROMPTS = {0: [[0, 1, 2, 0], [0, 1, 2, 0, 1]], 1: []}  # of each group; the second has nothing to do


def serve(whole, groups):
    """Four ranks, in two groups, whose copies finish at different times; all step together.

    Args:
        groups: what each rank is given as ``attn_tp_cpu_group``.
        whole: where all four meet at the end of a step.
    """
    ranks = [
        Scheduler(
            ARGS,
            MODEL,
            runtime=SimulatedRuntime(eager if number % 2 else lazy, Tracker()),
            tp_cpu_group=SingleRank(),
            attn_tp_cpu_group=group,
        )
        for number, group in enumerate(groups)
    ]
    for number, scheduler in enumerate(ranks):
        for i, tokens in enumerate(PROMPTS[number // 2]):
            scheduler.submit(TokenizedGenerateReqInput(f"r{i}", tokens, SamplingParams(3)))
    for _ in range(12):
        whole.together([scheduler.step for scheduler in ranks])
    return ranks


def test_each_group_agrees_for_itself():
    pairs = [RankGroup(2), RankGroup(2)]
    members = [pairs[rank // 2].member(rank % 2) for rank in range(4)]
    ranks = serve(RankGroup(4), members)
    for scheduler in ranks[:2]:
        assert [list(r.output_ids) for r in scheduler.finished_reqs] == [
            greedy(tokens, 3, 3) for tokens in PROMPTS[0]
        ]
        assert scheduler.tree_cache.tp_group is members[ranks.index(scheduler)]
        assert scheduler.model_runner.token_to_kv_pool.head_num == 2
    first, second = (pair.calls[0] for pair in pairs)
    assert len(first) > len(second)  # a decode makes a call more, and only one group decodes


def test_the_whole_tensor_parallel_group_is_the_wrong_one():
    whole = RankGroup(4)
    with pytest.raises(Violation, match=r"writing_check > _finished_everywhere, rank \d is done"):
        serve(whole, [whole.member(rank) for rank in range(4)])


def test_without_the_named_group_it_is_refused():
    with pytest.raises(InvalidArgument, match="expected attn_tp_cpu_group"):
        Scheduler(ARGS, MODEL, tp_cpu_group=SingleRank())


def test_heads_are_shared_by_the_ranks_of_one_group():
    assert get_attention_tp_size(ARGS) == 2
    assert get_attention_tp_size(ServerArgs(tp_size=4)) == 4
