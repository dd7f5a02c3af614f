"""``refcache workload``: write a synthetic request trace."""

from pathlib import Path
from typing import Annotated

import typer

from refcache.readers import write_requests
from refcache.replay.workload import prefix_bound, synthesize


def workload(
    path: Annotated[Path, typer.Argument(help="The file to write, one JSON object a line.")],
    requests: Annotated[int, typer.Option(help="Requests to write.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed writes the same trace.")] = 0,
    system_prompts: Annotated[int, typer.Option(help="Different system prompts.")] = 4,
    system_tokens: Annotated[int, typer.Option(help="Tokens of each system prompt.")] = 2000,
    turns: Annotated[int, typer.Option(help="Turns of a conversation, on average.")] = 5,
    turn_tokens: Annotated[int, typer.Option(help="Tokens a user adds a turn, on average.")] = 400,
    output_tokens: Annotated[int, typer.Option(help="Tokens of an answer, on average.")] = 100,
) -> int:
    """Write a synthetic trace in Mooncake's format.

    Multi-turn conversations over shared system prompts, drawn from a seed.
    """
    trace = list(
        synthesize(
            requests,
            seed=seed,
            system_prompts=system_prompts,
            system_tokens=system_tokens,
            turns=turns,
            turn_tokens=turn_tokens,
            output_tokens=output_tokens,
        )
    )
    write_requests(path, trace)
    tokens = sum(request.input_length for request in trace)
    print(f"{path}: {len(trace):,} requests, {tokens:,} input tokens")
    print(f"prefix hits of an unlimited cache: {prefix_bound(trace)}, computed from the ids")
    return 0
