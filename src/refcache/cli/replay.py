"""``refcache replay``: a request trace through the reference's serving loop."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from refcache.cli.console import progress, refuse_without_effect
from refcache.errors import InvalidArgument
from refcache.readers import RequestTrace, read_requests
from refcache.replay.workload import PrefixBound, prefix_bound

if TYPE_CHECKING:
    from refcache.replay.config import ReplayConfig

FormatOption = Annotated[
    str | None, typer.Option("--format", help="The trace's form, instead of recognising it.")
]
BlockSizeOption = Annotated[
    int | None, typer.Option(help="Tokens a block id stands for, instead of the form's own.")
]
TokenizerOption = Annotated[
    str | None, typer.Option(help="For text: a tokenizer.json or a name; else bytes are tokens.")
]
WRITE_POLICY = "write_through"
PREFILL_RATE, STEP_MS = 20_000, 20  # of an 8B model on a large card, roughly
TOKEN_BYTES = 32  # K, V, and an entry of the free list while it is copied; 8 bytes each


def replay(
    trace: Annotated[
        Path,
        typer.Argument(help="A request trace: Mooncake, Qwen-Bailian, Azure, BurstGPT, ShareGPT."),
    ],
    page_size: Annotated[int, typer.Option(help="Tokens a page.")] = 64,
    device_tokens: Annotated[
        str, typer.Option(metavar="N|unlimited", help="Size of the device pool in tokens.")
    ] = "3000000",
    policy: Annotated[
        str, typer.Option(help="Strategy: a name, ttl=S, retain=S, pin=N, or pkg.module:Class.")
    ] = "lru",
    target: Annotated[
        str | None, typer.Option(help="A tree cache of one's own, as refcache check takes it.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    serial: Annotated[bool, typer.Option("--serial", help="One request at a time.")] = False,
    no_decode: Annotated[bool, typer.Option("--no-decode", help="Prefills only.")] = False,
    check: Annotated[str, typer.Option(metavar="every|sampled|off", help="How much.")] = "sampled",
    host_ratio: Annotated[
        float | None, typer.Option(help="Host tokens / device tokens; without it, no host tier.")
    ] = None,
    write_policy: Annotated[
        str, typer.Option(help="With --host-ratio: when KV goes to the host.")
    ] = WRITE_POLICY,
    storage: Annotated[
        Path | None, typer.Option(help="A directory for pages below the host tier.")
    ] = None,
    restart: Annotated[
        int | None, typer.Option(help="After N requests device and host begin anew.")
    ] = None,
    arrivals: Annotated[
        bool, typer.Option("--arrivals", help="Requests come at their times; idle gaps count.")
    ] = False,
    prefill_rate: Annotated[
        float, typer.Option(help="With --arrivals: tokens a second of prefills.")
    ] = PREFILL_RATE,
    step_ms: Annotated[
        float, typer.Option(help="With --arrivals: a step's time beside.")
    ] = STEP_MS,
    model: Annotated[
        str, typer.Option(metavar="full|swa|mamba", help="Kind of the model's layers.")
    ] = "full",
    state_interval: Annotated[
        int, typer.Option(help="With --model mamba: a state each so many tokens of a decode.")
    ] = 512,
    states: Annotated[int, typer.Option(help="With --model mamba: how many there are.")] = 1024,
    window: Annotated[
        int, typer.Option(help="With --model swa: tokens a layer looks back.")
    ] = 1024,
    refresh: Annotated[
        str, typer.Option(metavar="path|used", help="Which states of a path a hit refreshes.")
    ] = "path",
    branching: Annotated[
        bool, typer.Option(help="A prefill leaves a state where its match asks for one.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    form: FormatOption = None,
    block_size: BlockSizeOption = None,
    tokenizer: TokenizerOption = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V,V", help="Replay once for each value; may be repeated."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw who has the device, and hits, over time; of a sweep its hit rates."
        ),
    ] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the steps as a file that Perfetto opens.")
    ] = None,
) -> int:
    """Serve a trace with the reference and check each step.

    Prints hits, evictions, tokens computed, checks made and the time.
    """
    if not arrivals and (prefill_rate, step_ms) != (PREFILL_RATE, STEP_MS):
        raise InvalidArgument("--prefill-rate, --step-ms: expected --arrivals beside them")
    if perfetto is not None and sweep:
        raise InvalidArgument("--perfetto with --sweep: expected one replay")
    from refcache.replay.config import ReplayConfig

    config = ReplayConfig(
        page_size=page_size,
        device_tokens=_capacity(device_tokens),
        policy=policy,
        serial=serial,
        no_decode=no_decode,
        check=check,
        host_ratio=host_ratio,
        write_policy=write_policy,
        storage=None if storage is None else str(storage),
        restart=restart,
        target=None if target == "refcache" else target,
        arrivals=arrivals,
        prefill_rate=prefill_rate,
        step_ms=step_ms,
        model=model,
        state_interval=state_interval,
        states=states,
        window=window,
        hit_refreshes=refresh,
        branching=branching,
    )
    axes = {axis.partition("=")[0] for axis in sweep or ()}
    if host_ratio is None and "host-ratio" not in axes:
        to_host = {"--write-policy": write_policy != WRITE_POLICY or "write-policy" in axes}
        refuse_without_effect(to_host, "nothing is written without --host-ratio")
    read = read_requests(
        trace, format=form, block_size=block_size, limit=limit, tokenizer=tokenizer
    )
    if plot is not None:
        from refcache.replay.sweep import check_figure

        check_figure(plot)
    if perfetto is not None:
        _check_perfetto(perfetto)
    if restart is not None and (plot is not None or perfetto is not None):
        raise InvalidArgument(
            "--restart: expected no --plot and no --perfetto, which show one life"
        )
    if sweep:
        from refcache.replay.sweep import grid

        points = grid(config, sweep)
    else:
        points = [config]
        requests = list(read.requests)
        bound = prefix_bound(requests)
    for point in points:
        _fits(point)
    import torch

    torch.set_num_threads(1)  # a step is many small tensors: threads would wait more than work
    if sweep:
        from refcache.cli.sweep import sweep as run_sweep

        return run_sweep(read, points, plot, as_json)
    from refcache.oracle import Violation
    from refcache.replay.loop import replay as run

    history: list[Any] | None = None if plot is None and perfetto is None else []
    bar = progress()
    task = bar.add_task("requests", total=len(requests))
    try:
        with bar:
            result = run(
                requests, config, lambda done, total: bar.update(task, completed=done), history
            )
    except Violation as violation:
        if as_json:
            found = {"rule": violation.id, "evidence": violation.evidence, "at": violation.call}
            print(json.dumps({"verdict": "violation", "violation": found}, indent=2))
        else:
            print(violation)
        return 1
    _draw(history, plot, perfetto, arrivals)
    if as_json:
        blocks = {**bound._asdict(), "computed_from": "ids"}
        told = {"format": read.format, "block_size": read.block_size, "notes": read.notes}
        answer = {"verdict": "ok", **asdict(result), "bound": blocks, "trace": told}
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join([*trace_lines(read), *_lines(result, bound)]))
    return 0


def _check_perfetto(path: Path) -> None:
    if path.suffix != ".json" or path.is_dir() or not path.parent.is_dir():
        raise InvalidArgument(f"--perfetto {path}: expected a name that ends in .json, in a folder")


def _draw(history: Any, plot_to: Path | None, perfetto: Path | None, timed: bool) -> None:
    """The figure and the file of one replay."""
    if plot_to is not None:
        from refcache.replay.history import plot

        plot(history, plot_to, timed)
    if perfetto is not None:
        from refcache.picture import write_trace_events
        from refcache.replay.history import trace_events

        write_trace_events(trace_events(history, timed), perfetto)


def trace_lines(read: RequestTrace) -> Iterator[str]:
    """What was read, and what the file could not tell."""
    yield f"trace      {read.format}, blocks of {read.block_size}"
    for note in read.notes:
        yield f"           {note}"


def _most() -> int:
    """Tokens that this machine's memory can hold."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // TOKEN_BYTES
    return min(most, 2**31 - 1)  # a slot is 32 bits wide in req_to_token


