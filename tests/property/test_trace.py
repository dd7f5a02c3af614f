"""Unmodified caches are judged ok; each illegal alteration is found; legal ones stay ok."""

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

import refcache
from refcache.errors import InvalidArgument
from refcache.oracle import TreeDriver, Violation, resolve
from refcache.oracle.hicache_driver import HiCacheDriver
from refcache.oracle.planted import find
from refcache.oracle.trace import format as f
from refcache.oracle.trace.events import BlockRemoved
from refcache.oracle.trace.file import TraceReader, read_trace, write_trace
from refcache.oracle.trace.judge import Judge, judge_lines, judge_trace
from refcache.oracle.trace.shrink import numbers, shrink_lines, shrink_trace
from refcache.types import EVICTION_POLICIES, WRITE_POLICIES

PAGE = 2
Trace = tuple[f.Header, list[f.Line]]


def serve(driver: TreeDriver, path: Path, seed: int, steps: int) -> None:
    """A random workload, recorded."""
    draw = random.Random(seed)
    two_tiers = isinstance(driver, HiCacheDriver)
    kinds = ["admit"] * 4 + ["finish", "decode", "match"] * 2
    kinds += ["proceed", "cache", "reserve", "abort", "retract", "finish_together", "insert"]
    kinds += ["evict", "hold", "unhold", "lock_and_unlock"]
    kinds += ["poll", "work", "load_back", "settle"] if two_tiers else ["reset"]
    with refcache.record(driver.tree, path):
        for _ in range(steps):
            tokens = tuple(draw.randrange(3) for _ in range(draw.randint(2, 15)))
            space, index = draw.choice([None, None, "a"]), draw.randrange(4)
            chunk = draw.choice([None, 1, 2, 3])
            arguments = {
                "admit": (tokens, space, chunk),
                "proceed": (index, chunk),
                "retract": (index, chunk),
                "decode": (index, draw.randrange(3)),
                "reserve": (index, draw.randint(1, 5)),
                "finish_together": ((0, 1, 2),),
                "evict": (draw.randint(1, 9),),
                "work": ((0, 1),),
            }
            name = draw.choice(kinds)
            by_tokens = ("match", "insert", "hold", "lock_and_unlock", "load_back")
            by_index = ("finish", "cache", "abort", "unhold")
            default = (tokens, space) if name in by_tokens else (index,) * (name in by_index)
            getattr(driver, name)(*arguments.get(name, default))
        driver.wind_down()


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


# ---- alterations: each changes one record of a copy, or says that it does not fit there ----------


class Watching(Judge):
    """``gone``: where each prefix was that is cached no more."""

    def __init__(self, header: f.Header) -> None:
        super().__init__(header)
        self.gone: dict[object, int] = {}

    def apply(self, line: f.Line) -> None:
        before = dict(self.device.cached)
        super().apply(line)
        now = self.device.cached
        self.gone.update({p: page for p, page in before.items() if p not in now})


Alteration = Callable[[Judge, f.Line], bool]


def hand_out_twice(judge: Judge, line: f.Line) -> bool:
    call = line.call
    if not isinstance(call, f.AllocExtend | f.Alloc) or not call.slots or not judge.device.owner:
        return False
    if getattr(call, "prefix_lens", [0]) != [0]:
        return False
    owned = next(iter(judge.device.owner))
    call.slots[: judge.page_size] = [
        owned * judge.page_size + i for i in range(min(judge.page_size, len(call.slots)))
    ]
    return True


def longer_match(judge: Judge, line: f.Line) -> bool:
    call = line.call
    if not isinstance(call, f.MatchPrefix) or len(call.tokens) < len(call.slots) + judge.page_size:
        return False
    page = max(judge.device.owner, default=1)
    call.slots += [page * judge.page_size + i for i in range(judge.page_size)]
    return True


def other_namespace(judge: Judge, line: f.Line) -> bool:
    call = line.call
    if not isinstance(call, f.MatchPrefix) or not call.slots:
        return False
    call.extra_key = "another"
    return True


def longer_prefix_len(judge: Judge, line: f.Line) -> bool:
    call = line.call
    if not isinstance(call, f.Insert) or call.prefix_len + judge.page_size > len(call.slots):
        return False
    call.prefix_len += judge.page_size
    return True


def freed_slot_matches(judge: Judge, line: f.Line) -> bool:
    """A page that held the next part of this very prefix, until it was freed."""
    call = line.call
    if not isinstance(call, f.MatchPrefix):
        return False
    assert isinstance(judge, Watching)
    page = judge.gone.get((call.extra_key, tuple(call.tokens[: len(call.slots) + judge.page_size])))
    if page is None or page in judge.device.owner:
        return False
    call.slots += [page * judge.page_size + i for i in range(judge.page_size)]
    return True


