"""What a simulated machine did, as data for a page, and as a file that Perfetto opens.

The file is in the JSON trace event format: one track a stream or host thread, a slice a launch from
its issue to its end, a flow for each wait. A tick of the machine's log is a microsecond.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from refcache.errors import InvalidArgument
from refcache.runtime.simulated.log import MachineLog, Span
from refcache.runtime.simulated.tracker import RaceFound

PROCESS = 1


def timeline(log: MachineLog, race: RaceFound | None = None) -> dict[str, Any]:
    """Spans, waits, and the edge that is missing, if that is what was found."""
    told: dict[str, Any] = {
        "spans": [asdict(span) for span in log.spans],
        "edges": [asdict(edge) for edge in log.edges],
    }
    if race is not None:
        told["missing"] = {
            "from": [race.first.actor.index, race.first.number],
            "to": [race.second.actor.index, race.second.number],
            "second": race.second.name,
            "track": str(race.second.actor),
            "says": f"nothing orders these on {race.where}",
        }
    return told


def trace_events(log: MachineLog) -> list[dict[str, Any]]:
    """The log as trace events, metadata first."""
    events: list[dict[str, Any]] = []
    tracks = {span.track: span.actor for span in log.spans}
    for track, name in tracks.items():
        events.append(_event("M", "thread_name", track, args={"name": name}))
    end = max((span.ran or span.issued for span in log.spans), default=0) + 1
    slices: dict[tuple[int, int], tuple[int, int]] = {}  # (track, number) -> from, to
    done = {(span.track, span.number) for span in log.spans if span.ran is not None}
    free: dict[int, int] = {}  # when a track has ended what came before
    for span in _ordered(log.spans):
        begin = max(span.issued, free.get(span.track, 0))
        until = free[span.track] = max(begin + 1, span.ran or end)
        slices[span.track, span.number] = begin, until
        args = {"step": span.step, "issued at": span.issued, "ran": span.ran is not None}
        events.append(_event("X", span.name, span.track, ts=begin, dur=until - begin, args=args))
    for number, edge in enumerate(log.edges):
        source = slices.get((edge.on, edge.number))
        target = slices.get((edge.track, edge.after + 1))
        if source is None or target is None or (edge.on, edge.number) not in done:
            continue
        about = {"cat": "wait", "id": number}
        events.append(_event("s", "wait", edge.on, ts=source[1] - 1, **about))
        events.append(_event("f", "wait", edge.track, ts=target[1] - 1, bp="e", **about))
    return events


def _ordered(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: (span.track, span.number))


def _event(kind: str, name: str, track: int, **more: Any) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": PROCESS, "tid": track, **more}


def write_trace_events(events: list[dict[str, Any]], path: str | Path) -> None:
    """Write trace events as one JSON object, for https://ui.perfetto.dev.

    Raises:
        InvalidArgument: the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps({"traceEvents": events}) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: cannot be written: {error.strerror}") from None
