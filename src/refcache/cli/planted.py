"""``refcache planted``: the bugs that the suites must catch."""

from typing import Annotated, Any

import typer

from refcache.cli.workers import Hunt, in_order


def planted(
    run: Annotated[bool, typer.Option("--run", help="Plant each and say what caught it.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the suites.")] = 0,
) -> int:
    """List the planted bugs: name, suite, the report it models, what goes wrong.

    With --run, ends with "N of N caught"; the exit code is 1 when one survives.
    """
    from refcache.oracle.planted import all_bugs

    bugs = all_bugs()
    if not run:
        width = max(len(bug.name) for bug in bugs)
        for bug in bugs:
            print(f"{bug.name:<{width}}  {bug.suite:<15}  {bug.report}: {bug.summary}")
        return 0
    counts = 0
    for caught in in_order([Hunt(bug.name, seed) for bug in bugs]):
        print(caught_line(caught), flush=True)
        counts += caught.counts
    print(f"{counts} of {len(bugs)} caught")
    return 0 if counts == len(bugs) else 1


def caught_line(caught: Any) -> str:
    """One line about a planted bug: what caught it, or why it does not count."""
    line = f"{caught.bug:<34} "
    if caught.counts:
        return f"{line}caught by {caught.by} ({caught.suite}, case {caught.cases})"
    if not caught.smoke:
        return f"{line}DOES NOT COUNT: the smoke test sees it"
    if not caught.used:
        return f"{line}DOES NOT COUNT: {caught.suite} never executed it"
    if caught.by:
        return f"{line}DOES NOT COUNT: only an exception shows it ({caught.by})"
    return f"{line}SURVIVED {caught.cases} cases of {caught.suite}"
