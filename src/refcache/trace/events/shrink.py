"""The smallest part of a stream of KV events that still fails, for the same reason.

Events that name the block which the violation is about all stay, so that nothing is made a
violation by what was left out. Every other event goes, if the same event then still breaks the same
rule with the same evidence. The result is a stream of its own: batches are numbered only where the
violation is about their numbers.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from refcache.errors import InvalidArgument, InvalidTrace
from refcache.oracle.rules.violation import Violation
from refcache.readers.block_event import BlockEvent, EventBatch, Hash
from refcache.readers.events import read_events
from refcache.trace.events.stream import LIBERTIES, Announced, judge_batches
from refcache.trace.verdict import TraceVerdict


class Item(NamedTuple):
    """One event with the batch it came in."""

    batch: EventBatch
    event: BlockEvent


class _Found(NamedTuple):
    rule: str
    evidence: str
    about: Hash | None
    position: int


def shrink_events(
    path: str | Path, out: str | Path, *, format: str | None = None, engine: str | None = None
) -> tuple[TraceVerdict, int]:
    """Shrink a failing stream of KV events to ``out``, as JSON lines.

    Args:
        format, engine: see :func:`refcache.trace.judge_events`.

    Returns:
        The verdict on what was written, and how many events that is.

    Raises:
        InvalidTrace: the file cannot be read, or ``out`` not be written.
        InvalidArgument: the stream does not fail.
    """
    batches: list[EventBatch] = []
    try:
        batches.extend(read_events(path, format))
    except InvalidTrace:
        if not batches:
            raise
    whole = judge_batches(batches, engine)
    if whole.verdict != "violation":
        raise InvalidArgument(f"the stream is no violation but {whole.verdict}: nothing to shrink")
    engine = engine or batches[0].engine or "any"
    if whole.rule == "N4":
        items = _around_the_gap(batches)
    else:
        listed = [Item(batch, event) for batch in batches for event in batch.events]
        items = shrink_items(listed, engine)
    _write(out, items, numbered=whole.rule == "N4")
    return judge_batches(read_events(out), engine), len(items)


def shrink_items(items: Sequence[Item], engine: str) -> list[Item]:
    """The needed part of the events up to the failing one, which comes last."""
    found = _judge(items, engine)
    if found is None:
        raise InvalidArgument("the events are no violation: nothing to shrink")
    kept = list(items[: found.position + 1])
    last = kept[-1]

    def fails(part: list[Item]) -> bool:
        seen = _judge(part, engine)
        return (
            seen is not None
            and (seen.rule, seen.evidence) == (found.rule, found.evidence)
            and seen.position == len(part) - 1
            and part[-1] is last
        )

    needed = _ancestry(kept, found.about)
    if fails(needed):
        kept = needed
    return _without(kept, fails, found.about)


def _judge(items: Sequence[Item], engine: str) -> _Found | None:
    announced = Announced(LIBERTIES[engine])
    for position, item in enumerate(items):
        try:
            announced.apply(item.event)
        except Violation as violation:
            return _Found(violation.id, violation.evidence, announced.about, position)
    return None


def _names(event: BlockEvent, block: Hash | None) -> bool:
    return block is not None and block in event.hashes


def _ancestry(items: list[Item], about: Hash | None) -> list[Item]:
    """The last event, those that name the block, and what stored the parents of all these."""
    wanted: set[Hash] = set() if about is None else {about}
    kept = []
    for item in reversed(items):
        event = item.event
        if item is items[-1] or not wanted.isdisjoint(event.hashes):
            kept.append(item)
            if event.op == "stored" and event.parent is not None:
                wanted.add(event.parent)
    return kept[::-1]


def _without(
    items: list[Item], fails: Callable[[list[Item]], bool], about: Hash | None
) -> list[Item]:
    """Drop ever smaller runs of events, from the end to the start, while the rest still fails."""
    size = max(1, len(items) // 2)
    while True:
        start = len(items) - 1 - size
        while start > -size:
            run = range(max(start, 0), start + size)
            part = [
                item
                for i, item in enumerate(items)
                if i not in run or i == len(items) - 1 or _names(item.event, about)
            ]
            if len(part) < len(items) and fails(part):
                items = part
            start -= size
        if size == 1:
            return items
        size //= 2


def _around_the_gap(batches: list[EventBatch]) -> list[Item]:
    """The two batches whose numbers do not follow, without their events' history."""
    last: dict[Any, EventBatch] = {}
    for batch in batches:
        before = last.get(batch.source)
        if batch.seq is not None:
            if before is not None and before.seq is not None and batch.seq != before.seq + 1:
                nothing = BlockEvent("other", "none")
                return [Item(b, next(iter(b.events), nothing)) for b in (before, batch)]
            last[batch.source] = batch
    return []


def _write(out: str | Path, items: Sequence[Item], numbered: bool) -> None:
    target = Path(out).absolute()
    part = target.parent / f".{target.name}.{os.getpid()}.part"
    try:
        try:
            text = "".join(json.dumps(_line(item, numbered)) + "\n" for item in items)
            part.write_text(text)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidTrace(out, None, None, f"cannot be written: {error.strerror}") from None


def _line(item: Item, numbered: bool) -> Any:
    """An event as a line of its own, in the form that it came in."""
    batch, event = item
    raw = _plain(event.raw)
    if batch.form != "kv-events":
        return raw if numbered else _unnumbered(raw)
    events = [] if event.raw is None else [raw]
    line: dict[str, Any] = {**(_plain(batch.wrap) or {"ts": 0}), "events": events}
    if numbered:
        line["seq"] = batch.seq
    return line if batch.source is None else {"topic": batch.source, "batch": line}


def _unnumbered(raw: Any) -> Any:
    kept = {name: value for name, value in raw.items() if name != "event_id"}
    if isinstance(kept.get("event"), dict):
        kept["event"] = _unnumbered(kept["event"])
    return kept


def _plain(value: Any) -> Any:
    """``value`` with bytes as hex text, so that it can be written as JSON."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
