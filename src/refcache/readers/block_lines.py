"""JSON lines with ids of prompt blocks: Mooncake's form and its relatives, and Qwen-Bailian's.

Mooncake: ``timestamp`` (whole milliseconds), ``input_length``, ``output_length``, ``hash_ids``. An
id names a block and all before it. Relatives leave fields out (AIPerf), use another block size
(Dynamo), or group requests into sessions whose later turns come a ``delay`` after the one before.
Qwen-Bailian: seconds with a fraction, and ids that name a block alone, whatever stands before it.
Other fields of a line are ignored.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from refcache.readers.rows import Options, Row, Tally
from refcache.readers.source import Source, shown
from refcache.readers.trace_request import MAX_BLOCK, MAX_LENGTH, MAX_TIME

PREFILL = "without an output length: one token"
NO_OUTPUT = "with an output length of 0: one token"
NO_IDS = "without hash_ids: they share no block with others"
NO_TIME = "without a time of arrival: with the request before"
DELAYED = "with a delay instead of a time: that long after the arrival of the turn before"
SEVERAL = "an id follows different ids in different requests: ids name single blocks, not prefixes"

Rows = tuple[Iterable[Row], int | None, list[str]]


def read_mooncake(source: Source, options: Options) -> Rows:
    """Mooncake's form and its relatives. The block size is a field, or inferred."""
    notes: list[str] = []
    lines = _Lines(source, options.limit, notes)
    listed = list(Tally.over(lines.tally, lines.rows(_milliseconds)))
    return listed, lines.block_size, notes


def read_bailian(source: Source, options: Options) -> Rows:
    """Qwen-Bailian's form: seconds, blocks of 16."""
    notes: list[str] = []
    lines = _Lines(source, options.limit, notes)
    return list(Tally.over(lines.tally, lines.rows(_seconds))), lines.block_size or 16, notes


def _milliseconds(source: Source, data: dict[str, Any], name: str) -> int:
    return source.integer(data, name, 0, MAX_TIME, " (milliseconds)")


def _seconds(source: Source, data: dict[str, Any], name: str) -> int:
    value = data[name]
    if type(value) not in (int, float) or not 0 <= value <= MAX_TIME / 1000:
        raise source.refuse(name, f"got {shown(value)}: expected seconds, a number of 0 or more")
    return round(float(value) * 1000)


class _Lines:
    """Turns lines into rows; remembers sessions, the time, and what came before each id."""

    def __init__(self, source: Source, limit: int | None, notes: list[str]) -> None:
        self.source, self.limit, self.notes = source, limit, notes
        self.tally = Tally(notes)
        self.block_size: int | None = None
        self.time = 0
        self.sessions: dict[object, int] = {}
        self.before: dict[int, int] = {}  # id -> the id before it, -1 for none
        self.chained = True

    def rows(self, clock: Any) -> Iterator[Row]:
        """The rows of the file; ``clock`` reads a field as milliseconds."""
        for raw in self.source.lines(self.limit):
            data = self.source.object(raw)
            timestamp = self.arrival(data, clock)
            length = self.source.integer(data, "input_length", 1, MAX_LENGTH)
            output = self.output(data)
            ids = self.ids(data)
            self.size(data)
            yield Row(self.source.line, timestamp, length, output, ids)
        if not self.chained:
            self.notes.append(SEVERAL)

    def arrival(self, data: dict[str, Any], clock: Any) -> int:
        session = data.get("session_id")
        if isinstance(session, list | dict):
            raise self.source.refuse("session_id", f"got {shown(session)}: expected a name")
        if data.get("timestamp") is not None:
            self.time = clock(self.source, data, "timestamp")
        elif data.get("delay") is not None:
            since = self.sessions.get(session, self.time) if session is not None else self.time
            self.time = since + clock(self.source, data, "delay")
            self.tally.add(DELAYED)
        else:
            self.tally.add(NO_TIME)
        if session is not None:
            self.sessions[session] = self.time
        return self.time

    def output(self, data: dict[str, Any]) -> int:
        if data.get("output_length") is None:
            self.tally.add(PREFILL)
            return 1
        length = self.source.integer(data, "output_length", 0, MAX_LENGTH)
        if length == 0:
            self.tally.add(NO_OUTPUT)
        return max(length, 1)

    def ids(self, data: dict[str, Any]) -> tuple[int, ...] | None:
        values = data.get("hash_ids")
        if values is None:
            self.tally.add(NO_IDS)
            return None
        if not isinstance(values, list):
            problem = f"got {shown(values)}: expected a list of integers"
            raise self.source.refuse("hash_ids", problem)
        last = -1
        for index, value in enumerate(values):
            if type(value) is not int or value < 0:
                raise self.source.refuse(
                    f"hash_ids[{index}]", f"got {shown(value)}: expected an integer of 0 or more"
                )
            self.chained &= self.before.setdefault(value, last) == last
            last = value
        return tuple(values)

    def size(self, data: dict[str, Any]) -> None:
        if "block_size" not in data:
            return
        size = self.source.integer(data, "block_size", 1, MAX_BLOCK)
        if self.block_size not in (None, size):
            problem = f"got {size}: expected {self.block_size}, as on the lines before"
            raise self.source.refuse("block_size", problem)
        self.block_size = size
