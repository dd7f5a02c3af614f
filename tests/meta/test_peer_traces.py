"""A recorded trace of an unmodified two-tier cache of SGLang 0.5.10: judged ok; six illegal changes
of it are found, at their record or the first later one that depends on it; legal ones stay ok.

The recording and the changes are those of ``tests/property/test_trace.py``, which applies them to
refcache's own caches.
"""

import importlib.util
import os
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import refcache
from refcache.oracle import HiCacheDriver, TreeDriver, peers, resolve
from refcache.oracle.trace import format as f
from refcache.oracle.trace.judge import Judge, judge_lines, judge_trace
from refcache.oracle.trace.shrink import shrink_lines

os.environ.setdefault("TRITON_INTERPRET", "1")
SIX = (
    "hand_out_twice",
    "longer_match",
    "other_namespace",
    "longer_prefix_len",
    "freed_slot_matches",
    "absent_block_removed",
)


def _load() -> ModuleType:
    path = Path(__file__).parents[1] / "property" / "test_trace.py"
    spec = importlib.util.spec_from_file_location("trace_changes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


changes: Any = _load()
PAGE: int = changes.PAGE


def record(folder: Path, seed: int, steps: int = 400) -> Path:
    """A random workload on ``HiRadixCache`` with write_through, recorded."""
    driver = HiCacheDriver(
        resolve("sglang:0.5.10"),
        page_size=PAGE,
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
    header, lines, damage = f.read_trace(path)
    assert damage is None
    return header, lines


def test_the_release_is_judged_ok(path: Path) -> None:
    header, lines, _ = f.read_trace(path)
    assert header.subject.endswith(".HiRadixCache")
    inner = {type(part).__name__ for line in lines for part in line.inner}
    assert {"Write", "Load", "Ack", "HostAlloc", "HostFree"} <= inner
    verdict = judge_trace(path)
    assert str(verdict) == f"ok: {verdict.records} records judged"


@pytest.fixture(scope="module")
def one_tier(tmp_path_factory: pytest.TempPathFactory, path: Path) -> Any:
    """``RadixCache`` with events, in one namespace: 0.5.10 names pages without it (B39)."""
    driver = TreeDriver(
        resolve("sglang:0.5.10+events"), page_size=PAGE, size=96, enable_kv_cache_events=True
    )
    where = tmp_path_factory.mktemp("events") / "t.jsonl"
    with refcache.record(driver.tree, where):
        draw = random.Random(0)
        for _ in range(80):
            driver.admit(tuple(draw.randrange(4) for _ in range(draw.randint(3, 9))))
            driver.finish(0)
            if draw.random() < 0.3:
                driver.evict(draw.randint(1, 3))
    header, lines, _ = f.read_trace(where)
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


def swapped(lines: list[f.Line], start: int, one: int, other: int) -> list[f.Line]:
    """From ``start`` on, two device pages under each other's number; host slots stay."""
    names, host = {one: other, other: one}, (f.HostAlloc, f.HostFree)

    def slots(values: list[int]) -> list[int]:
        return [names.get(s // PAGE, s // PAGE) * PAGE + s % PAGE for s in values]

    out = []
    for line in lines[start:]:
        copy = msgspec.json.decode(msgspec.json.encode(line), type=f.Line)
        for call in (copy.call, *copy.inner):
            for name in ("slots", "row", "new_row", "last_loc"):
                if not isinstance(call, host) and getattr(call, name, None):
                    setattr(call, name, slots(getattr(call, name)))
        out.append(copy)
    return lines[:start] + out


def test_another_free_page_is_legal(trace: Any) -> None:
    header, lines = trace
    judge, count = Judge(header), 0
    for index, line in enumerate(lines):
        call = line.call
        if isinstance(call, f.AllocExtend) and call.slots and call.prefix_lens == [0]:
            free = [p for p in judge.device.free if p not in judge.device.owner]
            other = next((p for p in free if p * PAGE not in call.slots), None)
            if other is not None and count < 8:
                changed = swapped(lines, index, call.slots[0] // PAGE, other)
                assert changed[index] != line
                assert judge_lines(header, changed).verdict == "ok"
                count += 1
        judge.apply(line)
    assert count >= 3


def test_another_victim_is_legal(one_tier: Any) -> None:
    changes.test_another_victim_is_legal(one_tier)


def test_another_split_point_is_legal(one_tier: Any) -> None:
    changes.test_another_split_point_is_legal(one_tier)
