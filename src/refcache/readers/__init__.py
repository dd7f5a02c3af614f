"""Files that people bring: request traces and streams of KV events, in the field's own forms.

A reader turns a file into our values and says what the file could not tell. Which reader serves a
file follows from its content; a name insists. Files may be compressed (gzip, zstandard), which also
follows from the content.

* :func:`read_requests`: a request trace to replay, :func:`write_requests` one of our own;
* :func:`read_events`: a stream of KV events, batch by batch.

Whatever cannot be read is one :class:`~refcache.errors.InvalidTrace` that names file, line and
field. Memory is bounded by the longest line allowed, whatever the file holds.
"""

from refcache.readers.events import EVENT_FORMATS, BlockEvent, EventBatch, read_events
from refcache.readers.requests import REQUEST_FORMATS, RequestTrace, read_requests
from refcache.readers.trace_request import BLOCK, TraceRequest, write_requests

__all__ = [
    "BLOCK",
    "EVENT_FORMATS",
    "REQUEST_FORMATS",
    "BlockEvent",
    "EventBatch",
    "RequestTrace",
    "TraceRequest",
    "read_events",
    "read_requests",
    "write_requests",
]
