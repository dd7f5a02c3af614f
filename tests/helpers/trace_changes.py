"""A recorded workload, and changes of a trace, for tests of any cache's traces.

Illegal changes, which a judge must find at their record, alter one record of a copy, or say that
they do not fit there. Legal ones it must not mind.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

import refcache
from refcache.oracle import HiCacheDriver, TreeDriver
from refcache.trace import format as f
from refcache.trace.events.kinds import BlockRemoved
from refcache.trace.judge import Judge, judge_lines

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


def another_victim_is_legal(trace: Trace) -> None:
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


def another_split_point_is_legal(trace: Trace) -> None:
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
