"""Streams of KV events: which blocks an engine said are cached where, batch by batch.

A file is JSON lines, or MessagePack values one after the other; what stands in it may be a batch,
an event, or either with a receive time around it (``recv_ts``, ``topic``, ``seq``, ``batch`` or
``payload``). Forms:

=========== ==================================================================================
kv-events   SGLang's and vLLM's: ``[ts, [event, ...], rank]`` or ``{"ts": ..., "events": [...]}``;
            an event is ``["BlockStored", ...]`` or ``{"type": "BlockStored", ...}``
dynamo      ``{"worker_id": ..., "event": {"event_id": ..., "data": {"stored": {...}}}}``
trtllm      TensorRT-LLM's: ``{"event_id": ..., "data": {"type": "stored", ...}}``
mooncake    RFC 1527's: ``{"event_id": ..., "event_type": "stored", "seq_hashes": [...]}``
=========== ==================================================================================
"""

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped,unused-ignore]

from refcache.errors import UnknownName
from refcache.readers.block_event import Bad, BlockEvent, EventBatch
from refcache.readers.event_forms import FORMS
from refcache.readers.source import MAX_LINE, Source, open_source, shown

__all__ = ["EVENT_FORMATS", "BlockEvent", "EventBatch", "read_events"]

EVENT_FORMATS = tuple(FORMS)
INSIDE = ("batch", "payload", "message", "msg", "value")
"""Fields of a capture that hold what was received."""
CHUNK = 2**16


def read_events(path: str | Path, format: str | None = None) -> Iterator[EventBatch]:
    """Yield the batches of a stream; an event alone is a batch of one.

    Args:
        path: the file; compressed or not.
        format: a name of ``EVENT_FORMATS``, instead of the form of the first value.

    Raises:
        InvalidTrace: the file cannot be read, or a value is not of the form; the batches before it
            were yielded. UnknownName: no such format.
    """
    if format is not None and format not in FORMS:
        raise UnknownName("format", format, FORMS)
    source = Source(path)
    for value in _values(source):
        seq, topic, inner = _unwrap(source, value)
        for item in _each(inner):
            name = format or _recognise(source, item)
            format = name
            try:
                yield FORMS[name].batch(item, source.line, seq, topic)
            except Bad as bad:
                raise source.refuse(bad.field, bad.problem) from None


def _values(source: Source) -> Iterator[Any]:
    """The JSON values of the lines, or the MessagePack values."""
    with open_source(source.path) as file:
        head = source.guarded(lambda: file.read(3))
    start = head.removeprefix(b"\xef\xbb\xbf")[:1]
    if start and start[0] >= 0x80:
        yield from _frames(source)
        return
    for raw in source.lines():
        yield source.json(raw)


def _frames(source: Source) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(
        raw=False, strict_map_key=False, max_buffer_size=MAX_LINE, unicode_errors="surrogateescape"
    )
    fed = whole = 0
    with open_source(source.path) as file:
        while chunk := source.guarded(lambda: file.read1(CHUNK)):
            fed += len(chunk)
            try:
                unpacker.feed(chunk)
                for value in unpacker:
                    source.line += 1
                    whole = unpacker.tell()
                    yield value
            except msgpack.BufferFull:
                source.line += 1
                raise source.refuse(None, f"longer than {MAX_LINE:,} bytes: no event?") from None
            except (ValueError, TypeError, msgpack.UnpackException) as error:
                source.line += 1
                raise source.refuse(None, f"not MessagePack ({shown(str(error))})") from None
    if whole < fed:
        source.line += 1
        raise source.refuse(None, "the file ends inside this value: truncated?")


def _unwrap(source: Source, value: Any) -> tuple[int | None, Any, Any]:
    """(number of the batch, topic, what was received)."""
    if not isinstance(value, dict):
        return None, None, value
    seq = value.get("seq")
    if seq is not None and (type(seq) is not int or seq < 0):
        raise source.refuse("seq", f"got {shown(seq)}: expected an integer of 0 or more")
    topic = value.get("topic")
    if "events" in value or "type" in value or "event_type" in value:
        return seq, None, value
    for field in INSIDE:
        inner = value.get(field)
        if isinstance(inner, str):
            try:
                inner = base64.b64decode(inner, validate=True)
            except binascii.Error:
                raise source.refuse(field, f"got {shown(inner)}: expected base64") from None
        if isinstance(inner, bytes):
            try:
                inner = msgpack.unpackb(inner, raw=False, strict_map_key=False)
            except (ValueError, TypeError, msgpack.UnpackException) as error:
                raise source.refuse(field, f"not MessagePack ({shown(str(error))})") from None
        if isinstance(inner, dict | list):
            return seq, topic, inner
    return seq, None, value


def _each(value: Any) -> Iterator[Any]:
    """A list of events is as many; a batch as an array starts with its time."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        yield from value
    else:
        yield value


def _recognise(source: Source, value: Any) -> str:
    for name, form in FORMS.items():
        if form.recognises(value):
            return name
    raise source.refuse(
        None,
        f"got {shown(value)}: expected the header of a recorded trace, an event, or a batch of "
        f"events ({', '.join(FORMS)})",
    )
