"""``refcache check``: judge a target with the suites, and the suites with the planted bugs."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from refcache.cli import report as reports
from refcache.cli.console import prints_on_stderr, refuse_without_effect
from refcache.cli.planted import caught_line, huntable
from refcache.cli.workers import Hunt, Run, in_order
from refcache.errors import InvalidArgument


def check(
    target: Annotated[
        str,
        typer.Argument(
            help="refcache, naive, sglang[:VERSION], pkg.module:factory, or (one op) "
            "pkg.module:function; the current folder counts."
        ),
    ] = "refcache",
    suite: Annotated[
        list[str] | None,
        typer.Option(help="Only this part (tree), kind (state) or suite (tree.state); repeatable."),
    ] = None,
    max_examples: Annotated[int | None, typer.Option(min=1, help="Cases a suite tries.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed tries the same cases.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
    planted: Annotated[
        str | None, typer.Option(help="Switch one planted bug on: what a failure looks like.")
    ] = None,
    no_planted: Annotated[
        bool, typer.Option("--no-planted", help="Only the suites; leave the planted bugs out.")
    ] = False,
    without_edge: Annotated[
        str | None,
        typer.Option(help="Take one ordering edge away: it must be reported. 'list' names them."),
    ] = None,
    xfails: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Violations that are expected, one a line.")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Exact suites also where they are not declared.")
    ] = False,
    profile: Annotated[
        str | None, typer.Option(help="Whose choices they expect (sglang-0.5.10); as --exact.")
    ] = None,
    write_policy: Annotated[
        str | None, typer.Option(help="The only one that two-tier suites (hicache) draw.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the verdict and a folder a violation here.")
    ] = None,
) -> int:
    """Run the suites on a target, then a planted bug on each of them.

    One line a suite: cases, steps, verdict. A failure is the smallest program that shows it.
    """
    sys.path.insert(0, os.getcwd())
    if without_edge is not None:
        others = {
            "--suite": suite,
            "--max-examples": max_examples,
            "--seed": seed,
            "--json": as_json,
            "--planted": planted,
            "--no-planted": no_planted,
            "--xfails": xfails,
            "--exact": exact,
            "--profile": profile,
            "--write-policy": write_policy,
            "--report": report,
        }
        refuse_without_effect(others, "--without-edge runs one program of its own")
        return _without_edge(target, without_edge)
    from refcache.oracle.target.config import DEFAULT_PROFILE, check_profile
    from refcache.oracle.target.resolve import resolve
    from refcache.planted import all_bugs, find
    from refcache.testing.registry import EXACT, SUITES, draws_write_policies, list_suites
    from refcache.testing.xfails import Xfails, read_xfails
    from refcache.types import check_write_policy

    expected = Xfails() if xfails is None else read_xfails(xfails)
    choices = {"--exact": exact, "--profile": profile}
    profile = profile or (DEFAULT_PROFILE if exact else None)
    if profile is not None:
        check_profile(profile)
    if report is not None:
        reports.refuse_unless_new(report)
    bug = None if planted is None else find(planted)
    if bug is not None:
        if target not in ("refcache", bug.target):
            raise InvalidArgument(f"--planted with {target}: it is {bug.target} that is patched")
        target = bug.target
    wanted: list[str | None] = [*(suite or ([bug.suite] if bug else []))]
    names = list(dict.fromkeys(name for part in wanted or [None] for name in list_suites(part)))
    if write_policy is not None:
        check_write_policy(write_policy)
        if not any(draws_write_policies(name) for name in names):
            raise InvalidArgument(
                f"--write-policy with {', '.join(names)}: expected a suite of two tiers (hicache)"
            )
    if bug is not None:
        refuse_without_effect({"--no-planted": no_planted}, "--planted hunts no other bug")
    if not any(name in SUITES and SUITES[name].extra >= EXACT for name in names):
        refuse_without_effect(choices, f"{', '.join(names)}: choices are not compared")
    if not any(name in SUITES for name in names) and (bug or no_planted):
        refuse_without_effect({"--seed": seed}, f"{', '.join(names)}: nothing is drawn")
    with prints_on_stderr():
        resolve(target)
    from refcache.testing.run import HUNT_EXAMPLES, MAX_EXAMPLES

    say = _silent if as_json else _print

    cases = max_examples or (MAX_EXAMPLES if bug is None else HUNT_EXAMPLES)
    runs = [Run(name, target, cases, seed, planted, profile, write_policy) for name in names]
    hunts = bug is None and not no_planted
    bugs = [b for b in huntable(all_bugs()) if b.suite in names] if hunts else []
    prey = [mine[seed % len(mine)] for mine in _by_suite(bugs).values()]
    answers = in_order([*runs, *(Hunt(name, seed) for name in prey)])
    results = []
    for result in islice(answers, len(runs)):
        results.append(expected.apply(result))
        say(*_lines(results[-1]))
    for unmatched in expected.unmatched(r.suite for r in results if r.verdict != "skipped"):
        print(f"refcache: warning: xfail {unmatched} matches nothing that ran", file=sys.stderr)
    rules = [result.failure.rule for result in results if result.failure]
    caught_by = {} if bug is None else {bug.name: rules[0] if rules else None}
    survivors = 0
    for caught in answers:
        say(caught_line(caught))
        caught_by[caught.bug] = caught.by or None
        survivors += not caught.counts
    if hunts:
        caught_all = f"{len(prey) - survivors} of {len(prey)} planted bugs caught"
        say(f"{caught_all}: one a suite, chosen by the seed; `refcache planted --run` plants all")

    verdict = {
        "suites": [reports.as_dict(result) for result in results],
        "planted": [{"name": name, "caught_by": rule} for name, rule in caught_by.items()],
    }
    if report is not None:
        with prints_on_stderr():
            reports.write(report, verdict, results)
    if as_json:
        print(json.dumps(verdict, indent=2))
    verdicts = {result.verdict for result in results}
    if "violation" in verdicts or survivors:
        return 1
    return 0 if "unknown" not in verdicts and verdicts & {"ok", "xfail", "xpass"} else 3


def _by_suite(bugs: Sequence[Any]) -> dict[str, list[str]]:
    """Names of bugs, for each suite that must catch some."""
    found: dict[str, list[str]] = {}
    for bug in bugs:
        found.setdefault(bug.suite, []).append(bug.name)
    return found


def _print(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def _silent(*lines: str) -> None: ...


def _lines(result: Any) -> Iterator[str]:
    line = f"{result.suite:<20} {result.cases:>6,} cases {result.steps:>8,} steps  {result.verdict}"
    if result.faults:
        line += (
            f", {result.faults:,} pairs of call and failed inner step ({result.pairs:,} different)"
        )
    reason = result.reason.splitlines()
    yield f"{line}: {reason[-1]}" if reason else line
    if result.verdict == "violation":
        yield f"\n{result.failure.text}\n"


def _without_edge(target: str, name: str) -> int:
    """Run the program of one ordering edge without it; 1 when it is reported, 3 when not."""
    from refcache.oracle.drivers.streams.edges import EDGES, edge
    from refcache.oracle.target.resolve import resolve

    if name == "list":
        _print(*EDGES)
        return 0
    edge(name)
    with prints_on_stderr():
        subject = resolve(target)
        from refcache.oracle import StreamsDriver, Violation
        from refcache.testing.run import explain

        driver = StreamsDriver(subject, without_edge=name)
        try:
            driver.every_order(name)
            text = ""
        except Violation as violation:
            text = explain(violation, driver).text
    if text:
        _print(text)
        return 1
    _print(f"without the edge {name}, no order of its program was reported")
    return 3
