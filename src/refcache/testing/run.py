"""Runs suites on a target, and planted bugs against the suites: what ``refcache check`` calls.

Runs are exact repetitions: same target, seed and size, same cases, whatever else the process has
imported, run or set (another version of Hypothesis may draw others). A verdict is *ok*, *violation*
(a rule is broken, or a legal call raised), *skipped* (the target lacks a capability), or *unknown*
(the harness itself failed). A file of expected failures (:mod:`refcache.testing.xfails`) turns a
violation into *xfail*, and ok into *xpass*.
"""

import time
import traceback
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from refcache.errors import InvalidArgument, UnknownName
from refcache.oracle import Driver, Target, Violation, resolve
from refcache.oracle.explore import SCOPES, Limits, broken, explored
from refcache.oracle.program.shrink import shrink as shrunk
from refcache.oracle.rules.violation import without_rules
from refcache.oracle.target.config import check_profile
from refcache.planted import PlantedBug, active_bugs
from refcache.testing.draws import without_local_constants
from refcache.testing.machines.base import DriverMachine, Tally, machine_for
from refcache.testing.registry import (
    EXACT,
    EXPLORED,
    SUITES,
    Share,
    draws_write_policies,
    needs_of,
)
from refcache.types import check_write_policy

MAX_EXAMPLES = 100
HUNT_EXAMPLES = 1000
BATCH = 9
"""Cases of one run of Hypothesis, at most. In a run of ten and more it spends about half of the
early ones on the simplest ends of what it drew, and most of the later ones on near copies of them:
fresh draws find more."""


@dataclass(frozen=True)
class Failure:
    """A broken rule with the minimal program that shows it.

    Attributes:
        rule, sentence, evidence: which rule, what it says, what was seen instead.
        steps: the program, one line a step; it runs as it stands.
        text: all of it for people, with the state before and after the last step.
    """

    rule: str
    sentence: str
    evidence: str
    steps: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class SuiteResult:
    """One row of the verdict. ``failure`` is set for a violation or an xfail; ``reason`` says why
    the verdict is another one than ok or violation. Of a suite that explores ``cases`` counts
    states, ``steps`` programs, and ``reason`` says what was explored whole. ``faults``: how often a
    call was made with one of its inner steps raising; ``pairs``: at how many different (call, inner
    step)."""

    suite: str
    cases: int
    steps: int
    verdict: str
    failure: Failure | None = None
    reason: str = ""
    faults: int = 0
    pairs: int = 0


def run_suite(
    name: str,
    target: Target,
    *,
    max_examples: int = MAX_EXAMPLES,
    seed: int = 0,
    shrink: bool = True,
    profile: str | None = None,
    write_policy: str | None = None,
) -> SuiteResult:
    """Run one suite on a target.

    Args:
        max_examples: cases to draw, times the suite's share; each has up to as many steps as
            its machine says (``DriverMachine.steps``).
        seed: chooses the cases.
        shrink: look for the smallest failing program. It takes seconds.
        profile: whose choices an exact suite holds the target to, declared ``exact`` or not; by
            default a target that declares it is held to SGLang 0.5.10's.
        write_policy: the only one that a two-tier suite draws; the others have none.

    Raises:
        UnknownName: no suite, profile or write policy of that name.
        InvalidArgument: ``max_examples`` below 1.
    """
    if name not in SUITES and name not in EXPLORED:
        raise UnknownName("suite", name, {*SUITES, *EXPLORED})
    if max_examples < 1:
        raise InvalidArgument(f"max_examples={max_examples}: expected at least 1")
    if write_policy is not None:
        check_write_policy(write_policy)
    if name in EXPLORED:
        return _explore(EXPLORED[name], target, max_examples)
    suite = SUITES[name]
    needs, attributes = suite.needs, {}
    if write_policy is not None and draws_write_policies(name):
        attributes["write_policy"] = write_policy
    if profile is not None:
        check_profile(profile)
        if needs >= EXACT:
            needs, attributes = needs - EXACT, attributes | {"profile": profile}
    lacking = target.lacks(needs)
    if lacking:
        return SuiteResult(name, 0, 0, "skipped", reason=f"the target lacks {', '.join(lacking)}")
    tally = Tally()
    try:
        machine = machine_for(suite.machine, target, tally, **attributes)
        _open(machine)
        _run(machine, max(1, round(max_examples * suite.share)), seed)
    except Violation as violation:
        driver = tally.failed
        if driver is not None and shrink:
            driver = shrunk(driver)
        failure = explain(driver.found if driver and driver.found else violation, driver)
        return SuiteResult(name, tally.cases, tally.steps, "violation", failure)
    except KeyboardInterrupt:
        raise
    except BaseException:  # also what is no Exception must not end the process that judges
        reason = traceback.format_exc()
        if tally.not_offered and not tally.cases:  # Hypothesis found no configuration
            return SuiteResult(name, 0, 0, "skipped", reason=tally.not_offered)
        return SuiteResult(name, tally.cases, tally.steps, "unknown", reason=reason)
    met, pairs = tally.faults, len(tally.pairs)
    return SuiteResult(name, tally.cases, tally.steps, "ok", faults=met, pairs=pairs)


