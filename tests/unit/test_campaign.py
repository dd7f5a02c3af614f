"""A campaign goes on where it was stopped: no failure lost, nothing run twice, no torn file."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from environment import environment
from refcache.errors import InvalidArgument
from refcache.testing import campaign as c
from refcache.trace import judge_trace

BROKEN = '''
from refcache.oracle import NaiveAllocator, NaiveTarget


class Forgetful(NaiveAllocator):
    """Frees one page less than it is told."""

    def free(self, free_index):
        super().free(free_index)
        if len(self._free) > 3:
            self._free.discard(min(self._free))


class Broken(NaiveTarget):
    name = "forgetful_target:Broken"

    def allocator(self, config):
        return Forgetful(config.size, config.page_size)
'''
WHOLE = {"repro.py", "trace.jsonl", "before.txt", "after.txt", "verdict.json", "report.html"}
PLAN = c.Plan("naive", ("allocator.state", "allocator.misuse"), max_examples=3)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "forgetful_target.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "forgetful_target", raising=False)
    return tmp_path


def run(state: c.Campaign, max_runs: int, executor: Any = ThreadPoolExecutor) -> list[c.Run]:
    return list(c.run_campaign(state, minutes=5, max_runs=max_runs, executor=executor))


def journal(folder: Path) -> list[c.Run]:
    lines = (folder / "journal.jsonl").read_text().splitlines()
    return [c.Run(**json.loads(line)) for line in lines]


def test_every_suite_with_every_seed(tmp_path: Path) -> None:
    state = c.open_campaign(tmp_path / "c", PLAN)
    runs = run(state, 5)
    assert [(r.suite, r.seed) for r in runs] == [
        (suite, seed) for seed in range(3) for suite in PLAN.suites
    ][:5]
    assert {r.verdict for r in runs} == {"ok"}
    again = c.open_campaign(tmp_path / "c", PLAN)
    assert again.runs == runs == journal(tmp_path / "c")
    assert [(r.suite, r.seed) for r in run(again, 1)] == [("allocator.misuse", 2)]


def test_failures_are_told_apart(broken: Path) -> None:
    plan = c.Plan("forgetful_target:Broken", ("allocator.state",), max_examples=30)
    state = c.open_campaign(broken / "c", plan)
    runs = run(state, 4)
    assert sum(len(shown) for shown in state.failures.values()) == 4
    assert len(state.failures) < 4  # minimal steps agree
    for name in state.failures:
        folder = broken / "c" / "failures" / name
        verdict = json.loads((folder / "verdict.json").read_text())
        assert verdict["rule"] == runs[0].rule
        assert (folder / "repro.py").exists()


def test_killed_at_ten_moments(broken: Path) -> None:
    """A kill leaves a torn line, or a folder without its line, or half a folder."""
    plan = c.Plan("forgetful_target:Broken", ("allocator.state",), max_examples=30)
    folder = broken / "c"
    run(c.open_campaign(folder, plan), 3)
    raw, failures = (folder / "journal.jsonl").read_bytes(), set((folder / "failures").iterdir())
    draw = random.Random(0)
    for _ in range(10):
        (folder / "journal.jsonl").write_bytes(raw[: draw.randrange(len(raw))])
        (folder / "failures" / ".half.7.part").mkdir()
        state = c.open_campaign(folder, plan)
        run(state, 3 - len(state.runs))
        assert (folder / "journal.jsonl").read_bytes() == raw
        assert set((folder / "failures").iterdir()) == failures


def test_a_process_that_dies_is_a_result(tmp_path: Path) -> None:
    class Dying(Executor):
        """Runs at once; dies of seed 1."""

        def __init__(self, workers: int) -> None:
            pass

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            if args[-1] == 1:
                future.set_exception(BrokenProcessPool("died"))
            else:
                future.set_result(fn(*args))
            return future

    state = c.open_campaign(tmp_path / "c", c.Plan("naive", ("allocator.state",), max_examples=2))
    runs = run(state, 3, Dying)
    assert [(r.seed, r.verdict) for r in runs] == [(0, "ok"), (1, "unknown"), (2, "ok")]
    assert "died" in runs[1].reason


def test_refusals(tmp_path: Path) -> None:
    c.open_campaign(tmp_path / "c", PLAN)
    other = c.Plan(**{**asdict(PLAN), "suites": PLAN.suites, "first_seed": 7})
    with pytest.raises(InvalidArgument, match="other settings"):
        c.open_campaign(tmp_path / "c", other)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(InvalidArgument, match="no campaign"):
        c.open_campaign(tmp_path / "mine", PLAN)
    with pytest.raises(InvalidArgument, match="at least 1"):
        list(c.run_campaign(c.open_campaign(tmp_path / "c", PLAN), minutes=1, workers=0))
    with pytest.raises(InvalidArgument, match="unknown suite"):
        c.plan_for("naive", ["nope"])


def started(folder: Path, runs: int) -> Iterator[subprocess.Popen[bytes]]:
    code = "from refcache.cli.main import run; run()"
    arguments = ["campaign", "forgetful_target:Broken", "--suite", "allocator.state", "--dir", "c"]
    arguments += ["--workers", "2", "--minutes", "5", "--max-runs", str(runs)]
    while True:
        yield subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            cwd=folder,
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.nightly
def test_killed_for_real(broken: Path) -> None:
    """SIGKILL at ten random moments of ten processes; then it is finished."""
    draw = random.Random(1)
    seen: dict[tuple[str, int], c.Run] = {}
    plan = c.Plan("forgetful_target:Broken", ("allocator.state",))
    processes = started(broken, 1000)
    for _ in range(10):
        process = next(processes)
        wanted = len(seen) + draw.randrange(4)  # finished runs, then some moment of the next ones
        while process.poll() is None and lines(broken / "c" / "journal.jsonl") < wanted:
            time.sleep(0.1)
        time.sleep(draw.uniform(0, 2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (broken / "c" / "campaign.json").exists():
            state = c.open_campaign(broken / "c", plan)
            now = {(r.suite, r.seed): r for r in state.runs}
            assert len(now) == len(state.runs)  # nothing ran twice
            assert seen.items() <= now.items()  # nothing was lost
            seen = now
            folders = list((broken / "c" / "failures").iterdir())
            assert {*state.failures} <= {path.name for path in folders}
            for path in folders:  # also of a run whose line was not written yet
                assert {p.name for p in path.iterdir()} == WHOLE
                assert json.loads((path / "verdict.json").read_text())["verdict"] == "violation"
                assert judge_trace(path / "trace.jsonl").rule == "P1"
    assert len(seen) > 10
    state = c.open_campaign(broken / "c", plan)
    (run_now,) = run(state, 1)
    assert (run_now.suite, run_now.seed) not in seen
    assert journal(broken / "c") == [*seen.values(), run_now]
