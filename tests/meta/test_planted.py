"""Every planted bug is caught by a named rule, with the smoke test still passing."""

import subprocess
import sys
from pathlib import Path

import pytest

from environment import environment
from refcache.errors import InvalidArgument, UnknownName
from refcache.oracle import TreeDriver, Violation, resolve
from refcache.oracle.rules.violation import switched_off, without_rules
from refcache.planted import PlantedBug, all_bugs, find
from refcache.planted.smoke import smoke
from refcache.testing import Failure, SuiteResult, hunt

ONE_TIER = [bug for bug in all_bugs() if bug.suite.split(".")[0] in ("allocator", "tree", "loop")]


@pytest.mark.parametrize("bug", ONE_TIER, ids=lambda bug: bug.name)
def test_caught(bug: PlantedBug) -> None:
    caught = hunt(bug)
    assert caught.smoke, "the smoke test sees it"
    assert caught.used, "the patched code was not executed"
    assert caught.by not in ("", "crash"), caught.failure and caught.failure.text


@pytest.mark.parametrize(
    "name",
    [
        "load-leaves-ancestor",
        "load-quota-ignored",
        "revived-stays-host-leaf",
        "last-layer-not-launched",
        "free-drops-neighbours-only",
        "decode-shares-new-page",
    ],
)
def test_what_random_calls_seldom_reach_is_drawn_on_purpose(name: str) -> None:
    caught = hunt(find(name))
    assert caught.counts
    assert caught.cases <= 30


@pytest.mark.parametrize(("checked", "by"), [("A4", "A4"), (None, "crash")])
def test_an_exception_is_hunted_past(
    checked: str | None, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, *_: object, **__: object) -> SuiteResult:
        rule = checked if switched_off("crash") else "crash"
        failure = Failure(rule, "", "", (), "") if rule else None
        return SuiteResult(name, 3, 9, "violation" if rule else "ok", failure)

    monkeypatch.setattr("refcache.testing.run.run_suite", run)
    assert hunt(find("row-lost")).by == by


@pytest.mark.parametrize(
    ("name", "by", "other"), [("page-zero-freed", "P0", "P1"), ("freed-pages-go-last", "DIFF", "")]
)
def test_which_bugs_only_one_check_catches(name: str, by: str, other: str) -> None:
    caught = hunt(find(name), only_one=True, max_examples=100)
    assert (caught.by, caught.other) == (by, other)
    assert hunt(find(name), max_examples=100).other is None
    assert not switched_off()


def test_a_rule_that_is_switched_off_says_nothing() -> None:
    with find("evict-too-much").active(), without_rules("E2"):
        d = TreeDriver(resolve("refcache"), size=4)
        d.insert((0,))
        d.insert((1,))
        d.evict(1)
        assert d.found is None
    with find("evict-too-much").active():
        d = TreeDriver(resolve("refcache"), size=4)
        d.insert((0,))
        d.insert((1,))
        with pytest.raises(Violation, match="E2"):
            d.evict(1)


def test_there_are_at_least_fifteen_and_most_model_a_report() -> None:
    reported = [bug for bug in ONE_TIER if bug.report != "slip"]
    assert len(ONE_TIER) >= 15
    assert len(reported) > len(ONE_TIER) / 2


def test_names_and_patches_are_distinct() -> None:
    names = [bug.name for bug in all_bugs()]
    patches = [(bug.where, bug.replacement) for bug in all_bugs()]
    assert len(set(names)) == len(names)
    assert len(set(patches)) == len(patches)


@pytest.mark.parametrize("bug", all_bugs(), ids=lambda bug: bug.name)
def test_a_patch_is_taken_back(bug: PlantedBug) -> None:
    owner, attribute = bug.owner()
    before = vars(owner)[attribute]
    with bug.active():
        assert vars(owner)[attribute] is not before
    assert vars(owner)[attribute] is before


def test_smoke_passes_without_a_bug() -> None:
    smoke(resolve("refcache"))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownName, match="planted bug 'nonsense'"):
        find("nonsense")
    bug = PlantedBug("gone", "slip", "", "refcache.keys:RadixKey.gone", lambda f: f, "tree.state")
    with pytest.raises(InvalidArgument, match="gone"), bug.active():
        pass


def test_a_step_called_by_name_is_logged_with_every_argument() -> None:
    d = TreeDriver(resolve("refcache"), page_size=1, size=8)
    d.admit(priority=3, tokens=(0, 1))
    d.admit((0, 2), chunk=1)
    assert d.log[1:] == ["d.admit((0, 1), None, None, 3)", "d.admit((0, 2), None, 1)"]
    again = d.replay(2)
    assert again.log == d.log


@pytest.mark.parametrize(
    "name",
    [
        "free-group-keeps-last",
        "lock-skips-node",
        "chunk-computed-again",
        "decode-does-not-wait",
        "batch-loses-its-load",
    ],
)
def test_the_printed_program_runs_and_shows_the_same_rule(name: str, tmp_path: Path) -> None:
    failure = hunt(find(name), shrink=True).failure
    assert failure is not None
    assert len(failure.steps) <= 12
    program = tmp_path / "program.py"
    program.write_text("\n".join(failure.steps))
    command = [sys.executable, program]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert ran.returncode == 1
    assert f"{Violation.__name__}: {failure.rule}: " in ran.stderr
