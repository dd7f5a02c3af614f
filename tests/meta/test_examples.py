"""The newcomer's path: the examples are judged as the README says, and they are short."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from environment import environment
from refcache.cli.main import main
from refcache.oracle import resolve
from refcache.testing import run_suite

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def code_lines(name: str) -> int:
    """Lines of the class on trial, without blank ones."""
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    body = source[source.index("\nclass ") : source.index("\nclass MyTarget")]
    return sum(bool(line.strip()) for line in body.splitlines())


def test_the_double_hand_out_is_found_as_the_readme_shows() -> None:
    result = run_suite("allocator.state", resolve("double_handout:MyTarget"))
    assert result.failure is not None
    assert result.failure.rule == "P1"
    assert f"\n{result.failure.text}\n" in README
    assert code_lines("double_handout") <= 45


def test_its_report_runs_from_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("refcache.planted.all_bugs", lambda: ())
    arguments = ["check", "double_handout:MyTarget", "--suite", "allocator", "--json"]
    assert main([*arguments, "--report", str(tmp_path / "report")]) == 1
    row = json.loads(capsys.readouterr().out)["suites"][0]
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, tmp_path / "report" / row["folder"] / "repro.py"],
        cwd=tmp_path / "empty",
        env=environment(EXAMPLES),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"P1: {row['evidence']}")


@pytest.mark.parametrize("suite", ["allocator.state", "tree.state", "loop.state"])
def test_the_radix_cache_is_found_sound(suite: str) -> None:
    result = run_suite(suite, resolve("my_radix_cache:MyTarget"))
    assert result.verdict == "ok", result.failure.text if result.failure else result.reason
    assert code_lines("my_radix_cache") <= 130


def test_a_tree_that_shows_no_nodes_is_not_explored(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_suite("tree.explore", resolve("my_radix_cache:MyTarget"))
    assert (result.verdict, result.reason) == ("skipped", "the target lacks inspect")
    assert main(["explore", "my_radix_cache:MyTarget", "--scope", "tree.lru"]) == 3
    assert "skipped: the target lacks inspect" in capsys.readouterr().out


def test_a_slip_in_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its verdict means something: nodes that are never split hold too much."""
    target = resolve("my_radix_cache:MyTarget")
    cache = sys.modules["my_radix_cache"].MyRadixCache
    monkeypatch.setattr(cache, "split", lambda self, node, at: node)
    result = run_suite("tree.state", target, max_examples=20)
    assert result.failure is not None
    assert result.failure.rule != "crash"


@pytest.mark.parametrize("seed", range(5))
def test_a_lock_lost_at_a_split_is_found(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hold a node that is cut; its upper half counts one of them."""
    target = resolve("my_radix_cache:MyTarget")
    cache = sys.modules["my_radix_cache"].MyRadixCache
    whole = cache.split

    def split(self: Any, node: Any, at: int) -> Any:
        upper = whole(self, node, at)
        if upper is not node:
            upper.locks = min(upper.locks, 1)
        return upper

    monkeypatch.setattr(cache, "split", split)
    result = run_suite("tree.state", target, seed=seed, shrink=False)
    assert result.failure is not None
    assert result.cases <= 20
