"""CSV traces that hold lengths only: the Azure LLM inference traces, and BurstGPT.

Nothing in them says which prompts share a prefix, so in a replay none do.
"""

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from refcache.readers.rows import Options, Row, Tally
from refcache.readers.source import Source, shown
from refcache.readers.trace_request import MAX_LENGTH, MAX_TIME

FORMS = {
    "azure": ("timestamp", "contexttokens", "generatedtokens"),
    "burstgpt": ("timestamp", "model", "request tokens", "response tokens"),
}
NO_PREFIXES = "the trace holds lengths only: no two prompts share a prefix, so there are no hits"
FAILED = "with 0 response tokens (BurstGPT's mark of a failure): one token"
NO_OUTPUT = "with 0 generated tokens: one token"
EMPTY = "with an empty prompt: left out"

Rows = tuple[Iterable[Row], int | None, list[str]]


def header(source: Source, raw: bytes) -> list[str]:
    """The column names of a first line, in lower case."""
    return [name.strip().lower() for name in _cells(source, raw)]


def read_azure(source: Source, options: Options) -> Rows:
    """``TIMESTAMP`` is a date and time; the first request comes at 0."""
    notes = [NO_PREFIXES]
    tally = Tally(notes)
    return list(tally.over(_rows(source, options, "azure", _date, NO_OUTPUT, tally))), None, notes


def read_burstgpt(source: Source, options: Options) -> Rows:
    """``Timestamp`` is in seconds from the start of the trace."""
    notes = [NO_PREFIXES]
    tally = Tally(notes)
    rows = _rows(source, options, "burstgpt", _seconds, FAILED, tally)
    return list(tally.over(rows)), None, notes


def _rows(
    source: Source, options: Options, form: str, clock: Any, no_output: str, tally: Tally
) -> Iterator[Row]:
    columns = FORMS[form]
    place: dict[str, int] = {}
    start = None
    limit = None if options.limit is None else options.limit + 1
    for raw in source.lines(limit):
        if source.line == 1:
            names = header(source, raw)
            for column in columns:
                if column not in names:
                    raise source.refuse(column, "the column is missing")
            place = {column: names.index(column) for column in columns}
            continue
        cells = _cells(source, raw)
        if not cells:
            raise source.refuse(None, "empty line: expected a row")
        if len(cells) <= max(place.values()):
            cut = "" if raw.endswith(b"\n") else ": the file ends inside this line?"
            raise source.refuse(None, f"{len(cells)} cells, expected {len(names)}{cut}")
        time = clock(source, cells[place["timestamp"]])
        start = time if start is None else start
        length = _tokens(source, columns[-2], cells[place[columns[-2]]])
        output = _tokens(source, columns[-1], cells[place[columns[-1]]])
        if length == 0:
            tally.add(EMPTY)
            continue
        if output == 0:
            tally.add(no_output)
        since = time - start if form == "azure" else time
        if since < 0:
            raise source.refuse("timestamp", "before the first request of the trace")
        yield Row(source.line, since, length, max(output, 1), None)
    if not place:
        raise source.refuse(None, "the file is empty")


def _cells(source: Source, raw: bytes) -> list[str]:
    try:
        return next(csv.reader([source.text(raw)], strict=True), [])
    except csv.Error as error:
        raise source.refuse(None, f"not CSV ({error})") from None


def _tokens(source: Source, name: str, text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 9 or int(digits) > MAX_LENGTH:
        problem = f"got {shown(text)}: expected an integer of 0 to {MAX_LENGTH}"
        raise source.refuse(name, problem)
    return int(digits)


def _date(source: Source, text: str) -> int:
    """Milliseconds since the year 1, by UTC where a zone is given."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise source.refuse("timestamp", f"got {shown(text)}: expected a date and time") from None
    offset = moment.utcoffset()
    since = moment.replace(tzinfo=None) - datetime.min
    if offset is not None:
        since -= offset
    return round(since.total_seconds() * 1000)


def _seconds(source: Source, text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_TIME / 1000:
        raise source.refuse("timestamp", f"got {shown(text)}: expected seconds from the start")
    return round(value * 1000)
