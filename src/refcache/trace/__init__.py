"""Traces: record what a live cache does, judge it later, shrink what is wrong.

:func:`record` wraps an object of an engine; :func:`judge_trace` replays the file against the rules
and names the first record that no legal cache could have produced; :func:`shrink_trace` finds the
smallest part of it that still shows it. :func:`judge_events` does the first for a stream of KV
events, and :func:`judge_file` tells the two apart. :func:`validate` looks whether a file of another
program keeps the schema, and :func:`compare_traces` where two traces of one workload differ.
"""

from refcache.trace.events.shrink import shrink_events
from refcache.trace.events.stream import judge_events
from refcache.trace.exchange.compare import Comparison, compare_traces
from refcache.trace.exchange.schema import SchemaVerdict, validate
from refcache.trace.file import is_recorded
from refcache.trace.judge import judge_file, judge_lines, judge_trace
from refcache.trace.names import Named
from refcache.trace.record import Recorder, record
from refcache.trace.shrink import shrink_lines, shrink_trace
from refcache.trace.verdict import TraceVerdict

__all__ = [
    "Comparison",
    "Named",
    "Recorder",
    "SchemaVerdict",
    "TraceVerdict",
    "compare_traces",
    "is_recorded",
    "judge_events",
    "judge_file",
    "judge_lines",
    "judge_trace",
    "record",
    "shrink_events",
    "shrink_lines",
    "shrink_trace",
    "validate",
]
