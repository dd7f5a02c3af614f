"""``refcache judge``: could a legal cache have produced this trace? And ``refcache shrink``: the
smallest part of one that could not."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from refcache.errors import InvalidArgument

EXIT = {"ok": 0, "violation": 1, "unknown": 3}


def judge(
    trace: Annotated[
        Path | None, typer.Argument(help="A recorded trace, or a stream of KV events; packed too.")
    ] = None,
    other: Annotated[
        Path | None, typer.Argument(help="A second trace of the same workload, to compare.")
    ] = None,
    schema: Annotated[
        bool, typer.Option(help="Does it keep the schema? Without a trace: print the schema.")
    ] = False,
    form: Annotated[
        str | None, typer.Option("--format", help="The form of the events, if not recognised.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Whose liberties the events may take, if not recognised.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> int:
    """Judge a recorded trace, or a stream of KV events; compare two traces; check the schema.

    Names the first record that no legal cache could have produced, and why. A damaged file is
    judged up to the damage. Of two traces it names the first record in which they differ.
    """
    from refcache.trace import compare_traces, judge_file, validate
    from refcache.trace.exchange.schema import json_schema

    if (other is not None or schema) and (form is not None or engine is not None):
        raise InvalidArgument("--format and --engine: expected one stream of events")
    if other is not None and schema:
        raise InvalidArgument("--schema: expected one trace")
    if trace is None:
        if not schema:
            raise InvalidArgument("judge: expected a trace")
        print(json.dumps(json_schema(), indent=1))
        return 0
    if schema:
        kept = validate(trace)
        print(json.dumps(asdict(kept), indent=2) if as_json else kept)
        return int(kept.error is not None)
    if other is not None:
        compared = compare_traces(trace, other)
        print(json.dumps(asdict(compared), indent=2) if as_json else compared)
        return EXIT[compared.verdict]
    verdict = judge_file(trace, format=form, engine=engine)
    print(json.dumps(asdict(verdict), indent=2) if as_json else verdict)
    return EXIT[verdict.verdict]


def shrink(
    trace: Annotated[
        Path, typer.Argument(help="A trace or stream that `refcache judge` finds wrong.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where to write it; TRACE with .small before its ending.")
    ] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="The form of KV events, if not recognised.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Whose liberties the events may take, if not recognised.")
    ] = None,
) -> int:
    """Write the smallest part of a failing trace that still shows the violation."""
    from refcache.trace import is_recorded, shrink_events, shrink_trace

    ending = ".jsonl.zst" if trace.name.endswith(".zst") else ".jsonl"
    small = out or Path(str(trace).removesuffix(ending) + ".small" + ending)
    if small.resolve() == trace.resolve():
        raise InvalidArgument(f"--out {small}: expected another file than the trace itself")
    if form is None and engine is None and is_recorded(trace):
        verdict, count = shrink_trace(trace, small)
    else:
        verdict, count = shrink_events(trace, small, format=form, engine=engine)
    print(f"{small}: {count} records")
    print(verdict)
    return 0
