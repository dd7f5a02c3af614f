"""Replays: what they count, what they check, and the figures of a public trace.

The trace is Mooncake's conversation trace (see ``docs/cli.md``); the tests that need it are skipped
where it is not.
"""

import gc
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from refcache.errors import InvalidArgument, UnknownName
from refcache.oracle import Violation
from refcache.readers import TraceRequest, read_requests
from refcache.replay import parts as replay_parts
from refcache.replay import state as replay_state
from refcache.replay.config import ReplayConfig
from refcache.replay.loop import replay
from refcache.replay.parts import CountingRadixCache, prompt_of
from refcache.replay.tree import replay_tree
from refcache.replay.workload import synthesize

POLICIES = {
    "lru": (20_257_216, 121_177_472),
    "priority": (20_257_216, 121_177_472),
    "fifo": (20_461_568, 120_966_528),
    "lfu": (14_360_832, 127_092_992),
    "slru": (14_360_832, 127_092_992),
    "mru": (9_084_608, 132_340_736),
    "filo": (9_084_608, 132_340_736),
}
SERIAL = {1: 54_098_293, 64: 54_093_952, 512: 54_063_104}


@pytest.fixture(scope="module")
def trace():
    default = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
    path = Path(os.environ.get("REFCACHE_TRACE", default))
    if not path.exists():
        pytest.skip(f"no trace at {path}; set REFCACHE_TRACE to Mooncake's conversation trace")
    return list(read_requests(path).requests)


def small(requests=40, seed=1):
    return list(
        synthesize(requests, seed=seed, system_tokens=600, turn_tokens=100, output_tokens=12)
    )


