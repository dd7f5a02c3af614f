"""Unmodified caches are judged ok; each illegal alteration is found; legal ones stay ok."""

import contextlib
import random
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import refcache
from refcache.errors import InvalidArgument, InvalidTrace
from refcache.oracle import HiCacheDriver, TreeDriver, Violation, resolve
from refcache.planted import find
from refcache.trace import format as f
from refcache.trace.file import TraceReader, read_trace, write_trace
from refcache.trace.judge import judge_lines, judge_trace
from refcache.trace.shrink import numbers, shrink_lines, shrink_trace
from refcache.types import EVICTION_POLICIES, WRITE_POLICIES
from trace_changes import (
    ILLEGAL,
    PAGE,
    Alteration,
    Trace,
    absent_block_removed,
    altered,
    another_split_point_is_legal,
    another_victim_is_legal,
    freed_slot_matches,
    hand_out_twice,
    longer_match,
    serve,
    with_another_page,
)


def made(target: str, path: Path, seed: int, steps: int = 80) -> Path:
    draw = random.Random(seed)
    page = draw.choice([1, 2, 4])
    driver = TreeDriver(
        resolve(target),
        page_size=page,
        size=page * draw.randint(-(-6 // page), 24 // page),
        need_sort=draw.random() < 0.5,
        eviction_policy=draw.choice(EVICTION_POLICIES),
        is_eagle=draw.random() < 0.3,
        enable_kv_cache_events=draw.random() < 0.5,
    )
    serve(driver, path, seed, steps)
    return path


@pytest.mark.parametrize("target", ["refcache", "naive"])
@pytest.mark.parametrize("seed", range(6))
def test_an_unmodified_cache_is_ok(target: str, seed: int, tmp_path: Path) -> None:
    verdict = judge_trace(made(target, tmp_path / "t.jsonl.zst", seed))
    assert str(verdict) == f"ok: {verdict.records} records judged"
    assert verdict.records > 80


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("seed", range(3))
def test_an_unmodified_two_tier_cache_is_ok(policy: str, seed: int, tmp_path: Path) -> None:
    page = (1, 2, 4)[seed % 3]
    driver = HiCacheDriver(
        resolve("refcache"), page_size=page, size=16, write_policy=policy, host_size=32
    )
    serve(driver, tmp_path / "t.jsonl", seed, 120)
    reader = TraceReader(tmp_path / "t.jsonl")
    inner = {type(part).__name__ for line in reader for part in line.inner}
    assert (policy, seed) != ("write_through", 0) or {"Write", "Load", "Ack", "HostAlloc"} <= inner
    assert str(judge_trace(tmp_path / "t.jsonl")).startswith("ok: ")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A trace with events, several hundred records."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    driver = TreeDriver(resolve("refcache"), page_size=PAGE, size=32, enable_kv_cache_events=True)
    serve(driver, path, 4, 300)
    header, lines, damage = read_trace(path)
    assert damage is None
    return header, lines


# ---- illegal alterations -------------------------------------------------------------------------


def test_the_trace_is_ok(trace: Trace) -> None:
    assert judge_lines(*trace).verdict == "ok"


@pytest.mark.parametrize("alter", ILLEGAL, ids=lambda a: a.__name__)
def test_an_illegal_alteration_is_found_at_its_record(trace: Trace, alter: Alteration) -> None:
    count = 0
    for n, lines in altered(trace, alter):
        verdict = judge_lines(trace[0], lines)
        assert (verdict.verdict, verdict.n) == ("violation", n), verdict
        assert verdict.rule in ILLEGAL[alter], verdict
        count += 1
    assert count >= 3


@pytest.mark.parametrize("alter", ILLEGAL, ids=lambda a: a.__name__)
def test_a_failing_trace_shrinks_to_ten_records(trace: Trace, alter: Alteration) -> None:
    for n, lines in list(altered(trace, alter))[:3]:
        found = judge_lines(trace[0], lines)
        header, small = shrink_lines(trace[0], lines)
        verdict = judge_lines(header, small)
        assert len(small) <= 10, "\n".join(map(str, small))
        assert (verdict.n, verdict.rule, verdict.evidence) == (n, found.rule, found.evidence)
        assert verdict.argument == found.argument
        for index in range(len(small) - 1):  # no record of it can go
            rest = small[:index] + small[index + 1 :]
            assert judge_lines(header, rest).evidence != found.evidence or (
                judge_lines(header, rest).argument != found.argument
            )


def sglang(path: Path) -> None:
    """A published release, where ``make peers`` has unpacked it. Page size 1: with larger pages
    0.5.10's kernel reads past its free list, and may take the interpreter with it."""
    peers = pytest.importorskip("refcache.peers")
    if "0.5.10" not in peers.unpacked():
        pytest.skip("sglang 0.5.10 is not unpacked: make peers")
    driver = TreeDriver(peers.peer_target("sglang:0.5.10"), page_size=1, size=24)
    serve(driver, path, 2, 200)


def two_tiers(path: Path) -> None:
    driver = HiCacheDriver(
        resolve("refcache"), page_size=2, size=24, host_size=32, enable_kv_cache_events=True
    )
    serve(driver, path, 3, 250)


@pytest.mark.parametrize("source", [two_tiers, sglang], ids=lambda s: s.__name__)
def test_other_caches(source: Callable[[Path], None], tmp_path: Path) -> None:
    """A trace of an unmodified cache is ok; altered, it fails at that record, and shrinks."""
    source(tmp_path / "t.jsonl")
    header, lines, damage = read_trace(tmp_path / "t.jsonl")
    assert str(judge_lines(header, lines)).startswith("ok: ")
    assert damage is None
    for alter in ILLEGAL:
        copies = list(altered((header, lines), alter))[:3]
        assert copies or alter is absent_block_removed  # the release's events break rules already
        for n, changed in copies:
            found = judge_lines(header, changed)
            assert (found.verdict, found.n) == ("violation", n), found
            rests = [lines[i - 1] for i in (n, *numbers(found.argument))]
            if any(isinstance(part, f.HostFree) for line in rests for part in line.inner):
                continue  # needs whoever filled the host pages that it freed
            small = shrink_lines(header, changed)[1]
            assert len(small) <= 10, [msgspec.json.encode(line) for line in small]


def test_the_verdict_is_an_argument_over_records(trace: Trace) -> None:
    verdicts = [judge_lines(trace[0], lines) for _, lines in altered(trace, freed_slot_matches)]
    steps = r"page \d+: record \d+ \w+ handed out page \d+; then record \d+ \w+ cached it for .*; "
    assert any(re.match(steps + r"then record \d+ \w+ freed it", v.argument[0]) for v in verdicts)
    assert "no legal cache could have produced it" in str(verdicts[0])


# ---- legal alterations ---------------------------------------------------------------------------


def test_another_free_page_is_legal(trace: Trace) -> None:
    count = 0
    for changed in with_another_page(trace):
        assert judge_lines(trace[0], changed).verdict == "ok"
        count += 1
    assert count >= 5


def test_another_victim_is_legal(trace: Trace) -> None:
    another_victim_is_legal(trace)


def test_another_split_point_is_legal(trace: Trace) -> None:
    another_split_point_is_legal(trace)


# ---- the recorder --------------------------------------------------------------------------------


def test_a_recorder_changes_nothing_and_goes_away(tmp_path: Path) -> None:
    plain = TreeDriver(resolve("refcache"), page_size=2, size=24)
    wrapped = TreeDriver(resolve("refcache"), page_size=2, size=24)
    before = dict(vars(wrapped.tree))
    with refcache.record(wrapped.tree, tmp_path / "t.jsonl"):
        for driver in (plain, wrapped):
            for tokens in ((1, 2, 3, 4, 5), (1, 2, 3, 9, 9), (1, 2, 7)):
                driver.admit(tokens)
                driver.finish(0)
    assert plain.describe() == wrapped.describe()
    assert set(vars(wrapped.tree)) == set(before)
    assert not {"alloc", "free"} & set(vars(wrapped.allocator))


def test_an_allocator_alone(tmp_path: Path) -> None:
    target = resolve("refcache")
    allocator = target.allocator(TreeDriver(target, page_size=4, size=16).config)
    with refcache.record(allocator, tmp_path / "t.jsonl"):
        slots = allocator.alloc(8)
        allocator.free(slots[:4])
        with pytest.raises(ValueError, match=r"it is free already"):
            allocator.free(slots[:4])  # refused by name: the cache is right
        state = allocator.backup_state()
        allocator.alloc(12)
        allocator.restore_state(state)
        assert allocator.alloc(16) is None
        allocator.clear()
        allocator.alloc(16)
    assert str(judge_trace(tmp_path / "t.jsonl")) == "ok: 9 records judged"


def test_a_crash_on_a_legal_call_is_a_violation(tmp_path: Path) -> None:
    driver = TreeDriver(resolve("refcache"), page_size=2, size=24)
    with refcache.record(driver.tree, tmp_path / "t.jsonl"):
        driver.admit((1, 2, 3, 4, 5))
        driver.tree._plan_row = None  # the cache breaks
        with pytest.raises(AssertionError):
            driver.finish(0)
    verdict = judge_trace(tmp_path / "t.jsonl")
    assert (verdict.verdict, verdict.rule, verdict.op) == (
        "violation",
        "crash",
        "cache_finished_req",
    )


def test_a_cache_in_use_is_refused(tmp_path: Path) -> None:
    driver = TreeDriver(resolve("refcache"), page_size=2, size=24)
    driver.admit((1, 2, 3))
    with pytest.raises(InvalidArgument, match="expected a cache with nothing in it"):
        refcache.record(driver.tree, tmp_path / "t.jsonl")
    with pytest.raises(InvalidArgument, match="no tree cache, controller or allocator"):
        refcache.record(object(), tmp_path / "t.jsonl")
    assert list(tmp_path.iterdir()) == []


# ---- damage --------------------------------------------------------------------------------------


def test_damage_is_judged_up_to_and_said(trace: Trace, tmp_path: Path) -> None:
    header, lines = trace
    path = tmp_path / "t.jsonl"
    write_trace(path, header, lines)
    whole = path.read_bytes()
    cut = whole[: len(whole) // 2]
    path.write_bytes(cut)
    verdict = judge_trace(path)
    assert verdict.verdict == "unknown"
    assert verdict.records == cut.count(b"\n") - 1
    assert "the file ends inside this line" in str(verdict)
    path.write_bytes(cut[: cut.rfind(b"\n") + 1])
    assert "without an end record: cut off" in str(judge_trace(path))
    broken = whole.splitlines(keepends=True)
    broken[20] = b'{"n": 20, "call": {"op": "nope"}}\n'
    path.write_bytes(b"".join(broken))
    assert judge_trace(path).records == 19
    assert "line 21: Invalid value 'nope'" in str(judge_trace(path))
    del broken[20]
    path.write_bytes(b"".join(broken))
    assert "record 21 comes after record 19" in str(judge_trace(path))


def test_a_violation_before_the_damage_is_a_violation(trace: Trace, tmp_path: Path) -> None:
    n, lines = next(altered(trace, longer_match))
    path = tmp_path / "t.jsonl.zst"
    write_trace(path, trace[0], lines)
    path.write_bytes(path.read_bytes()[:-40])
    assert judge_trace(path).n == n


@pytest.mark.parametrize(
    ("name", "left", "reason"),
    [
        ("t.jsonl", 0, "the file is empty"),
        ("t.jsonl.zst", 0, "the file is empty"),
        ("t.jsonl.zst", 60, "the compressed data end inside a frame"),
    ],
)
def test_a_file_without_a_line_says_why(
    trace: Trace, tmp_path: Path, name: str, left: int, reason: str
) -> None:
    path = tmp_path / name
    write_trace(path, *trace)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(InvalidTrace, match=reason):
        judge_trace(path)


@pytest.mark.parametrize(
    ("bug", "seed", "rule"),
    [
        ("lock-skips-node", 0, "A2"),
        ("ack-keeps-lock", 0, "A2"),
        ("evict-parent-not-pushed", 0, "E3"),
        ("hash-changes-at-split", 1, "N2"),
        ("load-back-unprotected", 2, "C1"),
        ("host-page-leaked", 0, "E1"),
        ("host-page-leaked", 2, "H1"),
    ],
)
def test_what_rests_on_much_shrinks_too(bug: str, seed: int, rule: str, tmp_path: Path) -> None:
    """Totals, full pools, streams of events, host pages: their excerpts are short as well."""
    draw, planted = random.Random(seed), find(bug)
    page = draw.choice([1, 2, 4])
    with planted.active(), contextlib.suppress(Violation):
        if planted.suite == "hicache.state":
            host, policy = draw.choice([20, 32]), draw.choice(WRITE_POLICIES)
            driver: TreeDriver = HiCacheDriver(
                resolve("refcache"), page_size=page, size=16, host_size=host, write_policy=policy
            )
        else:
            driver = TreeDriver(
                resolve("refcache"),
                page_size=page,
                size=page * draw.randint(-(-6 // page), 24 // page),
                need_sort=draw.random() < 0.5,
                is_eagle=draw.random() < 0.3,
                enable_kv_cache_events=draw.random() < 0.5,
            )
        serve(driver, tmp_path / "t.jsonl", seed, 120)
    found = judge_trace(tmp_path / "t.jsonl")
    assert found.rule == rule
    verdict, count = shrink_trace(tmp_path / "t.jsonl", tmp_path / "small.jsonl")
    assert count <= 10
    assert (verdict.n, verdict.evidence) == (found.n, found.evidence)
    assert judge_trace(tmp_path / "small.jsonl") == verdict


def test_shrink_writes_an_excerpt(trace: Trace, tmp_path: Path) -> None:
    n, lines = next(altered(trace, hand_out_twice))
    write_trace(tmp_path / "t.jsonl", trace[0], lines)
    verdict, count = shrink_trace(tmp_path / "t.jsonl", tmp_path / "small.jsonl")
    assert (verdict.n, verdict.rule) == (n, "P1")
    header, small, damage = read_trace(tmp_path / "small.jsonl")
    assert (header.excerpt, len(small), damage) == (True, count, None)
    with pytest.raises(InvalidArgument, match="nothing to shrink"):
        shrink_lines(*trace)