def _explore(share: Share, target: Target, max_examples: int) -> SuiteResult:
    """The scopes of a share, one after the other, each as far as its programs go."""
    lacking = target.lacks(share.needs)
    if lacking:
        reason = f"the target lacks {', '.join(lacking)}"
        return SuiteResult(share.name, 0, 0, "skipped", reason=reason)
    states = programs = whole = 0
    for name, most in share.programs.items():
        scope = SCOPES[name]
        try:
            found = explored(scope, target, Limits(max(1, most * max_examples // MAX_EXAMPLES)))
            states, programs = states + len(found.states), programs + found.programs
            if found.failing is not None:
                violation, driver = broken(scope, target, found.failing)
                failure = explain(violation, driver)
                return SuiteResult(share.name, states, programs, "violation", failure)
        except KeyboardInterrupt:
            raise
        except BaseException:
            reason = traceback.format_exc()
            return SuiteResult(share.name, states, programs, "unknown", reason=reason)
        if found.parted:
            reason = f"{name}: merged states differ: {found.parted}"
            return SuiteResult(share.name, states, programs, "unknown", reason=reason)
        whole += found.complete
    reason = f"{whole} of {len(share.programs)} scopes whole"
    return SuiteResult(share.name, states, programs, "ok", reason=reason)


@dataclass(frozen=True)
class Caught:
    """What became of a planted bug.

    Attributes:
        by: id of the rule that caught it, or "" when it survived.
        suite, cases, steps: the suite that ran, and how much of it was needed.
        smoke: whether the smoke test passes with the bug, as it must.
        used: how often the patched code was executed.
        failure: what the suite printed.
        seconds: how long the suite took to find it.
        other: the rule that catches it when ``by`` is switched off: "" when only one check does;
            None when that was not tried.
    """

    bug: str
    by: str
    suite: str
    cases: int
    steps: int
    smoke: bool
    used: int
    failure: Failure | None
    seconds: float = field(default=0.0, compare=False)
    other: str | None = None

    @property
    def counts(self) -> bool:
        """Caught by a named rule, executed, and not seen by the smoke test."""
        return self.smoke and self.used > 0 and self.by not in ("", "crash")


def lacking(bug: PlantedBug) -> list[str]:
    """What the bug's target lacks here for its suite: ``ops`` without Triton."""
    return resolve(bug.target).lacks(needs_of(bug.suite))


def hunt(
    bug: PlantedBug,
    *,
    seed: int = 0,
    max_examples: int = HUNT_EXAMPLES,
    shrink: bool = False,
    only_one: bool = False,
) -> Caught:
    """Run a planted bug's suite on its target with the bug patched in.

    An exception is no check: where one ends the suite, the suite runs again without that rule.

    Args:
        only_one: run it once more without the rule that caught it, to see if another one does.
            Exceptions count for nothing then.
    """
    target = resolve(bug.target)

    def run(*off: str) -> SuiteResult:
        with without_rules(*off):
            return run_suite(bug.suite, target, max_examples=max_examples, seed=seed, shrink=shrink)

    def rule_of(result: SuiteResult) -> str:
        return result.failure.rule if result.failure else ""

    with bug.active() as use:
        try:
            bug.smoke(target)
            passes = True
        except Exception:
            passes = False
        use.count = 0
        start = time.perf_counter()
        result = run()
        if rule_of(result) == "crash":
            checked = run("crash")
            result = checked if checked.failure else result
        seconds, used, by = time.perf_counter() - start, use.count, rule_of(result)
        other = rule_of(run(by, "crash")) if only_one and by else None
    return Caught(
        bug.name,
        by,
        bug.suite,
        result.cases,
        result.steps,
        passes,
        used,
        result.failure,
        seconds,
        other,
    )


def _open(machine: type[DriverMachine]) -> None:
    """The machine's fixed program, as one case."""
    if not machine.opening:
        return
    driver, tally = machine.make(machine.target), machine.tally
    tally.cases += 1
    try:
        for name, args in machine.opening:
            getattr(driver, name)(*args)
    finally:
        tally.steps += driver.calls
        tally.failed = driver if driver.found else None


def _run(machine: type[DriverMachine], max_examples: int, number: int) -> None:
    """Draw the cases, in batches that are as even as can be."""
    batches = -(-max_examples // BATCH)
    for batch in range(batches):
        with without_local_constants():
            run_state_machine_as_test(
                seed(f"{number}, batch {batch}")(machine),
                settings=settings(  # every one that there is: none is left to the user's profile
                    max_examples=(max_examples + batch) // batches,
                    stateful_step_count=machine.steps,
                    backend="hypothesis",
                    database=None,
                    deadline=None,
                    derandomize=False,
                    report_multiple_bugs=False,
                    print_blob=False,
                    verbosity=Verbosity.quiet,
                    phases=(Phase.generate,),  # shrinking is the oracle's: it replays logs
                    suppress_health_check=list(HealthCheck),
                ),
            )


def explain(violation: Violation, driver: Driver | None) -> Failure:
    """The failure for people: what was seen, the program, the state before and after."""
    parts = [str(violation)]
    steps = violation.steps if driver is None else tuple(driver.program())
    for bug in active_bugs():
        steps = ("from refcache.planted import plant", f"plant({bug.name!r})", *steps)
    if driver is not None:
        before = driver.replay(driver.calls - 1).describe()
        parts += ["steps:\n" + "\n".join(f"    {line}" for line in steps)]
        parts += [f"before the last step:\n{_indent(before)}"]
        parts += [f"after it:\n{_indent(driver.describe())}"]
    return Failure(violation.id, violation.sentence, violation.evidence, steps, "\n".join(parts))


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
