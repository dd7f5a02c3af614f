"""The optimal bound against every choice that a cache could make, on small traces."""

import itertools
import random

import pytest

from refcache.readers import TraceRequest
from refcache.replay.bounds import optimal_hits
from refcache.replay.config import ReplayConfig
from refcache.replay.loop import replay
from refcache.replay.workload import prefix_bound, synthesize


def small_trace(draw: random.Random) -> list[TraceRequest]:
    """Three to seven prompts of one to three pages of one token over two ids."""
    return [
        TraceRequest(0, len(ids), 1, ids, 1)
        for ids in (
            tuple(draw.randrange(2) for _ in range(draw.randint(1, 3)))
            for _ in range(draw.randint(3, 7))
        )
    ]


def best_of_all(trace: list[TraceRequest], capacity: int) -> int:
    """The most hits over every set of whole prefixes that is kept after every request."""
    states: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for request in trace:
        pages = [request.hash_ids[: i + 1] for i in range(request.input_length)]
        after: dict[frozenset[tuple[int, ...]], int] = {}
        for kept, hits in states.items():
            found = next((i for i, p in enumerate(pages) if p not in kept), len(pages))
            gained = hits + min(found, request.input_length - 1)
            everything = kept | set(pages) if len(pages) <= capacity else kept
            others = everything - set(pages)
            room = capacity - (len(everything) - len(others))
            least = min(len(others), room)
            for chosen in itertools.combinations(sorted(others), least):
                held = frozenset(chosen) | (everything - others)
                for size in range(len(held) + 1):  # what is dropped later may be dropped now
                    for part in itertools.combinations(sorted(held), size):
                        key = frozenset(part)
                        if all(page[:-1] in key for page in key if len(page) > 1):
                            after[key] = max(after.get(key, 0), gained)
        states = after
    return max(states.values())


def check(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        trace, capacity = small_trace(draw), draw.randint(2, 4)
        assert optimal_hits(trace, 1, capacity) == best_of_all(trace, capacity), (seed, trace)


def test_brute_force() -> None:
    check(range(60))


@pytest.mark.nightly
def test_brute_force_on_a_thousand() -> None:
    check(range(1000))


def test_pages_and_blocks_nest_or_nothing_is_said() -> None:
    trace = list(synthesize(60, seed=3))
    whole = optimal_hits(trace, 512, None)
    assert whole is not None
    fewer = sum(r.input_length % 512 != 0 and len(r.hash_ids) > 0 for r in trace)
    assert prefix_bound(trace).hit_blocks * 512 >= whole  # a partial block is no page
    assert fewer
    assert optimal_hits(trace, 64, None) >= whole  # type: ignore[operator]
    assert optimal_hits(trace, 100, None) is None
    assert optimal_hits([], 64, 100) == 0


@pytest.mark.parametrize("policy", ["lru", "mru"])
@pytest.mark.parametrize("tokens", [8192, 32768])
def test_no_replay_finds_more(policy: str, tokens: int) -> None:
    trace = list(synthesize(40, seed=5, system_tokens=600, turn_tokens=100, output_tokens=8))
    config = ReplayConfig(page_size=64, device_tokens=tokens, policy=policy, serial=True)
    best = optimal_hits(trace, 64, tokens)
    assert best is not None
    assert 0 < replay(trace, config).hit_tokens <= best <= optimal_hits(trace, 64, None)  # type: ignore[operator]
