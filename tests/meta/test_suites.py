"""What the suites say about targets that lack something, crash, or break the harness."""

import subprocess
import sys
from typing import Any

import pytest

from environment import environment
from refcache.errors import InvalidArgument, UnknownName
from refcache.oracle import NaiveAllocator, NaiveTarget, Target, Violation, resolve
from refcache.oracle.rules.violation import without_rules
from refcache.planted import find
from refcache.testing import list_suites, run_suite
from refcache.testing.machines.base import machine_for
from refcache.testing.machines.tree import TreeMachine


class OnlyAllocator(Target):
    """A target of somebody who has an allocator and nothing else."""

    name = "only an allocator"
    capabilities = frozenset({"allocator"})

    def allocator(self, config: Any) -> NaiveAllocator:
        return NaiveAllocator(config.size, config.page_size)


class Crashes(OnlyAllocator):
    def allocator(self, config: Any) -> NaiveAllocator:
        made = super().allocator(config)
        made.merge_and_sort_free = lambda: 1 / 0  # type: ignore[assignment, method-assign]
        return made


class Lenient(OnlyAllocator):
    """Declares that it refuses misuse, and frees a free page without a word."""

    capabilities = frozenset({"allocator", "refuses_misuse"})

    def allocator(self, config: Any) -> NaiveAllocator:
        made = super().allocator(config)
        free = made.free

        def lenient(free_index: Any) -> None:
            try:
                free(free_index)
            except ValueError:
                made._free |= {
                    slot // made.page_size
                    for slot in free_index.tolist()
                    if 0 < slot // made.page_size <= config.pages
                }

        made.free = lenient  # type: ignore[method-assign]
        return made


def not_a_target() -> int:
    return 3


def test_what_a_target_lacks_is_skipped_with_the_reason() -> None:
    for suite in list_suites():
        result = run_suite(suite, OnlyAllocator(), max_examples=3)
        if suite in ("allocator.state", "allocator.explore"):
            assert (result.verdict, result.cases > 0) == ("ok", True)
        else:
            assert (result.verdict, result.cases) == ("skipped", 0)
            assert "lacks" in result.reason


def test_an_exception_on_a_legal_call_is_a_crash() -> None:
    result = run_suite("allocator.state", Crashes(), max_examples=20)
    assert result.verdict == "violation"
    assert result.failure is not None
    assert result.failure.rule == "crash"
    assert "ZeroDivisionError" in result.failure.evidence
    assert result.failure.steps[-1] == "d.sort()"
    assert f"resolve('{__name__}:Crashes')" in result.failure.steps[-2]


def test_accepted_misuse_is_a_violation() -> None:
    result = run_suite("allocator.misuse", Lenient(), max_examples=40)
    assert result.failure is not None
    assert result.failure.rule == "REFUSE"


def test_a_fault_of_the_harness_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("refcache.oracle.AllocatorDriver.check", lambda self: 1 / 0)
    result = run_suite("allocator.state", OnlyAllocator(), max_examples=3)
    assert result.verdict == "unknown"
    assert "ZeroDivisionError" in result.reason


def test_the_same_seed_draws_the_same_cases() -> None:
    first, second, other = (
        run_suite("allocator.state", OnlyAllocator(), max_examples=10, seed=s) for s in (1, 1, 2)
    )
    assert first == second
    assert first != other


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_the_tree_machine_parts_from_what_two_hold(page_size: int, grow: bool) -> None:
    machine: Any = machine_for(TreeMachine, resolve("refcache"))()
    config = {"size": 32, "page_size": page_size, "is_eagle": True}
    machine.start(config)
    machine.part_from_held((0,) * 12, None, 1, grow)
    machine.teardown()
    with find("split-keeps-one-lock").active(), without_rules("L1"):
        machine.start(config)
        with pytest.raises(Violation, match="A2"):
            machine.part_from_held((0,) * 12, None, 1, grow)


def test_cases_are_fresh_draws() -> None:
    """Hardly two of many cases begin alike, as mutations of one drawn case do."""
    made: list[Any] = []

    class Sees(OnlyAllocator):
        def allocator(self, config: Any) -> NaiveAllocator:
            made.append(config)
            return super().allocator(config)

    result = run_suite("allocator.state", Sees(), max_examples=60)
    assert 60 <= result.cases <= 80
    assert len(set(made)) >= 25  # of 48


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", r"one of refcache, naive, sglang\[:VERSION\], storage:BACKEND, pkg"),
        ("no.such.module:factory", "does not import"),
        ("refcache.oracle:NoSuchTarget", "has no factory"),
        ("refcache.oracle:SENTENCES", "has no factory"),
        ("refcache.oracle.rules.catalog:sentence", "no factory, which takes no argument"),
        ("refcache.types:LogicalClock", "expected a refcache.oracle.Target"),
    ],
)
def test_what_is_no_target_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        resolve(spec)


def test_unknown_suites_and_sizes_are_refused() -> None:
    with pytest.raises(UnknownName, match="unknown suite 'nonsense'"):
        list_suites("nonsense")
    with pytest.raises(UnknownName, match="unknown suite 'tree'"):
        run_suite("tree", NaiveTarget())
    with pytest.raises(InvalidArgument, match="max_examples=0"):
        run_suite("tree.state", NaiveTarget(), max_examples=0)
    assert list_suites("tree") == ["tree.state", "tree.misuse", "tree.exact", "tree.explore"]
    assert "allocator.misuse" in list_suites("misuse")


@pytest.mark.parametrize(
    ("target", "passed"), [("naive", 9), (None, 0), ("refcache", len(list_suites()))]
)
def test_pytest_pyargs_judges_the_named_target(target: str | None, passed: int) -> None:
    skipped = len(list_suites()) - passed
    env = environment(REFCACHE_EXAMPLES="3")
    if target is not None:
        env["REFCACHE_TARGET"] = target
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs"]
    ran = subprocess.run(
        [*command, "refcache.testing.test_target"], capture_output=True, text=True, env=env
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = ran.stdout.splitlines()[-1]
    assert (f"{passed} passed" in summary) == (passed > 0)
    assert (f"{skipped} skipped" in summary) == (skipped > 0)
