"""A row of ``make peers`` is what the command line says, and what it is held to."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from environment import environment
from refcache.oracle import Target, resolve
from refcache.oracle.target.reference import RefcacheTarget
from refcache.peers import releases
from refcache.testing import SUITES, run_suite
from refcache.testing.machines.base import machine_for
from refcache.testing.registry import draws_write_policies
from refcache.types import WRITE_POLICIES

ROOT = Path(__file__).parents[2]


def script() -> Any:
    """``scripts/peers.py`` as a module."""
    spec = importlib.util.spec_from_file_location("peers_script", ROOT / "scripts" / "peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(TRITON_INTERPRET="1"),
    )


@pytest.mark.parametrize(
    ("target", "suite", "policy"),
    [
        ("refcache", "hicache.state", "write_back"),
        ("naive", "tree.misuse", None),
        ("sglang:0.5.10+overlap", "hicache.state", "write_back"),
    ],
)
def test_the_call_that_a_row_prints_gives_the_row(
    target: str, suite: str, policy: str | None
) -> None:
    if target.startswith("sglang") and "0.5.10" not in releases.unpacked():
        pytest.skip("sglang 0.5.10 is not unpacked: make peers")
    only = ["--policy", policy] if policy else []
    shown = python("scripts/peers.py", "rows", target, suite, *only, "--examples", "8")
    assert shown.returncode == 0, shown.stderr
    row, call = shown.stdout.splitlines()
    assert call.split()[:1] == ["refcache"]
    assert [policy] * bool(policy) == [word for word in call.split() if word in WRITE_POLICIES]
    said = python("-m", *call.split(), "--json")
    (verdict,) = json.loads(said.stdout)["suites"]
    assert said.returncode == (verdict["verdict"] == "violation"), said.stderr
    given = row.split()
    assert given[:5] == [target, suite, policy or "-", verdict["verdict"], str(verdict["cases"])]
    if verdict["verdict"] == "violation":
        steps = sum(line.startswith("d.") for line in verdict["program"])
        assert row.endswith(f"  {verdict['rule']}, {steps} steps")


def test_every_row_is_a_suite_that_its_target_is_asked_for() -> None:
    """So the command line never says that the target lacks what the script runs."""
    for target, suites in script().TARGETS.items():
        variant = target.partition("+")[2]
        assert {*suites} <= {*SUITES}
        assert "hicache.streams" not in suites  # the edges, of refcache's own classes
        assert variant in releases.VARIANTS or not target.startswith("sglang")


class Overlaps(RefcacheTarget):
    """The reference, held to what an overlap loop calls."""

    capabilities = RefcacheTarget.capabilities - {"bare_calls"}


class Waits(RefcacheTarget):
    """The reference, with every forward waited for."""

    capabilities = RefcacheTarget.capabilities - {"bare_calls", "fences"}


@pytest.mark.parametrize(
    ("target", "bare"), [(RefcacheTarget(), True), (Waits(), True), (Overlaps(), False)]
)
def test_bare_calls_are_made_where_they_are_promised(target: Target, bare: bool) -> None:
    machine: Any = machine_for(SUITES["hicache.state"].machine, target)()
    machine.start({"size": 16, "host_size": 32})
    machine.insert_and_reset((0, 1), (1, 0))
    made = {name for name, _ in machine.d.call_log}
    machine.teardown()
    assert made & {"insert", "reset"} == ({"insert", "reset"} if bare else set())


@pytest.mark.parametrize("suite", [*filter(draws_write_policies, SUITES)])
@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_one_write_policy_is_all_that_is_drawn(
    suite: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    base = SUITES[suite].machine
    teardown = base.teardown

    def noting(machine: Any) -> None:
        given = getattr(machine.d.config, "write_policy", None)
        calls = [args for name, args in machine.d.call_log if name == "serve"]
        drawn.extend(
            [given] if given else [word for c in calls for word in c if word in WRITE_POLICIES]
        )
        teardown(machine)

    monkeypatch.setattr(base, "teardown", noting)
    monkeypatch.setattr(base, "opening", ())
    result = run_suite(suite, resolve("refcache"), max_examples=20, write_policy=policy)
    assert result.verdict == "ok", result
    assert {*drawn} == {policy}
