"""Streams of KV events: what a router was told, replayed; the first impossible event reported.

One JSON value a line: an event (``{"type": "BlockStored", ...}``), or a batch, as an object
(``{"ts": ..., "events": [...]}``) or as the array that SGLang and vLLM publish
(``[ts, [["BlockStored", ...], ...]]``). A stream starts with an empty cache; one that was joined
later can be judged from an ``AllBlocksCleared`` on.

Judged is what follows from the events alone: a block is stored once, after the block before it, and
removed only while it is stored (N2); a hash never stands for two prefixes (N1). Whether the cache
really holds these pages is judged where the calls were recorded too.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from refcache.errors import InvalidTrace
from refcache.oracle.rules.events import EventReplay
from refcache.oracle.rules.violation import Violation
from refcache.trace.events import KINDS, AllBlocksCleared, KVEvent
from refcache.trace.file import open_bytes, read_lines
from refcache.trace.verdict import TraceVerdict

DEVICE = "GPU"


class Residency:
    """What is resident on each medium, after the events so far. ``media``: a replay of each."""

    def __init__(self) -> None:
        self.media: dict[str, EventReplay] = {}

    def apply(self, event: KVEvent) -> None:
        """Replay one event.

        Raises:
            Violation: it cannot come after those before it.
        """
        if isinstance(event, AllBlocksCleared):
            self.medium(DEVICE)
            for replay in self.media.values():
                replay.apply([event])
        else:
            self.medium(event.medium or DEVICE).apply([event])

    def medium(self, name: str) -> EventReplay:
        """The replay of one medium; below the device, a parent may be on the device only."""
        if name not in self.media:
            above = (lambda: None) if name == DEVICE else (lambda: self.media.get(DEVICE))
            self.media[name] = EventReplay(above)
        return self.media[name]


def judge_events(path: str | Path) -> TraceVerdict:
    """Judge a stream up to its end, its first violation, or its damage.

    ``records`` of the verdict counts events; ``n`` is the line of the failing one.

    Raises:
        InvalidTrace: the file cannot be read, or its first line holds no KV event.
    """
    residency = Residency()
    count = 0
    with open_bytes(path) as file:
        for number, raw in enumerate(read_lines(path, file), start=1):
            try:
                if isinstance(raw, str):
                    raise ValueError(raw)
                events = list(decode(raw))
            except (ValueError, RecursionError) as error:
                problem = f"line {number}: {error}"
                if number == 1:
                    raise InvalidTrace(path, 1, None, f"no KV events: {error}") from None
                return TraceVerdict("unknown", count, damage=problem)
            for event in events:
                count += 1
                try:
                    residency.apply(event)
                except Violation as violation:
                    op, rule = type(event).__name__, violation.id
                    return TraceVerdict("violation", count, number, op, rule, violation.evidence)
    if not count:
        raise InvalidTrace(path, None, None, "the stream has no KV events")
    return TraceVerdict("ok", count)


def decode(raw: bytes) -> Iterator[KVEvent]:
    """The events of a line.

    Raises:
        ValueError: it holds none, or one that is not well formed.
    """
    value = msgspec.json.decode(raw)
    if isinstance(value, dict) and "type" in value:
        items: Any = [value]
    elif isinstance(value, dict):
        items = value.get("events")
    else:
        items = value[1] if isinstance(value, list) and len(value) > 1 else None
    if not isinstance(items, list):
        raise ValueError("expected an event or a batch of events")
    for item in items:
        yield msgspec.convert(_named(item), KVEvent)


def _named(item: Any) -> Any:
    """An event as an object: arrays have their fields in order, after the name of the kind."""
    if not isinstance(item, list) or not item or item[0] not in KINDS:
        return item
    fields: Iterable[str] = KINDS[item[0]].__struct_fields__
    return {"type": item[0], **dict(zip(fields, item[1:], strict=False))}
