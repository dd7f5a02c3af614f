"""Request traces in Mooncake's format: read strictly, and written whole or not at all.

A trace is a text file with one JSON object a line: ``timestamp`` (milliseconds, sorted),
``input_length`` and ``output_length`` (tokens), ``hash_ids`` (one id for each block of 512 input
tokens; the last block may be partial). Block ``h`` stands for the tokens ``512*h ... 512*h + 511``,
so equal ids are equal tokens. An id names a block *and all before it*: it has one predecessor, and
the ids of a trace are the nodes of a prefix tree.

Other fields of a line are ignored. What a trace does not have: the tokens of the outputs (a replay
makes its own), namespaces, priorities, aborts.
"""

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from refcache.errors import InvalidTrace
from refcache.keys import MAX_TOKEN, TOKEN

BLOCK = 512
MAX_ID = (MAX_TOKEN - BLOCK + 1) // BLOCK
MAX_LENGTH = 2**24  # tokens of one prompt or output
MAX_TIME = 2**53
MAX_LINE = 2**24  # bytes


class TraceRequest(NamedTuple):
    """One line of a trace; the fields are the module docstring's."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def token_ids(self) -> "array[int]":
        """The prompt: ``input_length`` tokens as ``array('I')``.

        >>> request = TraceRequest(0, input_length=514, output_length=1, hash_ids=(0, 7))
        >>> request.token_ids()[510:].tolist()
        [510, 511, 3584, 3585]
        """
        tokens = array(TOKEN)
        for block in self.hash_ids:
            tokens.extend(range(block * BLOCK, (block + 1) * BLOCK))
        return tokens[: self.input_length]


def read_trace(path: str | Path, limit: int | None = None) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, the first ``limit`` if given; reads line by line.

    Raises:
        InvalidTrace: the file cannot be read, is empty, or a line breaks the format. One sentence
            that names file, line and field.
    """
    check = _Checker(path)
    try:
        with open(path, "rb") as file:
            while limit is None or check.line < limit:
                raw = file.readline(MAX_LINE)
                if not raw:
                    break
                yield check.request(raw)
    except OSError as error:
        raise InvalidTrace(path, None, None, str(error.strerror)) from None
    if check.line == 0 and limit != 0:
        raise InvalidTrace(path, None, None, "the file is empty: expected one JSON object a line")


class _Checker:
    """Turns lines into requests; remembers what the lines before them said."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.line = 0
        self.time = 0
        self.first: dict[int, tuple[int | None, int]] = {}  # id -> (its predecessor, line)

    def refuse(self, field: str | None, problem: str) -> InvalidTrace:
        return InvalidTrace(self.path, self.line, field, problem)

    def request(self, raw: bytes) -> TraceRequest:
        self.line += 1
        data = self.decode(raw)
        request = TraceRequest(
            self.integer(data, "timestamp", 0, MAX_TIME),
            self.integer(data, "input_length", 1, MAX_LENGTH),
            self.integer(data, "output_length", 1, MAX_LENGTH),
            tuple(self.ids(data)),
        )
        if request.timestamp < self.time:
            raise self.refuse(
                "timestamp", f"got {request.timestamp}: expected no less than {self.time}, the last"
            )
        blocks = -(-request.input_length // BLOCK)
        if len(request.hash_ids) != blocks:
            raise self.refuse(
                "hash_ids",
                f"got {len(request.hash_ids)} ids for an input_length of "
                f"{request.input_length}: expected {blocks}, one for each {BLOCK} tokens",
            )
        self.predecessors(request.hash_ids)
        self.time = request.timestamp
        return request

    def decode(self, raw: bytes) -> dict[str, Any]:
        if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
            raise self.refuse(None, f"longer than {MAX_LINE:,} bytes: not a trace?")
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            at = f"byte {raw[error.start]:#04x} at column {error.start + 1}"
            raise self.refuse(None, f"not UTF-8 text ({at}): a binary file?") from None
        if not text.strip():
            raise self.refuse(None, "empty line: expected a JSON object")
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            if not raw.endswith(b"\n"):
                raise self.refuse(None, "the file ends inside this line: truncated?") from None
            problem = f"not JSON ({error.msg} at column {error.pos + 1})"
            raise self.refuse(None, problem) from None
        except (RecursionError, ValueError) as error:
            raise self.refuse(None, f"not JSON of a trace ({_shown(str(error))})") from None
        if not isinstance(data, dict):
            raise self.refuse(None, f"got {_shown(data)}: expected a JSON object")
        return data

    def field(self, data: dict[str, Any], name: str) -> Any:
        if name not in data:
            raise self.refuse(name, "the field is missing")
        return data[name]

    def integer(self, data: dict[str, Any], name: str, low: int, high: int) -> int:
        value = self.field(data, name)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(name, f"got {_shown(value)}: expected an integer of {low} to {high}")
        return value

    def ids(self, data: dict[str, Any]) -> list[int]:
        values = self.field(data, "hash_ids")
        if not isinstance(values, list):
            raise self.refuse("hash_ids", f"got {_shown(values)}: expected a list of integers")
        for index, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= MAX_ID:
                raise self.refuse(
                    f"hash_ids[{index}]",
                    f"got {_shown(value)}: expected an integer of 0 to {MAX_ID} "
                    f"(its tokens, {BLOCK} an id, must stay below 2**32)",
                )
        return values

    def predecessors(self, hash_ids: tuple[int, ...]) -> None:
        before: int | None = None
        for index, block in enumerate(hash_ids):
            known, line = self.first.setdefault(block, (before, self.line))
            if known != before:
                raise self.refuse(
                    f"hash_ids[{index}]",
                    f"id {block} comes {_place(before)} here and {_place(known)} on line {line}: "
                    "expected one predecessor",
                )
            before = block


def _place(predecessor: int | None) -> str:
    return "first" if predecessor is None else f"after {predecessor}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> int:
    """Write a trace and return the number of requests; ``path`` appears only when it is complete.

    Raises:
        InvalidTrace: the file cannot be written, or a request is one that ``read_trace`` refuses.
    """
    check = _Checker(path)
    target = Path(path).absolute()
    part = target.parent / f".{target.name}.{os.getpid()}.part"
    try:
        try:
            with open(part, "wb") as file:
                for request in requests:
                    line = json.dumps(request._asdict()).encode() + b"\n"
                    check.request(line)
                    file.write(line)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidTrace(path, None, None, f"cannot be written: {error.strerror}") from None
    return check.line
