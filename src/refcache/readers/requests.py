"""Request traces: which reader serves a file, and what every reader hands over.

=============== ================================================================= ================
format          what it is                                                        block size
=============== ================================================================= ================
mooncake        JSON lines with ``input_length`` and ``hash_ids``; the forms of   512, or the only
                Dynamo and AIPerf, and sessions (``session_id``, ``delay``)       one that fits
qwen-bailian    JSON lines with ``chat_id``; seconds; blocks hashed one by one    16
azure           CSV of the Azure LLM inference traces: lengths only               512
burstgpt        CSV of BurstGPT: lengths only                                     512
sharegpt        JSON (an array, or lines) of conversations: text                  1, a token an id
=============== ================================================================= ================

A reader fills in what is missing by documented defaults and says so in ``notes``:

* no output length, or 0: one token, so that the request is a prefill;
* no time of arrival: with the request before; with a ``delay``, that long after the turn before;
* no ids: the request shares no block with any other;
* requests that are not in order of arrival are sorted, equal times as they stand.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from refcache.errors import InvalidArgument, InvalidTrace, UnknownName
from refcache.readers import block_lines, conversations, csv_lines
from refcache.readers.rows import Options, Row
from refcache.readers.source import Source, open_source
from refcache.readers.trace_request import MAX_BLOCK, TraceRequest, max_id, problem_of

HEAD = 2**16  # bytes that decide what a file is

Reader = Callable[[Source, Options], tuple[Iterable[Row], int | None, list[str]]]
"""Yields the rows of a file; with the block size that the form has, and what it cannot know."""

READERS: dict[str, Reader] = {
    "azure": csv_lines.read_azure,
    "burstgpt": csv_lines.read_burstgpt,
    "mooncake": block_lines.read_mooncake,
    "qwen-bailian": block_lines.read_bailian,
    "sharegpt": conversations.read,
}
TEXT = "sharegpt"
REQUEST_FORMATS = tuple(READERS)


@dataclass(frozen=True)
class RequestTrace:
    """A trace that was read.

    Attributes:
        format: the reader that served it, a name of ``REQUEST_FORMATS``.
        block_size: tokens of a block id.
        notes: what the file could not tell, or what was changed; one sentence each.
        requests: in order of arrival.
    """

    format: str
    block_size: int
    notes: tuple[str, ...]
    requests: tuple[TraceRequest, ...]


def read_requests(
    path: str | Path,
    *,
    format: str | None = None,
    block_size: int | None = None,
    limit: int | None = None,
    tokenizer: str | None = None,
) -> RequestTrace:
    """Read a request trace.

    Args:
        path: the file; compressed or not.
        format: the reader, instead of the one that fits the content.
        block_size: tokens of a block id, instead of the form's own.
        limit: read only so many requests from the start of the file.
        tokenizer: for text: a ``tokenizer.json``, or a name that the package ``tokenizers`` finds.
            None: each byte of UTF-8 is a token.

    Raises:
        InvalidTrace: the file cannot be read, or is not of the form; names file, line and field.
        UnknownName: no such format. InvalidArgument: the tokenizer cannot be had, or there
            is no text for it.
    """
    if format is not None and format not in READERS:
        raise UnknownName("format", format, READERS)
    if block_size is not None and not 1 <= block_size <= MAX_BLOCK:
        raise InvalidTrace(
            path, None, "block_size", f"got {block_size}: expected an integer of 1 to {MAX_BLOCK}"
        )
    source = Source(path)
    name = format or recognise(path)
    if tokenizer is not None and name != TEXT:
        raise InvalidArgument(f"tokenizer={tokenizer!r} for {name}: expected None, it has no text")
    rows, fixed, notes = READERS[name](source, Options(block_size, limit, tokenizer))
    listed = list(rows)
    size = _block_size(source, listed, block_size or fixed, notes)
    made = _requests(source, listed, size, notes)
    return RequestTrace(name, size, tuple(notes), tuple(made))


def recognise(path: str | Path) -> str:
    """The format of a file, by its content.

    Raises:
        InvalidTrace: it is empty, or nothing that is known here.
    """
    source = Source(path)
    with open_source(path) as file:
        head = source.guarded(lambda: file.read(HEAD))
    if not head:
        raise source.refuse(None, "the file is empty: expected a request trace")
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start == b"[":
        return "sharegpt"
    first = next(source.lines(1))
    if start == b"{":
        data = source.object(first)
        if "conversations" in data or "messages" in data:
            return "sharegpt"
        return "qwen-bailian" if "chat_id" in data else "mooncake"
    names = csv_lines.header(source, first)
    for name, fields in csv_lines.FORMS.items():
        if set(fields) <= set(names):
            return name
    if not source.text(first).strip():
        raise source.refuse(None, "empty line: expected a request trace")
    raise source.refuse(None, f"no request trace: expected one of {', '.join(READERS)}")


def _block_size(source: Source, rows: list[Row], size: int | None, notes: list[str]) -> int:
    """The size that every row's ids fit: the form's, or the only power of two that does."""
    known = size or 512
    wrong = [row for row in rows if row.ids is not None and not _fits(row, known)]
    if not wrong:
        return known
    others = [1 << k for k in range(17)] if size is None else []
    fitting = [b for b in others if all(row.ids is None or _fits(row, b) for row in rows)]
    if len(fitting) == 1:
        notes.append(f"block size {fitting[0]}: the only power of two that fits every hash_ids")
        return fitting[0]
    row = wrong[0]
    source.line = row.line
    blocks = -(-row.input_length // known)
    hint = f"; block sizes {_either(fitting)} fit: name one" if fitting else ""
    raise source.refuse(
        "hash_ids",
        f"got {len(row.ids or ())} ids for an input_length of {row.input_length}: expected "
        f"{blocks}, one for each {known} tokens{hint}",
    )


def _either(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:-1])) + f" and {sizes[-1]}"


def _fits(row: Row, size: int) -> bool:
    return row.ids is not None and len(row.ids) == -(-row.input_length // size)


def _requests(
    source: Source, rows: list[Row], size: int, notes: list[str]
) -> Iterable[TraceRequest]:
    """Rows as requests: sorted, ids within range, fresh ids where there are none."""
    most = max_id(size)
    largest = max((max(row.ids, default=-1) for row in rows if row.ids), default=-1)
    dense: dict[int, int] | None = None
    if largest > most:
        dense = {}
        notes.append("hash_ids are numbered anew: they are too large to be multiplied into tokens")
    if any(a.timestamp > b.timestamp for a, b in pairwise(rows)):
        rows.sort(key=lambda row: row.timestamp)
        notes.append("the requests were not in order of arrival: sorted")
    if dense is not None:
        for row in rows:
            for value in row.ids or ():
                dense.setdefault(value, len(dense))
    fresh = (largest if dense is None else len(dense) - 1) + 1
    made = []
    for row in rows:
        if row.ids is None:
            count = -(-row.input_length // size)
            ids = tuple(range(fresh, fresh + count))
            fresh += count
        else:
            ids = row.ids if dense is None else tuple(dense[value] for value in row.ids)
        request = TraceRequest(row.timestamp, row.input_length, row.output_length, ids, size)
        problem = problem_of(request, row.timestamp)
        if problem is not None:
            source.line = row.line
            raise source.refuse(*problem)
        made.append(request)
    return made