def absent_block_removed(judge: Judge, line: f.Line) -> bool:
    call = line.call
    if not isinstance(call, f.TakeEvents) or not call.events:
        return False
    call.events.append(BlockRemoved(block_hashes=[12345]))
    return True


ILLEGAL = {
    hand_out_twice: {"P1"},
    longer_match: {"M0"},
    other_namespace: {"M0"},
    longer_prefix_len: {"M3"},
    freed_slot_matches: {"M0"},
    absent_block_removed: {"N2"},
}


def altered(trace: Trace, alter: Alteration, least: int = 30) -> Iterator[tuple[int, list[f.Line]]]:
    """Every copy of the trace with one alteration from record ``least`` on."""
    header, lines = trace
    judge = Watching(header)
    for index, line in enumerate(lines):
        copy = msgspec.json.decode(msgspec.json.encode(line), type=f.Line)
        if index >= least and alter(judge, copy):
            yield line.n, [*lines[:index], copy, *lines[index + 1 :]]
        judge.apply(line)


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
    peers = pytest.importorskip("refcache.oracle.peers")
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


def with_another_page(trace: Trace) -> Iterator[list[f.Line]]:
    """The trace once for each first allocation of a request: its first page is another free one."""
    header, lines = trace
    judge = Judge(header)
    for index, line in enumerate(lines):
        call = line.call
        free = [p for p in judge.device.free if p not in judge.device.owner]
        if isinstance(call, f.AllocExtend) and call.slots and call.prefix_lens == [0]:
            other = next((p for p in free if p * PAGE not in call.slots), None)
            if other is not None:
                changed = swapped(lines, index, call.slots[0] // PAGE, other)
                assert changed[index] != line
                yield changed
        judge.apply(line)


def test_another_free_page_is_legal(trace: Trace) -> None:
    count = 0
    for changed in with_another_page(trace):
        assert judge_lines(trace[0], changed).verdict == "ok"
        count += 1
    assert count >= 5


def evictions(trace: Trace) -> Iterator[tuple[Judge, int, f.Line, list[int]]]:
    """The model before each eviction of one victim, with the pages that were freed."""
    judge = Judge(trace[0])
    for index, line in enumerate(trace[1]):
        if isinstance(line.call, f.Evict) and len(line.inner) == 1:
            assert isinstance(line.inner[0], f.Free)
            yield judge, index, line, judge.pages_of(line.inner[0].slots)
        judge.apply(line)


def with_victim(line: f.Line, pages: list[int], fewer: int = 0) -> f.Line:
    copy = msgspec.json.decode(msgspec.json.encode(line), type=f.Line)
    copy.inner = [f.Free(slots=[p * PAGE + i for p in pages for i in range(PAGE)])]
    assert isinstance(copy.call, f.Evict)
    assert copy.after is not None
    copy.call.num_tokens_evicted -= fewer
    copy.after = f.Sizes(
        copy.after.available - fewer, (copy.after.evictable or 0) + fewer, copy.after.protected
    )
    return copy


def test_another_victim_is_legal(trace: Trace) -> None:
    """Another unlocked leaf of the same size goes instead; what comes later would depend on it."""
    header, lines = trace
    count = 0
    for judge, index, line, pages in evictions(trace):
        device = judge.device
        for prefix, page in device.cached.items():
            if device.below[prefix] or prefix in device.locked() or page in pages:
                continue
            chain = [page]
            while len(chain) < len(pages) and device.below[prefix := device.above(prefix)] == 1:
                chain.append(device.cached.get(prefix, -1))
            if len(chain) == len(pages) and not set(chain) & {*pages, -1}:
                new = [*lines[:index], with_victim(line, chain)]
                assert judge_lines(header, new).verdict == "ok"
                count += 1
    assert count >= 3


def test_another_split_point_is_legal(trace: Trace) -> None:
    """The victim was split elsewhere: only its last page goes."""
    header, lines = trace
    count = 0
    for _, index, line, pages in evictions(trace):
        assert isinstance(line.call, f.Evict)
        if len(pages) > 1 and line.call.num_tokens <= PAGE:
            fewer = (len(pages) - 1) * PAGE
            new = [*lines[:index], with_victim(line, pages[-1:], fewer)]
            assert judge_lines(header, new).verdict == "ok"
            count += 1
    assert count >= 1


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
        driver.tree._insert_row = None  # the cache breaks
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
