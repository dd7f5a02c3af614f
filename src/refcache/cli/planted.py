"""``refcache planted``: the bugs that the suites must catch. ``refcache misuse``: calls that break
the contract, and what comes of them."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from refcache.cli.console import refuse_without_effect
from refcache.cli.workers import Hunt, in_order
from refcache.errors import InvalidArgument


def planted(
    run: Annotated[bool, typer.Option("--run", help="Plant each and say what caught it.")] = False,
    only_one: Annotated[
        bool, typer.Option("--only-one", help="With --run: is there another check? Twice the time.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the suites.")] = 0,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="With --run: so many seeds, each at the size of a check."),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="Only the bugs of this part, kind or suite; repeatable."),
    ] = None,
) -> int:
    """List the planted bugs: name, suite, the report it models, what goes wrong.

    With --run, prints the check that catches each, the steps it took and the time, and ends with
    "N of N caught"; the exit code is 1 when one survives. --only-one hunts each a second time with
    that check switched off: a bug that survives is caught by this one check only.
    """
    from refcache.planted import all_bugs
    from refcache.testing import list_suites

    bugs: Sequence[Any] = all_bugs()
    if suite:
        chosen = {name for part in suite for name in list_suites(part)}
        bugs = [bug for bug in bugs if bug.suite in chosen]
    if only_one and not run:
        raise InvalidArgument("--only-one: expected --run too")
    if seeds is not None and (only_one or not run):
        raise InvalidArgument("--seeds: expected --run too, and no --only-one")
    if not run:
        refuse_without_effect({"--seed": seed}, "nothing is drawn without --run")
        width = max(len(bug.name) for bug in bugs)
        for bug in bugs:
            print(f"{bug.name:<{width}}  {bug.suite:<15}  {bug.report}: {bug.summary}")
        return 0
    bugs = huntable(bugs)
    if seeds is not None:
        return _over_seeds(bugs, range(seed, seed + seeds))
    counts = alone = 0
    for caught in in_order([Hunt(bug.name, seed, only_one) for bug in bugs]):
        print(caught_line(caught), flush=True)
        counts += caught.counts
        alone += caught.counts and caught.other == ""
    if only_one:
        print(f"{alone} of them by one check only")
    print(f"{counts} of {len(bugs)} caught")
    return 0 if counts == len(bugs) else 1


def _over_seeds(bugs: Sequence[Any], seeds: range) -> int:
    """A line a bug: what caught it at each seed, in how many steps; "-" where nothing did."""
    from refcache.testing.run import MAX_EXAMPLES

    hunts = [Hunt(bug.name, seed, max_examples=MAX_EXAMPLES) for bug in bugs for seed in seeds]
    caught = in_order(hunts)
    print(f"{'':<34} " + "".join(f"{f'seed {seed}':<16}" for seed in seeds), flush=True)
    everywhere = 0
    for bug in bugs:
        found = [next(caught) for _ in seeds]
        cells = [f"{one.by}, {one.steps:,}" if one.counts else "-" for one in found]
        print(f"{bug.name:<34} " + "".join(f"{cell:<16}" for cell in cells), flush=True)
        everywhere += all(one.counts for one in found)
    print(f"{everywhere} of {len(bugs)} caught at each of {len(seeds)} seeds")
    return 0 if everywhere == len(bugs) else 1


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


def misuse(
    target: Annotated[str, typer.Argument(help="Named as for `refcache check`.")] = "refcache",
    explain: Annotated[
        bool, typer.Option(help="The program of each kind that is not refused.")
    ] = False,
) -> int:
    """Try each kind of misuse alone; going on shows what it did.

    One line a kind: refused, ignored, accepted (with the damage) or crash. The exit code is 1 when
    one was accepted or crashed, or ignored by a target that declares refuses_misuse.
    """
    from refcache.oracle import Violation, resolve
    from refcache.oracle.drivers.kinds import misuse_by_kind

    found = resolve(target)
    bad = {"accepted", "crash"}
    if "refuses_misuse" in found.capabilities:
        bad.add("ignored")
    code = 0
    try:
        outcomes = misuse_by_kind(found)
    except Violation as violation:
        print(f"no misuse was tried, for a legal call went wrong\n{violation}")
        return 1
    for one in outcomes:
        print(f"{one.kind:<20} {one.outcome:<9} {one.evidence}")
        if explain and one.outcome != "refused":
            print("".join(f"    {line}\n" for line in one.steps), end="")
        code = max(code, int(one.outcome in bad))
    return code
