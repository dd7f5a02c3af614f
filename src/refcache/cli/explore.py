"""``refcache explore``: every small program, breadth first."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from refcache.cli.console import prints_on_stderr, refuse_without_effect, status
from refcache.errors import InvalidArgument, UnknownName


def explore(
    target: Annotated[str, typer.Argument(help="As for `refcache check`.")] = "refcache",
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this part (tree) or scope (tree.lru); repeatable. 'list' names them."
        ),
    ] = None,
    programs: Annotated[
        int, typer.Option(min=0, help="Programs a scope may cost; 0: until it is complete.")
    ] = 20_000,
    depth: Annotated[int | None, typer.Option(min=1, help="Steps of a program, at most.")] = None,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes.")] = 1,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Keep the searches here; the same call goes on with them."),
    ] = None,
    planted: Annotated[
        str | None, typer.Option(help="Switch one planted bug on: what a failure looks like.")
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Leave a rule unchecked, to see what it hides; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> int:
    """Try every step from every state at a tiny size; states that differ in names are one.

    The first program that fails is the shortest that there is. Says what was explored: all, or how
    deep and how many states are left.
    """
    from refcache.oracle.rules.catalog import SENTENCES
    from refcache.oracle.target.resolve import resolve
    from refcache.planted import find

    sys.path.insert(0, os.getcwd())
    if scope == ["list"]:
        from refcache.oracle.explore import SCOPES

        others = {"--depth": depth, "--dir": folder, "--planted": planted, "--without": without}
        refuse_without_effect(others | {"--json": as_json}, "--scope list only names the scopes")
        for one in SCOPES.values():
            print(f"{one.name:<20} {one.says}")
        return 0
    if planted is not None:
        patched = find(planted).target
        if target not in ("refcache", patched):
            raise InvalidArgument(f"--planted with {target}: it is {patched} that is patched")
        target = patched
    for rule in without or ():
        if rule not in SENTENCES:
            raise UnknownName("rule", rule, SENTENCES)
    with prints_on_stderr():
        known = resolve(target)
    from refcache.oracle.explore import SCOPES, Limits, select
    from refcache.testing.exploration import Task, failure_of
    from refcache.testing.exploration import explore as explored

    wanted: list[str | None] = [*scope] if scope else [None]
    chosen = list(dict.fromkeys(one.name for part in wanted for one in select(part)))
    limits = Limits(programs or None, depth)
    verdicts: list[dict[str, Any]] = []
    for name in chosen:
        lacking = known.lacks(SCOPES[name].needs)
        if lacking:
            verdicts.append({"scope": name, "verdict": "skipped"})
            _say(as_json, f"{name:<20} skipped: the target lacks {', '.join(lacking)}")
            continue
        task = Task(name, target, planted, tuple(without or ()))
        journal = None if folder is None else folder / f"{name}.jsonl"
        with status(name) as shown, prints_on_stderr():
            for state in explored(task, limits=limits, workers=workers, journal=journal):
                shown.update(f"{name}: {state}")  # type: ignore[attr-defined]
            failure = None if state.failing is None else failure_of(task, state)
        verdict = "violation" if failure else "unknown" if state.parted else "ok"
        verdicts.append(
            {
                "scope": name,
                "verdict": verdict,
                "complete": state.complete,
                "states": len(state.states),
                "programs": state.programs,
                "left": state.left,
                "depth": state.depth,
                "says": str(state),
                "failure": failure and {"rule": failure.rule, "steps": failure.steps},
            }
        )
        _say(as_json, f"{name:<20} {verdict}: {state}")
        if failure:
            _say(as_json, f"\n{failure.text}\n")
    if as_json:
        print(json.dumps(verdicts, indent=2))
    seen = {one["verdict"] for one in verdicts}
    if "violation" in seen:
        return 1
    return 0 if "ok" in seen and "unknown" not in seen else 3


def _say(as_json: bool, text: str) -> None:
    if not as_json:
        print(text, flush=True)
