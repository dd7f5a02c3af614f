"""A request of a trace, and our own file form: one JSON object a line, written whole or not at all.

Fields of a line: ``timestamp`` (milliseconds, sorted), ``input_length`` and ``output_length``
(tokens), ``hash_ids`` (one id for each block of 512 input tokens; the last may be partial) and
``block_size`` where it is not 512. That is Mooncake's form with one field more.

Block ``h`` stands for the tokens ``size*h ... size*h + size - 1``, so equal ids are equal tokens.
With a block size of 1 an id *is* a token.
"""

import json
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from refcache.errors import InvalidTrace
from refcache.keys import MAX_TOKEN, TOKEN

BLOCK = 512
MAX_LENGTH = 2**24  # tokens of one prompt or output
MAX_TIME = 2**53
MAX_BLOCK = 2**20


class TraceRequest(NamedTuple):
    """One request; the fields are the module docstring's, ``timestamp`` in milliseconds."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_size: int = BLOCK

    def token_ids(self) -> "array[int]":
        """The prompt: ``input_length`` tokens as ``array('I')``.

        >>> request = TraceRequest(0, input_length=514, output_length=1, hash_ids=(0, 7))
        >>> request.token_ids()[510:].tolist()
        [510, 511, 3584, 3585]
        """
        tokens = array(TOKEN)
        size = self.block_size
        for block in self.hash_ids:
            tokens.extend(range(block * size, (block + 1) * size))
        return tokens[: self.input_length]


def max_id(block_size: int) -> int:
    """The largest block id whose tokens stay below 2**32."""
    return (MAX_TOKEN - block_size + 1) // block_size


def problem_of(request: TraceRequest, time: int) -> tuple[str, str] | None:
    """What is wrong with a request that comes after one at ``time``: (field, sentence), or None."""
    for name, low, high in (
        ("timestamp", 0, MAX_TIME),
        ("input_length", 1, MAX_LENGTH),
        ("output_length", 1, MAX_LENGTH),
        ("block_size", 1, MAX_BLOCK),
    ):
        value = getattr(request, name)
        if type(value) is not int or not low <= value <= high:
            return name, f"got {value!r}: expected an integer of {low} to {high}"
    if request.timestamp < time:
        return "timestamp", f"got {request.timestamp}: expected no less than {time}, the last"
    size, ids = request.block_size, request.hash_ids
    blocks = -(-request.input_length // size)
    if len(ids) != blocks:
        return "hash_ids", (
            f"got {len(ids)} ids for an input_length of {request.input_length}: expected {blocks}, "
            f"one for each {size} tokens"
        )
    most = max_id(size)
    for index, value in enumerate(ids):
        if type(value) is not int or not 0 <= value <= most:
            return f"hash_ids[{index}]", (
                f"got {value!r}: expected an integer of 0 to {most} (its tokens, {size} an id, "
                "must stay below 2**32)"
            )
    return None


def write_requests(path: str | Path, requests: Iterable[TraceRequest]) -> int:
    """Write a trace and return the number of requests; ``path`` appears only when it is complete.

    Raises:
        InvalidTrace: the file cannot be written, or a request breaks the form.
    """
    target = Path(path).absolute()
    part = target.parent / f".{target.name}.{os.getpid()}.part"
    count = time = 0
    size = None
    try:
        try:
            with open(part, "wb") as file:
                for request in requests:
                    count += 1
                    if problem := problem_of(request, time):
                        raise InvalidTrace(path, count, *problem)
                    size = size or request.block_size
                    if request.block_size != size:
                        told = f"got {request.block_size}: expected {size}, as before"
                        raise InvalidTrace(path, count, "block_size", told)
                    time = request.timestamp
                    fields = request._asdict()
                    if request.block_size == BLOCK:
                        del fields["block_size"]
                    file.write(json.dumps(fields).encode() + b"\n")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidTrace(path, None, None, f"cannot be written: {error.strerror}") from None
    return count
