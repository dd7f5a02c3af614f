"""Replays by arrival, with strategies that keep by time or place, and of caches of one's own."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from refcache.cli.main import main
from refcache.errors import InvalidArgument, UnknownName
from refcache.oracle import Violation
from refcache.readers import TraceRequest, write_requests
from refcache.replay.config import ReplayConfig
from refcache.replay.loop import replay
from refcache.replay.workload import synthesize
from refcache.types import EvictResult

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from my_radix_cache import MyRadixCache, MyTarget

BLOCK = 16
OWN = "my_radix_cache:MyTarget"


def request(seconds, *blocks, tokens=None):
    return TraceRequest(int(1000 * seconds), tokens or BLOCK * len(blocks) + 1, 1, blocks, BLOCK)


def asked(seconds, *blocks):
    """A request whose last block is its own: the others can be found by later ones."""
    return request(seconds, *blocks, tokens=BLOCK * len(blocks))


def config(policy="lru", tokens=160, **more):
    return ReplayConfig(BLOCK, tokens, policy, check="every", no_decode=True, arrivals=True, **more)


def small(requests=40):
    made = synthesize(requests, seed=1, system_tokens=600, turn_tokens=100, output_tokens=12)
    return list(made)


def counted(result):
    return {name: value for name, value in asdict(result).items() if name != "seconds"}


def test_gaps_between_arrivals_count():
    trace = [asked(0, 1, 2), asked(1, 3, 4), asked(100, 1, 5)]
    assert 100 < replay(trace, config()).trace_seconds < 101
    assert replay(trace, ReplayConfig(BLOCK, 160)).trace_seconds == 0


def test_a_request_that_comes_while_one_runs_waits_for_the_next_step():
    trace = [asked(0, 1), asked(0.5, 2), asked(0.5, 3)]
    slow = replay(trace, config(step_ms=1000))
    assert slow.steps < replay(trace, config(step_ms=1)).steps  # the last two in one batch
    assert slow.trace_seconds >= 2


def test_what_was_not_used_for_the_time_to_live_is_gone():
    trace = [asked(0, 1, 2), asked(50, 1, 3), asked(105, 1, 4), asked(200, 1, 5)]
    assert replay(trace, config()).hit_tokens == 3 * BLOCK
    result = replay(trace, config("ttl=60"))
    assert result.hit_tokens == 2 * BLOCK  # used at 50 and 105; gone at 200
    assert result.evicted_tokens > 0
    assert replay(trace, config("ttl=30")).hit_tokens == 0


def test_what_was_used_again_is_retained_for_its_time():
    again = [asked(0, 1, 2), asked(1, 1, 3)]
    others = [asked(2 + n, 10 + 3 * n, 11 + 3 * n, 12 + 3 * n) for n in range(4)]
    for late, found in ((10, 2), (100, 2)):
        trace = [*again, *others, asked(late, 1, 4)]
        assert replay(trace, config()).hit_tokens == BLOCK  # LRU has evicted block 1 by then
        assert replay(trace, config("retain=60")).hit_tokens == found * BLOCK
    stale = [*again, asked(90, 20, 21, 22), asked(91, 23, 24, 25), asked(92, 26, 27, 28)]
    trace = [*stale, asked(93, 29, 30, 31), asked(94, 1, 4)]
    assert replay(trace, config("retain=60")).hit_tokens == BLOCK


def test_what_prompts_share_of_their_first_tokens_goes_last():
    shared = [asked(0, 1, 2), asked(1, 1, 3)]
    others = [asked(2 + n, 10 + 3 * n, 11 + 3 * n, 12 + 3 * n) for n in range(4)]
    trace = [*shared, *others, asked(9, 1, 4)]
    assert replay(trace, config()).hit_tokens == BLOCK
    assert replay(trace, config(f"pin={BLOCK}")).hit_tokens == 2 * BLOCK
    assert replay(trace, config(f"pin={BLOCK - 1}")).hit_tokens == BLOCK


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"policy": "ttl=60"}, "counts seconds: expected arrivals too"),
        ({"policy": "retain=1"}, "counts seconds"),
        ({"policy": "ttl=x", "arrivals": True}, "expected ttl=N with a number above 0"),
        ({"policy": "pin=0"}, "expected pin=N with a number above 0"),
        ({"policy": "ttl=5", "arrivals": True, "host_ratio": 2}, "expected one tier"),
        ({"arrivals": True, "serial": True}, "serial and arrivals: expected one of them"),
        ({"step_ms": 0}, "step_ms=0: expected a finite number above 0"),
        ({"prefill_rate": float("nan")}, "prefill_rate=nan"),
        ({"target": OWN, "host_ratio": 2}, "a target is replayed on one tier"),
        ({"target": OWN, "policy": "pin=5"}, "a strategy of the reference's tree"),
    ],
)
def test_what_does_not_go_together_is_refused(given, expected):
    with pytest.raises(InvalidArgument, match=expected):
        ReplayConfig(**given)


def test_a_policy_with_an_amount_has_to_be_one_of_three():
    with pytest.raises(UnknownName, match="pin=N"):
        ReplayConfig(policy="lru=5")


@pytest.mark.parametrize("tokens", [4096, 65536])
def test_a_cache_of_ones_own_finds_what_the_reference_finds(tokens):
    own, reference = (
        counted(replay(small(), ReplayConfig(64, tokens, check="every", target=target)))
        for target in (OWN, None)
    )
    assert own.pop("states_checked") == 0  # it shows no nodes
    assert reference.pop("states_checked") > 0
    assert own == reference
    assert own["hit_tokens"] > 0


class Keeps(MyRadixCache):
    """Frees what it evicts, and still finds it."""

    def evict(self, params):
        leaf = next((n for n in self.nodes() if not n.children and not n.locks), None)
        if leaf is None or len(leaf.slots) == 0:
            return EvictResult(0)
        self.token_to_kv_pool_allocator.free(leaf.slots)
        del leaf.parent.children[leaf.space, leaf.key[: self.page_size]]
        return EvictResult(len(leaf.slots) + self.page_size)


class Swaps(MyRadixCache):
    """Answers with the slots of another order."""

    def slots_to(self, node):
        return super().slots_to(node).flip(0)


class Raises(MyRadixCache):
    def evict(self, params):
        raise KeyError("nothing to evict")


class Leaks(MyRadixCache):
    """Forgets to give back the duplicates of an insert."""

    def cache_unfinished_req(self, req, chunked=False):
        free, allocator = self.token_to_kv_pool_allocator.free, self.token_to_kv_pool_allocator
        allocator.free = lambda slots: None
        super().cache_unfinished_req(req, chunked)
        allocator.free = free


class Wrong(MyTarget):
    def tree(self, config, allocator, req_to_token_pool):
        return type(self).cache(config, allocator, req_to_token_pool)


class SwapsTarget(Wrong):
    cache = Swaps


class RaisesTarget(Wrong):
    cache = Raises


class LeaksTarget(Wrong):
    cache = Leaks


@pytest.mark.parametrize(
    ("target", "rule"), [("Swaps", "C-READ"), ("Raises", "crash"), ("Leaks", "P3")]
)
def test_a_replay_finds_what_is_wrong_with_a_cache_of_ones_own(target, rule):
    with pytest.raises(Violation) as caught:
        replay(small(), ReplayConfig(64, 4096, target=f"{__name__}:{target}Target"))
    assert caught.value.id == rule
    if rule == "crash":
        assert "KeyError('nothing to evict') (test_replay_ways.py:" in caught.value.evidence


def test_command_line(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    write_requests(trace, small(12))
    given = ["replay", str(trace), "--device-tokens", "4096", "--json"]
    assert main([*given, "--target", OWN]) == 0
    own = json.loads(capsys.readouterr().out)
    assert main([*given, "--target", "refcache"]) == 0
    assert json.loads(capsys.readouterr().out)["hit_tokens"] == own["hit_tokens"]
    assert main([*given, "--arrivals", "--policy", "ttl=30"]) == 0
    assert json.loads(capsys.readouterr().out)["trace_seconds"] > 0
    assert main([*given, "--target", f"{__name__}:RaisesTarget"]) == 1
    assert json.loads(capsys.readouterr().out)["violation"]["rule"] == "crash"
    assert main([*given, "--sweep", f"target=refcache,{OWN}"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["target"] for point in points] == [None, OWN]
    assert main([*given, "--step-ms", "5"]) == 2
    assert "--step-ms: expected --arrivals" in capsys.readouterr().err
    assert main([*given, "--target", "no_such:thing"]) == 2


def test_what_a_replay_did_over_time(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    write_requests(trace, small(12))
    given = ["replay", str(trace), "--device-tokens", "4096", "--json", "--host-ratio", "2"]
    drawn, written = tmp_path / "time.svg", tmp_path / "steps.json"
    assert main([*given, "--plot", str(drawn), "--perfetto", str(written)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "requests" in drawn.read_text()
    events = json.loads(written.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sum(event["args"]["computed"] for event in slices) == result["computed_tokens"]
    held = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "device tokens"]
    assert {sum(one.values()) for one in held} == {4096}  # every page has an owner
    assert any(e["args"]["held"] for e in events if e["ph"] == "C" and "held" in e["args"])
    for refused in ("steps.txt", "no/steps.json"):
        assert main([*given, "--perfetto", str(tmp_path / refused)]) == 2
    assert main([*given, "--sweep", "policy=lru", "--perfetto", str(written)]) == 2
    assert "expected one replay" in capsys.readouterr().err


def test_history_of_arrivals_is_in_seconds():
    steps = []
    trace = [asked(0, 1, 2), asked(50, 1, 3)]
    result = replay(trace, config(), history=steps)
    assert [step.kind for step in steps if step.kind == "prefill"]
    assert 50 < steps[-1].time <= result.trace_seconds
    assert (steps[-1].hits, steps[-1].prompts) == (BLOCK, 4 * BLOCK)
