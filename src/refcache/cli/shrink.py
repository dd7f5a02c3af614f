"""``refcache shrink``: the smallest part of a failing trace."""

from pathlib import Path
from typing import Annotated

import typer

from refcache.errors import InvalidArgument


def shrink(
    trace: Annotated[Path, typer.Argument(help="A trace that `refcache judge` finds wrong.")],
    out: Annotated[
        Path | None, typer.Option(help="Where to write it; TRACE with .small before its ending.")
    ] = None,
) -> int:
    """Write the smallest part of a failing trace that still shows the violation."""
    from refcache.trace import shrink_trace

    ending = ".jsonl.zst" if trace.name.endswith(".zst") else ".jsonl"
    small = out or Path(str(trace).removesuffix(ending) + ".small" + ending)
    if small.resolve() == trace.resolve():
        raise InvalidArgument(f"--out {small}: expected another file than the trace itself")
    verdict, count = shrink_trace(trace, small)
    print(f"{small}: {count} records")
    print(verdict)
    return 0
