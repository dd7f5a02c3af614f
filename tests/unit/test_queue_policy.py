"""The order of the waiting queue under each policy."""

from types import SimpleNamespace

import pytest
import torch

from refcache.allocator import TokenToKVPoolAllocator
from refcache.engine import Req, SamplingParams, ScheduleBatch, Scheduler, TokenizedGenerateReqInput
from refcache.engine.scheduling.schedule_policy import (
    CacheAgnosticPolicy,
    CacheAwarePolicy,
    SchedulePolicy,
)
from refcache.errors import InvalidArgument, UnknownName
from refcache.keys import RadixKey
from refcache.tree import RadixCache
from refcache.types import SCHEDULE_POLICIES, CacheInitParams, InsertParams, ServerArgs


def tree(*cached: list[int], disable: bool = False) -> RadixCache:
    allocator = TokenToKVPoolAllocator(256, torch.float16, "cpu", None)
    made = RadixCache(CacheInitParams(disable, None, allocator, 1))
    for tokens in cached:
        made.insert(InsertParams(RadixKey(tokens), allocator.alloc(len(tokens))))
    return made


def req(rid: str, tokens: list[int], outputs: int = 8, **more: object) -> Req:
    return Req(rid, None, tokens, SamplingParams(outputs), **more)


def order(policy: str, cache: RadixCache, queue: list[Req], running=None, **more: object) -> str:
    made = SchedulePolicy(policy, cache, **more)
    looked_up = made.calc_priority(queue, running)
    assert looked_up == isinstance(made.policy, CacheAwarePolicy)
    return "".join(one.rid for one in queue)


def test_an_unknown_policy_is_refused():
    for wrong in ("invalid", "LPM", ""):
        with pytest.raises(UnknownName, match="schedule_policy"):
            SchedulePolicy(wrong, tree())
    with pytest.raises(InvalidArgument, match="did you mean 'lof'"):
        ServerArgs(schedule_policy="lofs")


def test_without_a_cache_there_is_no_prefix_to_order_by():
    for name in ("lpm", "dfs-weight"):
        assert SchedulePolicy(name, tree()).policy is CacheAwarePolicy(name)
        assert SchedulePolicy(name, tree(disable=True)).policy is CacheAgnosticPolicy.FCFS
    assert SchedulePolicy("lof", tree(disable=True)).policy is CacheAgnosticPolicy.LOF


def test_fcfs_leaves_the_order_as_it_is():
    assert order("fcfs", tree(), [req("a", [1]), req("b", [1, 2]), req("c", [3])]) == "abc"


def test_lpm_puts_the_longest_cached_prefix_first():
    cache = tree([1, 2, 3, 4], [7, 8])
    assert (
        order("lpm", cache, [req("a", [9]), req("b", [7, 8, 1]), req("c", [1, 2, 3, 9])]) == "cba"
    )


def test_lpm_holds_back_what_shares_its_start_with_another():
    start = list(range(100, 140))
    queue = [req("a", [*start, 1]), req("b", [*start, 2]), req("c", [5]), req("d", [*start, 3], 4)]
    assert order("lpm", tree(), queue) == "acbd"
    other_space = [req("a", [*start, 1]), req("b", [*start, 2], extra_key="x"), req("c", [5])]
    assert order("lpm", tree(), other_space) == "abc"
    assert (
        order("lpm", tree(start), [req("c", [5]), req("a", [*start, 1]), req("b", start)]) == "abc"
    )


def test_lpm_gives_up_on_a_long_queue():
    cache = tree([7])
    short = [*(req("a", [1]) for _ in range(127)), req("z", [7, 1])]
    assert order("lpm", cache, short).startswith("z")
    long = [*(req("a", [1]) for _ in range(128)), req("z", [7, 1])]
    made = SchedulePolicy("lpm", cache)
    assert not made.calc_priority(long)
    assert long[-1].rid == "z"