def _fits(config: "ReplayConfig") -> None:
    """Refuses tiers that this machine's memory cannot hold."""
    device, most = config.device_tokens or 0, _most()
    if device > most:
        raise InvalidArgument(f"device_tokens={device}: expected at most {most} (memory)")
    if config.host_ratio is not None and device * config.host_ratio > most:
        raise InvalidArgument(
            f"host_ratio={config.host_ratio}: expected a host tier of at most {most} tokens "
            "(this machine's memory)"
        )


def _capacity(text: str) -> int | None:
    if text == "unlimited":
        return None
    most = _most()
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise InvalidArgument(
            f"--device-tokens {text}: expected 1 to {most} (this machine's memory), or unlimited"
        )
    return int(text)


def _lines(result: Any, bound: PrefixBound) -> Iterator[str]:
    share = 100 * result.hit_tokens / result.prompt_tokens
    yield f"requests   {result.requests:,} in {result.steps:,} steps"
    yield f"prompts    {result.prompt_tokens:,} tokens"
    yield f"hits       {result.hit_tokens:,} tokens ({share:.2f} %)"
    yield f"bound      {bound}, computed from the ids"
    if result.bytes_to_host or result.bytes_to_device:
        device = result.hit_tokens - result.host_hit_tokens
        yield f"           {device:,} on the device, {result.host_hit_tokens:,} on the host"
        to_host, to_device = result.bytes_to_host, result.bytes_to_device
        yield f"moved      {to_host:,} bytes to the host, {to_device:,} bytes to the device"
    if result.bytes_to_storage or result.storage_hit_tokens:
        came, written = result.storage_hit_tokens, result.bytes_to_storage
        yield f"storage    {came:,} tokens brought from there, {written:,} bytes written"
    if result.hits_before or result.hits_after:
        before, after = result.hits_before, result.hits_after
        yield f"restart    {before:,} tokens of hits before, {after:,} after"
    yield f"evicted    {result.evicted_tokens:,} tokens"
    yield f"computed   {result.computed_tokens:,} tokens in prefills"
    yield f"decoded    {result.output_tokens:,} tokens"
    yield f"retracted  {result.retractions:,} times"
    rows = f"{result.rows_checked:,} KV rows compared"
    if not result.kv_kept:
        rows = "no KV bytes are kept without a bound on the device, so no row was compared"
    rules = f"every rule {result.states_checked:,} times"
    if not result.states_checked:
        rules = "sums after each step (no nodes are shown)" if result.rows_checked else "no rule"
    yield f"checks     {rows}; {rules}; no violation"
    if result.trace_seconds:
        yield f"arrivals   {result.trace_seconds:,.0f} s of the trace's time"
    yield f"time       {result.seconds:.1f} s"
