"""A failure leaves a folder: a program that runs alone, a trace, both states, the verdict."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from environment import environment
from refcache.errors import InvalidArgument
from refcache.testing.report import write_failure
from refcache.trace import judge_trace

BROKEN = '''
from refcache.oracle import NaiveAllocator, NaiveTarget


class Forgetful(NaiveAllocator):
    """Hands out its highest page again and again."""

    def _grow(self, rows):
        kept = set(self._free)
        slots = super()._grow(rows)
        self._free |= {max(kept)} if kept and slots is not None else set()
        return slots


class Broken(NaiveTarget):
    name = "broken_target:Broken"

    def allocator(self, config):
        return Forgetful(config.size, config.page_size)
'''
STEPS = (
    "from refcache.oracle import AllocatorDriver, resolve",
    "d = AllocatorDriver(resolve('broken_target:Broken'), page_size=2, size=8)",
    "d.alloc(1)",
)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module whose allocator keeps a page free that it hands out."""
    (tmp_path / "broken_target.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_target", raising=False)
    return tmp_path


def test_the_folder_of_a_failure(broken: Path) -> None:
    verdict = write_failure(broken / "out", "allocator.state", STEPS)
    files = {path.name for path in (broken / "out").iterdir()}
    assert files == {
        "repro.py",
        "trace.jsonl",
        "before.txt",
        "after.txt",
        "verdict.json",
        "report.html",
    }
    assert verdict == json.loads((broken / "out" / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["rule"]) == ("violation", "P1")
    assert verdict["trace"]["verdict"] == judge_trace(broken / "out" / "trace.jsonl").verdict
    assert verdict["trace"]["rule"] == "P1"
    assert "free pages: [1, 2, 3, 4]" in (broken / "out" / "before.txt").read_text()
    assert "sequence 0: slots [8, 9]" in (broken / "out" / "after.txt").read_text()
    assert not list(broken.glob(".*.part"))


def test_repro_runs_alone(broken: Path) -> None:
    write_failure(broken / "out", "allocator.state", STEPS)
    source = (broken / "out" / "repro.py").read_text()
    assert "hypothesis" not in source
    run = subprocess.run(
        [sys.executable, broken / "out" / "repro.py"],
        capture_output=True,
        text=True,
        cwd=broken,
        env=environment(),
    )
    assert run.returncode == 1, run.stderr
    assert run.stdout.startswith("P1: ")


def test_a_program_that_does_not_fail_is_unknown(tmp_path: Path) -> None:
    steps = [line.replace("broken_target:Broken", "naive") for line in STEPS]
    verdict = write_failure(tmp_path / "out", "allocator.state", steps)
    assert verdict["verdict"] == "unknown"
    assert verdict["trace"]["verdict"] == "ok"


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(InvalidArgument, match="new or an empty folder"):
        write_failure(tmp_path / "out", "allocator.state", STEPS)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]