def test_dfs_weight_goes_down_the_branch_with_the_most_requests():
    cache = tree([1, 2, 3], [1, 2, 4], [5, 6])
    queue = [
        req("a", [5, 6, 0]),
        req("b", [1, 2, 3, 0]),
        req("c", [9, 0]),
        req("d", [1, 2, 4, 0]),
        req("e", [1, 2, 4, 7]),
        req("f", [1, 2, 9]),
    ]
    # below 1, 2: four requests, two of them at 4; what ends at a node comes after what is below it
    assert order("dfs-weight", cache, queue) == "debfac"


def test_lof_puts_the_longest_output_first():
    assert order("lof", tree(), [req("a", [1], 2), req("b", [1], 9), req("c", [1], 9)]) == "bca"


def test_random_is_the_same_in_every_run():
    made = [order("random", tree(), [req(name, [1]) for name in "abcdefgh"]) for _ in range(2)]
    assert made[0] == made[1] != "abcdefgh"
    assert sorted(made[0]) == list("abcdefgh")


def test_routing_keys_that_run_most_go_first():
    running = ScheduleBatch([req(str(i), [1], routing_key=k) for i, k in enumerate("xyyzz")])
    queue = [req("a", [1]), *(req(k, [1], routing_key=k) for k in "wxzy")]
    assert order("routing-key", tree(), queue, running) == "yzxaw"
    queue = [req("a", [1], routing_key="z"), req("b", [1], routing_key="x")]
    assert order("routing-key", tree(), queue, ScheduleBatch([])) == "ab"
    assert order("routing-key", tree(), queue) == "ab"


@pytest.mark.parametrize(("low_first", "expected"), [(False, "dbca"), (True, "cbda")])
def test_priorities_come_first(low_first, expected):
    def queue() -> list[Req]:
        values = {"a": None, "b": 2, "c": 1, "d": 3}
        made = [req(name, [1], 8, priority=value) for name, value in values.items()]
        for time, one in enumerate(made):
            one.time_stats.wait_queue_entry_time = time
        return made

    more = {"enable_priority_scheduling": True, "schedule_low_priority_values_first": low_first}
    assert order("fcfs", tree(), queue(), **more) == expected
    assert order("lof", tree(), queue(), **more) == expected
    assert order("fcfs", tree(), queue()) == "abcd"


def test_of_one_priority_the_first_and_the_longest_go_first():
    queue = [req("a", [1], 3, priority=1), req("b", [1], 9, priority=1)]
    queue[0].time_stats.wait_queue_entry_time = 5
    assert order("fcfs", tree(), queue[:], enable_priority_scheduling=True) == "ba"
    queue[0].time_stats.wait_queue_entry_time = -1
    assert order("fcfs", tree(), queue[:], enable_priority_scheduling=True) == "ab"
    assert order("lof", tree(), queue[:], enable_priority_scheduling=True) == "ba"


@pytest.mark.parametrize("policy", SCHEDULE_POLICIES)
def test_a_loop_serves_every_request_under_every_policy(policy):
    args = ServerArgs(
        max_total_tokens=64, context_length=32, max_running_requests=2, schedule_policy=policy
    )
    scheduler = Scheduler(args)
    for number, rid in enumerate("abcdef"):
        scheduler.submit(
            TokenizedGenerateReqInput(
                rid, [1, 2, number % 3], SamplingParams(1 + number), routing_key="xy"[number % 2]
            )
        )
    scheduler.dispatch_event_loop()
    assert sorted(one.rid for one in scheduler.finished_reqs) == list("abcdef")


def test_a_queue_of_priorities_is_served_in_their_order():
    args = ServerArgs(
        max_total_tokens=64,
        context_length=32,
        max_running_requests=1,
        enable_priority_scheduling=True,
        disable_priority_preemption=True,
    )
    scheduler = Scheduler(args)
    for rid, priority in (("a", 1), ("b", 3), ("c", None), ("d", 3)):
        scheduler.submit(
            TokenizedGenerateReqInput(rid, [1, 2, 3], SamplingParams(2), priority=priority)
        )
    scheduler.dispatch_event_loop()
    assert [one.rid for one in scheduler.finished_reqs] == ["b", "d", "a", "c"]


def test_a_foreign_tree_without_a_switch_is_a_cache():
    assert SchedulePolicy("lpm", SimpleNamespace()).policy is CacheAwarePolicy.LPM
