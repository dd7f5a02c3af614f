"""``refcache convert``: a request trace of any known form, written in ours."""

from pathlib import Path
from typing import Annotated

import typer

from refcache.cli.replay import BlockSizeOption, FormatOption, TokenizerOption, trace_lines
from refcache.errors import InvalidArgument
from refcache.readers import read_requests, write_requests


def convert(
    trace: Annotated[Path, typer.Argument(help="A request trace of any known form.")],
    out: Annotated[Path, typer.Argument(help="The file to write, one JSON object a line.")],
    form: FormatOption = None,
    block_size: BlockSizeOption = None,
    tokenizer: TokenizerOption = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
) -> int:
    """Write a request trace in the form of `refcache workload`, and say what was not known."""
    if out.resolve() == trace.resolve():
        raise InvalidArgument(f"{out}: expected another file than the trace itself")
    read = read_requests(
        trace, format=form, block_size=block_size, limit=limit, tokenizer=tokenizer
    )
    count = write_requests(out, read.requests)
    print("\n".join(trace_lines(read)))
    print(f"{out}: {count:,} requests")
    return 0
