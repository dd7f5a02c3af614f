"""``refcache planted``: the bugs that the suites must catch."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from refcache.cli.workers import Hunt, in_order
from refcache.errors import InvalidArgument


def planted(
    run: Annotated[bool, typer.Option("--run", help="Plant each and say what caught it.")] = False,
    only_one: Annotated[
        bool, typer.Option("--only-one", help="With --run: is there another check? Twice the time.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the suites.")] = 0,
) -> int:
    """List the planted bugs: name, suite, the report it models, what goes wrong.

    With --run, prints the check that catches each, the steps it took and the time, and ends with
    "N of N caught"; the exit code is 1 when one survives. --only-one hunts each a second time with
    that check switched off: a bug that survives is caught by this one check only.
    """
    from refcache.oracle.planted import all_bugs

    bugs: Sequence[Any] = all_bugs()
    if only_one and not run:
        raise InvalidArgument("--only-one: expected --run too")
    if not run:
        width = max(len(bug.name) for bug in bugs)
        for bug in bugs:
            print(f"{bug.name:<{width}}  {bug.suite:<15}  {bug.report}: {bug.summary}")
        return 0
    bugs = huntable(bugs)
    counts = alone = 0
    for caught in in_order([Hunt(bug.name, seed, only_one) for bug in bugs]):
        print(caught_line(caught), flush=True)
        counts += caught.counts
        alone += caught.counts and caught.other == ""
    if only_one:
        print(f"{alone} of them by one check only")
    print(f"{counts} of {len(bugs)} caught")
    return 0 if counts == len(bugs) else 1


def huntable(bugs: Sequence[Any]) -> list[Any]:
    """The bugs that can be hunted here; says how many cannot."""
    from refcache.testing.run import lacking

    left_out = [bug for bug in bugs if lacking(bug)]
    if left_out:
        print(f"refcache: {len(left_out)} planted bugs of kernels need Triton", file=sys.stderr)
    return [bug for bug in bugs if bug not in left_out]


def caught_line(caught: Any) -> str:
    """One line about a planted bug: what caught it, or why it does not count."""
    line = f"{caught.bug:<34} "
    if caught.counts:
        others = {None: "", "": "; no other check"}.get(caught.other, f"; else {caught.other}")
        needed = f"case {caught.cases}, {caught.steps} steps, {caught.seconds:.1f} s"
        return f"{line}caught by {caught.by} ({caught.suite}, {needed}){others}"
    if not caught.smoke:
        return f"{line}DOES NOT COUNT: the smoke test sees it"
    if not caught.used:
        return f"{line}DOES NOT COUNT: {caught.suite} never executed it"
    if caught.by:
        return f"{line}DOES NOT COUNT: only an exception shows it ({caught.by})"
    return f"{line}SURVIVED {caught.cases} cases of {caught.suite}"
