"""A recorded trace of an unmodified two-tier cache of SGLang 0.5.10: judged ok; six illegal changes
of it are found, at their record or the first later one that depends on it; legal ones stay ok.

The recording and the changes are those that ``tests/property/test_trace.py`` applies to refcache's
own caches.
"""

import os
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import refcache
import trace_changes as changes
from refcache import peers
from refcache.oracle import HiCacheDriver, TreeDriver, resolve
from refcache.trace.file import read_trace
from refcache.trace.judge import judge_lines, judge_trace
from refcache.trace.shrink import shrink_lines

os.environ.setdefault("TRITON_INTERPRET", "1")
SIX = (
    "hand_out_twice",
    "longer_match",
    "other_namespace",
    "longer_prefix_len",
    "freed_slot_matches",
    "absent_block_removed",
)


def record(folder: Path, seed: int, steps: int = 400) -> Path:
    """A random workload on ``HiRadixCache`` with write_through, recorded."""
    driver = HiCacheDriver(
        resolve("sglang:0.5.10"),
        page_size=changes.PAGE,
        size=32,
        host_size=48,
        write_policy="write_through",
    )
    path = folder / "t.jsonl"
    changes.serve(driver, path, seed, steps)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "0.5.10" not in peers.unpacked():
        pytest.skip("sglang 0.5.10 is not unpacked: make peers")
    return record(tmp_path_factory.mktemp("trace"), 1)


@pytest.fixture(scope="module")
def trace(path: Path) -> Any:
    header, lines, damage = read_trace(path)
    assert damage is None
    return header, lines


def test_the_release_is_judged_ok(path: Path) -> None:
    header, lines, _ = read_trace(path)
    assert header.subject.endswith(".HiRadixCache")
    inner = {type(part).__name__ for line in lines for part in line.inner}
    assert {"Write", "Load", "Ack", "HostAlloc", "HostFree"} <= inner
    verdict = judge_trace(path)
    assert str(verdict) == f"ok: {verdict.records} records judged"


@pytest.fixture(scope="module")
def one_tier(tmp_path_factory: pytest.TempPathFactory, path: Path) -> Any:
    """``RadixCache`` with events, in one namespace: 0.5.10 names pages without it (B39)."""
    driver = TreeDriver(
        resolve("sglang:0.5.10+events"),
        page_size=changes.PAGE,
        size=96,
        enable_kv_cache_events=True,
    )
    where = tmp_path_factory.mktemp("events") / "t.jsonl"
    with refcache.record(driver.tree, where):
        draw = random.Random(0)
        for _ in range(80):
            driver.admit(tuple(draw.randrange(4) for _ in range(draw.randint(3, 9))))
            driver.finish(0)
            if draw.random() < 0.3:
                driver.evict(draw.randint(1, 3))
    header, lines, _ = read_trace(where)
    return header, lines


@pytest.mark.parametrize("name", SIX)
def test_an_illegal_change_is_found_at_its_record(name: str, trace: Any, one_tier: Any) -> None:
    header, lines = one_tier if name == "absent_block_removed" else trace
    assert judge_lines(header, lines).verdict == "ok"
    alter, count = getattr(changes, name), 0
    for n, changed in changes.altered((header, lines), alter):
        found = judge_lines(header, changed)
        assert (found.verdict, found.n) == ("violation", n), found
        assert found.rule in changes.ILLEGAL[alter], found
        count += 1
        if count == 12:
            break
    assert count >= 3


def test_a_failing_trace_shrinks_to_ten_records(trace: Any) -> None:
    header = trace[0]
    _, changed = next(iter(changes.altered(trace, changes.longer_match)))
    found = judge_lines(header, changed)
    small_header, small = shrink_lines(header, changed)
    assert len(small) <= 10
    assert judge_lines(small_header, small).rule == found.rule


def test_another_free_page_is_legal(trace: Any) -> None:
    count = 0
    for changed in islice(changes.with_another_page(trace), 8):
        assert judge_lines(trace[0], changed).verdict == "ok"
        count += 1
    assert count >= 3


def test_another_victim_is_legal(one_tier: Any) -> None:
    changes.another_victim_is_legal(one_tier)


def test_another_split_point_is_legal(one_tier: Any) -> None:
    changes.another_split_point_is_legal(one_tier)
