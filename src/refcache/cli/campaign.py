"""``refcache campaign``: hunt with seed after seed, over processes."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table


def campaign(
    target: Annotated[str, typer.Argument(help="As for `refcache check`.")] = "refcache",
    minutes: Annotated[float, typer.Option(min=0, help="No run is started later.")] = 10,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes.")] = 1,
    suite: Annotated[
        list[str] | None, typer.Option(help="As for `refcache check`; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    max_examples: Annotated[int, typer.Option(min=1, help="Cases a run.")] = 25,
    max_runs: Annotated[int | None, typer.Option(min=0, help="Start at most so many.")] = None,
    folder: Annotated[
        Path, typer.Option("--dir", help="Where it lives; the same call goes on with it.")
    ] = Path("campaign"),
) -> int:
    """Run suites on a target with seed after seed; goes on where it was stopped.

    Failures are told apart by rule and minimal steps; each leaves a folder.
    """
    from refcache.testing.campaign import (
        open_campaign,
        plan_for,
        refuse_what_is_no_campaign,
        run_campaign,
    )

    sys.path.insert(0, os.getcwd())
    refuse_what_is_no_campaign(folder)
    plan = plan_for(target, suite, first_seed=seed, max_examples=max_examples)
    state = open_campaign(folder, plan)
    console = Console(stderr=True)
    before = len(state.runs)
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        try:
            for _ in run_campaign(state, minutes=minutes, workers=workers, max_runs=max_runs):
                if console.is_terminal:
                    live.update(_table(state))
        except KeyboardInterrupt:
            live.stop()
            print("stopped; the same call goes on", file=sys.stderr)
    runs, steps = len(state.runs), sum(run.steps for run in state.runs)
    print(f"{folder}: {runs:,} runs ({runs - before:,} new), {steps:,} steps")
    for name, shown in sorted(state.failures.items()):
        print(f"violation {name}: {len(shown)} runs, first {shown[0].suite} seed {shown[0].seed}")
    unknown = [run for run in state.runs if run.verdict == "unknown"]
    for run in unknown[:5]:
        reason = run.reason.strip().splitlines()
        print(f"unknown {run.suite} seed {run.seed}: {reason[-1] if reason else ''}")
    if state.failures:
        return 1
    return 3 if unknown or not state.runs else 0


def _table(state: object) -> Table:
    """The live display: a row a suite."""
    from refcache.testing.campaign import Campaign

    assert isinstance(state, Campaign)
    table = Table("suite", "runs", "cases", "steps", "violations", "unknown")
    for name in state.plan.suites:
        runs = [run for run in state.runs if run.suite == name]
        numbers = (
            len(runs),
            sum(run.cases for run in runs),
            sum(run.steps for run in runs),
            len({run.failure for run in runs if run.failure}),
            sum(run.verdict == "unknown" for run in runs),
        )
        table.add_row(name, *(f"{number:,}" for number in numbers))
    return table
