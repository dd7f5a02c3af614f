"""``shrink``: the smallest part of a failing trace that still fails, for the same reason.

Records after the failing one go first; then, in pieces that halve, from the end to the start, every
record that the verdict does not need: later records depend on earlier ones, seldom the other way. A
part counts when the same record breaks the same rule with the same evidence and the same argument,
so no record that the verdict rests on can go, and none is made a violation by what was left out.

The result is an *excerpt*: numbers are those of the whole trace, each record carries the sizes
before it, and totals over the whole trace are no longer judged.
"""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from refcache.errors import InvalidArgument
from refcache.oracle.trace.format import Header, Line, read_trace, write_trace
from refcache.oracle.trace.judge import TraceVerdict, judge_lines


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
    local = _with_sizes_before(kept)
    if _same(judge_lines(excerpt, local), found):
        header, kept = excerpt, local
    size = max(1, len(kept) // 2)
    while True:
        smaller = _drop(header, kept, found, size)
        if size == 1 and len(smaller) == len(kept):
            return header, kept
        kept, size = smaller, max(1, size // 2)


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


def _same(seen: TraceVerdict, found: TraceVerdict) -> bool:
    return (seen.n, seen.rule, seen.evidence, seen.argument) == (
        found.n,
        found.rule,
        found.evidence,
        found.argument,
    )


def _with_sizes_before(lines: list[Line]) -> list[Line]:
    """Each record with the sizes before it, so that it can be judged without its neighbours."""
    out = []
    last = None
    for line in lines:
        out.append(replace(line, before=line.before or last))
        last = line.after or last
    return out
