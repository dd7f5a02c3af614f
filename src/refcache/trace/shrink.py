"""``shrink``: the smallest part of a failing trace that still fails, for the same reason.

First the records that the verdict's argument names, with what those rest on, and so on: who handed
out a page that a record uses, who cached it, where a node handle comes from. Then every record that
is not needed goes, from the end to the start, alone or together with those that make no sense
without it. A part counts when the same record breaks the same rule with the same evidence and the
same argument, so nothing that the verdict rests on can go, and nothing is made a violation by what
was left out.

The result is an *excerpt*: numbers are those of the whole trace, only the failing record carries
sizes, and evictions may have lost frees that do not matter. Before that record a page that is
handed out again needs no record of its free, and nothing about how much is free is judged.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import asdict, replace

from refcache.errors import InvalidArgument
from refcache.trace import format as f
from refcache.trace.file import read_trace, write_trace
from refcache.trace.format import Header, Line
from refcache.trace.judge import Judge, judge_lines
from refcache.trace.verdict import TraceVerdict

ALLOCATIONS = (f.Alloc, f.AllocExtend, f.AllocDecode, f.HostAlloc)
Numbers = set[int]


def shrink_trace(path: str | Path, out: str | Path) -> tuple[TraceVerdict, int]:
    """Shrink a failing trace file to ``out``.

    Returns:
        The verdict on what was written, and how many records that is.

    Raises:
        InvalidTrace: the file cannot be read, or ``out`` not be written.
        InvalidArgument: the trace does not fail.
    """
    header, lines, _ = read_trace(path)
    header, lines = shrink_lines(header, lines)
    write_trace(out, header, lines)
    return judge_lines(header, lines), len(lines)


def shrink_lines(header: Header, lines: Sequence[Line]) -> tuple[Header, list[Line]]:
    """The smallest failing part of a trace, with the header of an excerpt.

    Raises:
        InvalidArgument: the trace does not fail.
    """
    found = judge_lines(header, lines)
    if found.verdict != "violation":
        raise InvalidArgument(f"the trace is no violation but {found.verdict}: nothing to shrink")
    kept = [line for line in lines if line.n <= found.n]
    excerpt = replace(header, excerpt=True)
    local = next(
        (k for k in _with_fewer_sizes(kept) if _same(judge_lines(excerpt, k), found)), None
    )
    if local is None:
        return header, kept
    kept = _needed(excerpt, local, found)
    size = max(1, len(kept) // 2)
    while True:
        smaller = _drop(excerpt, kept, found, size)
        if size == 1:
            smaller = _drop_with_dependents(excerpt, smaller, found)
            if len(smaller) == len(kept):
                return excerpt, kept
        kept, size = smaller, max(1, size // 2)


def _same(seen: TraceVerdict, found: TraceVerdict) -> bool:
    return (seen.n, seen.rule, seen.evidence, seen.argument) == (
        found.n,
        found.rule,
        found.evidence,
        found.argument,
    )


def _with_fewer_sizes(lines: list[Line]) -> Iterator[list[Line]]:
    """Sizes at the last record only, since elsewhere they depend on every other: after it, or
    before it as well, which then says by how much they grew.
    """
    before = next((line.after for line in reversed(lines[:-1]) if line.after), None)
    bare = [replace(line, before=None, after=None) for line in lines[:-1]]
    for known in (None, lines[-1].before or before):
        yield [*bare, replace(lines[-1], before=known)]


# ---- what a record rests on ----------------------------------------------------------------------


class _Origins:
    """Which earlier records each record uses, seen while the whole trace is judged.

    Attributes:
        uses: for each record, those that handed out and cached its pages, or gave it its node.
        frees: for each allocation, those of the last life of the pages that it hands out again.
        lives: for each page of a tier, every record that touches it.
    """

    def __init__(self, header: Header, lines: list[Line]) -> None:
        self.uses: dict[int, Numbers] = defaultdict(set)
        self.frees: dict[int, Numbers] = defaultdict(set)
        self.lives: dict[tuple[str, int], Numbers] = defaultdict(set)
        self._nodes: dict[int, list[int]] = defaultdict(list)
        self._judge = Judge(header)
        for line in lines[:-1]:
            self._look(line)
            self._judge.apply(line)
        self._look(lines[-1])

    def _look(self, line: Line) -> None:
        """Note which records a line rests on: who had its pages, who made its nodes."""
        for call in (*line.inner, line.call):
            for tier, page in self._pages(call):
                history = self._judge.device if tier == "device" else self._judge.host
                past = numbers(history.past.get(page, ()))
                target = self.frees if isinstance(call, ALLOCATIONS) else self.uses
                target[line.n] |= past
                self.lives[tier, page].add(line.n)
            if isinstance(call, f.AllocExtend | f.AllocDecode):
                for slot in call.last_loc:
                    page = slot // self._judge.page_size
                    self.uses[line.n] |= numbers(self._judge.device.past.get(page, ()))
        for name, node in asdict(line.call).items():
            if name.endswith("node"):
                self.uses[line.n].update(self._nodes[node][-2:])
                self._nodes[node].append(line.n)

    def _pages(self, call: f.AnyCall) -> Iterator[tuple[str, int]]:
        host = isinstance(call, f.HostAlloc | f.HostFree)
        for name in ("slots", "row", "host_slots"):
            tier = "host" if host or name == "host_slots" else "device"
            for page in self._judge.pages_of(getattr(call, name, None) or ()):
                yield tier, page


def numbers(texts: Sequence[str]) -> Numbers:
    """The records that some lines of an argument name."""
    return {int(n) for text in texts for n in re.findall(r"record (\d+)", text)}


def _needed(header: Header, lines: list[Line], found: TraceVerdict) -> list[Line]:
    """The records behind the verdict, grown until they give it; all of them if they do not."""
    origins = _Origins(header, lines)
    chosen = {found.n} | numbers(found.argument)
    while True:
        part = [line for line in lines if line.n in chosen]
        seen = judge_lines(header, part)
        if _same(seen, found):
            return part
        at = part[seen.records - 1].n
        pages = [
            ("host" if host else "device", int(page))
            for host, page in re.findall(r"(host )?pages? \[?(\d+)", seen.evidence)
        ]
        lives = {n for page in pages for n in origins.lives[page] if n < at}
        missing = (origins.uses[at], origins.frees[at], lives, origins.uses[found.n])
        more = next((wanted - chosen for wanted in missing if wanted - chosen), None)
        if more is None:
            return lines
        chosen |= more


# ---- what can go ---------------------------------------------------------------------------------


def _drop(header: Header, lines: list[Line], found: TraceVerdict, size: int) -> list[Line]:
    """Leave out every run of ``size`` records that is not needed, the last ones first."""
    end = len(lines) - 1  # the failing record stays
    while end > 0:
        start = max(0, end - size)
        candidate = lines[:start] + lines[end:]
        if _same(judge_lines(header, candidate), found):
            lines = candidate
        end = start
    return lines


def _drop_with_dependents(header: Header, lines: list[Line], found: TraceVerdict) -> list[Line]:
    """Leave out each record with whatever its absence makes impossible, one after the other.

    What is impossible then goes too; or, if the verdict rests on it, whoever is in its way.
    """
    stays = {found.n} | numbers(found.argument)
    for first in reversed(lines):
        candidate = [line for line in lines if line.n != first.n or line.n in stays]
        while len(candidate) < len(lines):
            seen = judge_lines(header, candidate)
            if _same(seen, found):
                lines = candidate
                break
            fewer = [] if seen.verdict == "ok" else _without_cause(header, candidate, seen, stays)
            if fewer == candidate or not fewer:
                break
            candidate = fewer
    return lines


def _without_cause(
    header: Header, lines: list[Line], seen: TraceVerdict, stays: Numbers
) -> list[Line]:
    """Leave out what makes a part impossible: a free of an eviction, a record, or its causes."""
    index = seen.records - 1
    at = lines[index]
    pages = {int(page) for page in re.findall(r"^page (\d+)", seen.evidence)}
    kept = [
        part
        for part in at.inner
        if not isinstance(part, f.Free)
        or not pages & {slot // header.page_size for slot in part.slots}
    ]
    if at.before is None and isinstance(at.call, f.Evict) and 0 < len(kept) < len(at.inner):
        return [*lines[:index], replace(at, inner=kept), *lines[index + 1 :]]
    gone = {at.n} if at.n not in stays else numbers(seen.argument) - stays
    return [line for line in lines if line.n not in gone]