def common_prefix(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_prompt_of_is_token_ids():
    for request in [*small(), TraceRequest(0, 513, 1, (8_388_606, 3))]:
        assert prompt_of(request) == request.token_ids()


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_serial_and_unlimited_hits_are_all_there_are(page_size):
    requests = small()
    seen = []
    expected = 0
    for request in requests:
        tokens = request.token_ids()
        common = [common_prefix(tokens[:-1], other) for other in seen]
        expected += max((n // page_size * page_size for n in common), default=0)
        seen.append(tokens[: len(tokens) // page_size * page_size])
    config = ReplayConfig(page_size, None, serial=True, no_decode=True)
    result = replay(requests, config)
    assert result.hit_tokens == expected
    assert result.computed_tokens == result.prompt_tokens - expected
    assert (result.requests, result.output_tokens, result.evicted_tokens) == (40, 40, 0)
    assert (result.kv_kept, result.rows_checked) == (False, 0)


@pytest.mark.parametrize("check", ["every", "sampled"])
@pytest.mark.parametrize("serial", [False, True])
def test_under_pressure_nothing_is_wrong(check, serial):
    requests = small()
    result = replay(requests, ReplayConfig(64, 4096, serial=serial, check=check))
    assert result.requests == 40
    assert result.output_tokens == sum(r.output_length for r in requests)
    assert result.evicted_tokens > 0
    assert result.rows_checked > 0
    assert result.kv_kept
    assert result.hit_tokens + result.computed_tokens >= result.prompt_tokens


def test_a_replay_repeats_exactly():
    results = [vars(replay(small(), ReplayConfig(64, 4096))) for _ in range(2)]
    for result in results:
        result.pop("seconds")
    assert results[0] == results[1]


def test_progress_is_told():
    told = []
    replay(small(5), ReplayConfig(), lambda done, total: told.append((done, total)))
    assert told == [(i, 5) for i in range(1, 6)]


def test_limit_and_an_empty_trace():
    assert replay(small(), ReplayConfig(limit=3)).requests == 3
    assert replay([], ReplayConfig()).steps == 0


def test_what_does_not_fit_is_named():
    requests = [TraceRequest(0, 100, 1, (0,)), TraceRequest(0, 250, 6, (1,))]
    with pytest.raises(InvalidArgument, match=r"request 2 of the trace has 256 tokens"):
        replay(requests, ReplayConfig(64, 256))
    assert replay(requests, ReplayConfig(64, 320)).requests == 2


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"page_size": 0}, "page_size=0: expected at least 1"),
        ({"device_tokens": 63}, "device_tokens=63: expected at least 64"),
        ({"max_running_requests": 0}, "max_running_requests=0"),
        ({"policy": "oldest"}, "unknown policy 'oldest'"),
        ({"check": "some"}, "unknown check 'some'"),
    ],
)
def test_bad_configurations(arguments, match):
    with pytest.raises((InvalidArgument, UnknownName), match=match):
        ReplayConfig(**arguments)


class KeepsDuplicates(CountingRadixCache):
    """Frees one page less than it should: a leak."""

    def _free(self, *lists):
        super()._free(*(slots[64:] for slots in lists))


class LosesALock(CountingRadixCache):
    """Unlocks twice, once too often for the one who shares the prefix."""

    def dec_lock_ref(self, node, params=None):
        result = super().dec_lock_ref(node, params)
        if any(step.lock_ref for step in self._path(node)):
            super().dec_lock_ref(node, params)
        return result


class ServesAnotherPrefix(CountingRadixCache):
    """Now and then the slots of a match are in the wrong order."""

    def match_prefix(self, params):
        result = super().match_prefix(params)
        if params.req is None or len(result.device_indices) < 128:
            return result
        return result._replace(device_indices=torch.roll(result.device_indices, 64))


@pytest.mark.parametrize(
    ("tree", "check", "rule"),
    [
        (KeepsDuplicates, "sampled", "P3"),
        (KeepsDuplicates, "every", "P3"),
        (ServesAnotherPrefix, "sampled", "C-READ"),
        (ServesAnotherPrefix, "every", "C-READ"),
    ],
)
def test_a_broken_tree_is_caught(tree, check, rule, monkeypatch):
    monkeypatch.setattr(replay_parts, "CountingRadixCache", tree)
    with pytest.raises(Violation) as caught:
        replay(small(), ReplayConfig(64, 8192, check=check))
    assert caught.value.id == rule
    assert "of the replay" in caught.value.call


@pytest.mark.parametrize("check", ["every", "sampled"])
def test_a_page_with_two_owners_is_caught(check, monkeypatch):
    """One page leaks and another is free twice: sums agree, ownership does not."""

    class Swaps(CountingRadixCache):
        done = False

        def cache_finished_req(self, req, is_insert=True):
            super().cache_finished_req(req, is_insert)
            free = self.token_to_kv_pool_allocator.free_pages
            if not self.done and len(free) > 1:
                free[-1] = free[-2]
                self.done = True

    monkeypatch.setattr(replay_parts, "CountingRadixCache", Swaps)
    config = ReplayConfig(64, 65536, check=check)
    with pytest.raises(Violation) as caught:
        replay(small(), config)
    assert caught.value.id == "P1"
    assert "nobody" in caught.value.evidence or "free list" in caught.value.evidence


def test_every_rule_is_checked_now_and_then(monkeypatch):
    monkeypatch.setattr(replay_state, "STATE_EVERY", 4)
    result = replay(small(), ReplayConfig(64, 8192))
    assert result.states_checked == result.steps // 4 + 1  # and at the end
    monkeypatch.setattr(replay_state, "TOKENS_A_STEP", 1)
    assert replay(small(), ReplayConfig(64, 8192)).states_checked == 1


@pytest.mark.parametrize("check", ["every", "sampled"])
def test_every_rule_is_one_of_them(check, monkeypatch):
    """A leaf that is not listed as evictable: no sum, no owner and no row is wrong."""

    class Unlisted(CountingRadixCache):
        def cache_finished_req(self, req, is_insert=True):
            super().cache_finished_req(req, is_insert)
            self.evictable_leaves.discard(next(iter(self.evictable_leaves), None))

    monkeypatch.setattr(replay_parts, "CountingRadixCache", Unlisted)
    with pytest.raises(Violation) as caught:
        replay(small(), ReplayConfig(64, 65536, check=check))
    assert caught.value.id == "A3"


def test_a_lost_lock_is_noticed(monkeypatch):
    monkeypatch.setattr(replay_parts, "CountingRadixCache", LosesALock)
    with pytest.raises(Exception, match=r"lock|free|C-READ|A\d|L1"):
        replay(small(), ReplayConfig(64, 8192))


def test_every_compares_more_rows_than_sampled():
    every, sampled = (
        replay(small(), ReplayConfig(64, 65536, check=check)).rows_checked
        for check in ("every", "sampled")
    )
    assert every > 2 * sampled


@pytest.mark.parametrize("stops", [False, True])
def test_the_garbage_collector_is_left_as_it_was(stops):
    def progress(finished, total):
        if stops:
            raise KeyboardInterrupt

    before = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
        replay(small(), ReplayConfig(64, 8192), progress)
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_tree_alone_on_a_small_trace(policy):
    requests = small(60)
    unlimited = replay_tree(requests, device_tokens=None, policy=policy)
    assert unlimited.evicted_tokens == 0
    tight = replay_tree(requests, device_tokens=2048, policy=policy)
    assert tight.evicted_tokens > 0
    assert tight.hit_tokens <= unlimited.hit_tokens


@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, marks=() if p == "lru" else pytest.mark.nightly) for p in POLICIES],
)
def test_tree_alone_on_the_trace(trace, policy):
    result = replay_tree(trace, policy=policy)
    assert (result.hit_tokens, result.evicted_tokens) == POLICIES[policy]


@pytest.mark.nightly
@pytest.mark.parametrize("page_size", SERIAL)
def test_serial_replay_of_the_trace(trace, page_size):
    config = ReplayConfig(page_size, None, serial=True, no_decode=True)
    result = replay(trace, config)
    assert result.hit_tokens == SERIAL[page_size]
    assert (result.requests, result.prompt_tokens) == (12_031, 144_793_823)


@pytest.mark.nightly
def test_batched_replay_of_the_trace(trace):
    result = replay(trace, ReplayConfig())
    assert (result.requests, result.output_tokens) == (12_031, 4_122_048)
