"""``refcache check`` and ``planted``: rows, exit codes, JSON, reports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import refused
from environment import environment
from refcache.cli.main import main
from refcache.cli.workers import Hunt, Run
from refcache.planted import all_bugs, find
from refcache.testing import Caught, Failure, SuiteResult

FAILURE = Failure("P1", "a sentence", "some evidence", ("print('shown')",), "the whole text")


def stub(monkeypatch: pytest.MonkeyPatch, verdicts: dict[str, str], survivor: str = "") -> None:
    """Replace the work: each suite has the given verdict, each bug but one is caught."""

    def run(self: Run) -> SuiteResult:
        verdict = verdicts.get(self.suite, "ok")
        failure = FAILURE if verdict == "violation" else None
        return SuiteResult(self.suite, 7, 99, verdict, failure, "" if failure else "why\nlast line")

    def hunt(self: Hunt) -> Caught:
        by = "" if self.bug == survivor else "P1"
        other = None
        if self.only_one:
            other = "" if self.bug == "page-zero-freed" else "P3"
        return Caught(self.bug, by, "allocator.state", 3, 9, True, 5, None, 1.5, other)

    monkeypatch.setattr(Run, "work", run)
    monkeypatch.setattr(Hunt, "work", hunt)
    for module in ("check", "planted"):
        monkeypatch.setattr(f"refcache.cli.{module}.in_order", lambda ts: (t.work() for t in ts))


@pytest.mark.parametrize(
    ("verdict", "code"), [("ok", 0), ("violation", 1), ("unknown", 3), ("skipped", 3)]
)
def test_exit_code_is_the_verdict(
    verdict: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, {"allocator.state": verdict})
    assert main(["check", "--suite", "allocator.state"]) == code
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:5] == ["allocator.state", "7", "cases", "99", "steps"]
    assert verdict in out[0]
    assert ("the whole text" in out) == (verdict == "violation")
    assert out[-1].startswith("1 of 1 planted bugs caught: one a suite")


def test_a_surviving_bug_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, {}, survivor="page-zero-freed")
    names = [bug.name for bug in all_bugs() if bug.suite == "allocator.state"]
    seed = f"--seed={names.index('page-zero-freed')}"
    assert main(["check", "--suite", "allocator.state"]) == 0
    capsys.readouterr()
    assert main(["check", "--suite", "allocator.state", seed]) == 1
    out = capsys.readouterr().out
    assert "SURVIVED 3 cases" in out
    assert main(["check", "--suite", "allocator", "--json", seed]) == 1
    planted = json.loads(capsys.readouterr().out)["planted"]
    assert {"name": "page-zero-freed", "caught_by": None} in planted


def test_planted_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    total = len(all_bugs())
    stub(monkeypatch, {})
    assert main(["planted", "--run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{total} of {total} caught"
    stub(monkeypatch, {}, survivor="page-zero-freed")
    assert main(["planted", "--run"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"{total - 1} of {total} caught"


def test_planted_says_which_only_one_check_catches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, {})
    assert main(["planted", "--run"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("caught by P1 (allocator.state, case 3, 9 steps, 1.5 s)")
    assert main(["planted", "--run", "--only-one"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert lines["page-zero-freed"].endswith("1.5 s); no other check")
    assert lines["row-lost"].endswith("1.5 s); else P3")
    assert out.splitlines()[-2] == "1 of them by one check only"
    assert main(["planted", "--only-one"]) == 2
    assert capsys.readouterr().err == "refcache: --only-one: expected --run too\n"


def test_planted_lists_every_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["planted"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [bug.name for bug in all_bugs()]


def test_json_of_a_real_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check", "--suite", "allocator.state", "--max-examples", "2", "--json"]
    assert main([*arguments, "--planted", "page-zero-freed", "--seed", "1"]) in (0, 1)
    verdict = json.loads(capsys.readouterr().out)
    assert [row["suite"] for row in verdict["suites"]] == ["allocator.state"]
    assert [row["name"] for row in verdict["planted"]] == ["page-zero-freed"]


def run_repro(folder: Path, empty: Path) -> tuple[int, str]:
    """Exit code and output of a report's ``repro.py``, run from an empty folder."""
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, folder / "repro.py"],
        cwd=empty,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert not list(empty.iterdir())
    return done.returncode, done.stdout


def test_a_planted_bug_prints_and_reports_a_program(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report"
    assert main(["check", "--planted", "page-zero-freed", "--report", str(report)]) == 1
    out = capsys.readouterr().out
    assert "allocator.state" in out
    assert "violation" in out
    (row,) = json.loads((report / "verdict.json").read_text())["suites"]
    assert row["verdict"] == "violation"
    assert all(line in out for line in row["program"])
    code, shown = run_repro(report / row["folder"], tmp_path / "empty")
    assert code == 1
    assert shown.startswith(f"{row['rule']}: {row['evidence']}")
    owner, attribute = find("page-zero-freed").owner()
    assert not hasattr(vars(owner)[attribute], "__wrapped__"), "the bug is still planted"


MINE = """
from refcache.oracle import NaiveAllocator, NaiveTarget


class Twice(NaiveAllocator):
    def alloc(self, need_size):
        slots = super().alloc(need_size)
        if slots is not None and need_size > 2 * self.page_size and self._free:
            self._free.remove(min(self._free))
            self._free.add(int(slots[-1]) // self.page_size)
        return slots


class MyTarget(NaiveTarget):
    capabilities = frozenset({"allocator"})

    def allocator(self, config):
        return Twice(config.size, config.page_size)


class Sound(MyTarget):
    def allocator(self, config):
        return NaiveAllocator(config.size, config.page_size)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a target of one's own that hands a page out twice; nothing is hunted."""
    (tmp_path / "twice.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "twice", raising=False)
    monkeypatch.setattr("refcache.planted.all_bugs", lambda: ())
    return tmp_path


def test_the_folder_of_a_violation(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = mine / "report"
    arguments = ["check", "twice:MyTarget", "--suite", "allocator.state", "--json"]
    assert main([*arguments, "--report", str(report)]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((report / "verdict.json").read_text())
    (row,) = printed["suites"]
    names = {path.name for path in (report / row["folder"]).iterdir()}
    assert names == {
        "repro.py",
        "trace.jsonl",
        "before.txt",
        "after.txt",
        "verdict.json",
        "report.html",
    }
    code, shown = run_repro(report / row["folder"], mine / "empty")
    assert code == 1
    assert shown.startswith(f"P1: {row['evidence']}")
    assert main(["judge", str(report / row["folder"] / "trace.jsonl")]) == 1


def test_expected_violations(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = mine / "known"
    suites = [f"--suite=allocator.{kind}" for kind in ("state", "misuse", "exact")]
    arguments = [*suites, "--max-examples", "60", "--xfails", str(known)]

    def verdict(ids: str, target: str) -> tuple[int, str, str]:
        known.write_text(ids)
        code = main(["check", f"twice:{target}", *arguments])
        return code, *capsys.readouterr()

    code, out, err = verdict("allocator.state:P1  # twice\n\n", "MyTarget")
    assert (code, err) == (0, "")
    assert "xfail: P1, expected by allocator.state:P1" in out
    assert "steps:" not in out
    code, out, err = verdict("allocator.state:P0\nallocator.misuse\nallocator.sate\n", "MyTarget")
    assert code == 1
    assert "  violation\n" in out
    assert err.splitlines() == [
        "refcache: warning: xfail allocator.misuse matches nothing that ran",
        "refcache: warning: xfail allocator.sate matches nothing that ran",
    ]
    code, out, err = verdict("allocator.state", "Sound")
    assert (code, err) == (0, "")
    assert "xpass: allocator.state expected to fail" in out


def test_exact_judges_a_target_that_does_not_declare_it(
    mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", "twice:Sound", "--suite", "allocator.exact", "--max-examples", "10"]
    assert main(arguments) == 3
    assert "skipped: the target lacks exact" in capsys.readouterr().out
    for options in (["--exact"], ["--exact", "--profile", "sglang-0.5.10"]):
        assert main([*arguments, *options]) == 1
        out = capsys.readouterr().out
        assert "DIFF: " in out
        assert "profile='sglang-0.5.10'" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "nope"], "unknown suite 'nope': expected one of"),
        (["--planted", "nope"], "unknown planted bug 'nope': expected one of abort-"),
        (["--planted", "evict-to-much"], "bug 'evict-to-much': did you mean 'evict-too-much'?"),
        (["--max-examples", "0"], "Invalid value for '--max-examples'"),
        (["--seed", "x"], "Invalid value for '--seed'"),
        (
            ["nope"],
            "target 'nope': expected one of refcache, naive, sglang[:VERSION], storage:BACKEND",
        ),
        (["nope.nope:x"], "target 'nope.nope:x' does not import"),
        (["broken_target:x"], "target 'broken_target:x' does not import: ZeroDivisionError"),
        (["os:sep"], "target 'os:sep': os has no factory"),
        (["os:getcwd"], "the factory gave str, expected a refcache.oracle.Target"),
        (["os:abort_"], "target 'os:abort_': os has no factory"),
        (["--xfails", "absent"], "xfails absent: cannot be read: No such file or directory"),
        (["--xfails", "."], "xfails .: cannot be read: Is a directory"),
        (["--xfails", "broken_target.py"], "xfails broken_target.py:1: '1 / 0': expected a suite"),
        (["--exact", "--profile", "x"], "unknown profile 'x': expected one of sglang-0.5.10"),
        (["--report", "file"], "--report file: expected a new or an empty folder"),
        (["--report", "."], "--report .: expected a new or an empty folder"),
    ],
)
def test_wrong_call(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "file").touch()
    (tmp_path / "broken_target.py").write_text("1 / 0")
    monkeypatch.delitem(sys.modules, "broken_target", raising=False)  # another test's
    assert words in refused(["check", *arguments], capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken_target.py", "file"]


def test_a_target_that_exits_is_no_success(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "exiting_target.py").write_text("raise SystemExit(0)")
    line = refused(["check", "exiting_target:x"], capsys)
    assert "target 'exiting_target:x' does not import: SystemExit(0)" in line
    line = refused(["check", "sys:exit"], capsys)
    assert "target 'sys:exit': calling the factory: SystemExit" in line


def test_an_edge_of_a_target_in_the_current_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "edge_target.py").write_text(
        "from refcache.oracle.target.reference import RefcacheTarget\n\n"
        "print('a word of the target')\n\n\n"
        "class Mine(RefcacheTarget):\n    pass\n"
    )
    assert main(["check", "edge_target:Mine", "--without-edge", "load-fence"]) == 1
    out, err = capsys.readouterr()
    assert "edge load-fence" in out
    assert (err, "a word" in out) == ("a word of the target\n", False)


ROGUES = """
import os

from refcache.oracle import Target
from refcache.oracle import NaiveAllocator

print("imported")


class Odd(BaseException):
    pass


def printing():
    print("printed")
    os.write(1, b"written\\n")


def raising(error):
    raise error


def rogue(before_alloc):
    class Allocator(NaiveAllocator):
        def alloc(self, need_size):
            before_alloc()
            return super().alloc(need_size)

    class Rogue(Target):
        capabilities = frozenset({"allocator"})

        def allocator(self, config):
            return Allocator(config.size, config.page_size)

    return Rogue


Printing = rogue(printing)
Closing = rogue(lambda: raising(GeneratorExit))
Exiting = rogue(lambda: raising(SystemExit(3)))
Strange = rogue(lambda: raising(Odd("a word")))
"""


def judged(target: str, folder: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a check of one of the ``ROGUES``, with JSON."""
    (folder / "rogues.py").write_text(ROGUES)
    arguments = ["--suite", "allocator.state", "--max-examples", "2", "--no-planted", "--json"]
    program = "from refcache.cli.main import run; run()"
    done = subprocess.run(
        [sys.executable, "-c", program, "check", f"rogues:{target}", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_what_a_target_prints_is_not_in_the_verdict(tmp_path: Path) -> None:
    code, out, err = judged("Printing", tmp_path)
    assert (code, json.loads(out)["suites"][0]["verdict"]) == (0, "ok")
    assert set(err.splitlines()) == {"imported", "printed", "written"}


@pytest.mark.parametrize(
    ("target", "error"),
    [("Closing", "GeneratorExit()"), ("Exiting", "SystemExit(3)"), ("Strange", "Odd('a word')")],
)
def test_what_is_raised_in_a_call_is_a_violation(target: str, error: str, tmp_path: Path) -> None:
    code, out, err = judged(target, tmp_path)
    assert (code, set(err.splitlines())) == (1, {"imported"})
    (row,) = json.loads(out)["suites"]
    assert (row["verdict"], row["rule"]) == ("violation", "crash")
    assert error in row["evidence"]


INTERRUPTED = """
import os
import signal

from refcache.cli.main import run

signal.signal(signal.SIGINT, signal.default_int_handler)
if __name__ == "__main__":
    run()
else:  # a worker that has not begun: the user presses Ctrl-C
    os.kill(os.getppid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupt_while_workers_start_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "rogues.py").write_text(ROGUES.replace('print("imported")', ""))
    (tmp_path / "program.py").write_text(INTERRUPTED)
    arguments = ["check", "rogues:Printing", "--suite", "allocator.state", "--no-planted"]
    done = subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_planted_over_seeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub(monkeypatch, {})
    arguments = ["planted", "--run", "--seeds", "2", "--suite", "allocator.state"]
    assert main(arguments) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    bugs = [bug.name for bug in all_bugs() if bug.suite == "allocator.state"]
    assert head.split() == ["seed", "0", "seed", "1"]
    assert [line.split()[0] for line in lines[:-1]] == bugs
    assert lines[-1] == f"{len(bugs)} of {len(bugs)} caught at each of 2 seeds"
    stub(monkeypatch, {}, survivor="page-zero-freed")
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert f"{len(bugs) - 1} of {len(bugs)} caught at each of 2 seeds" in out
    assert "--seeds" in refused(["planted", "--seeds", "2"], capsys)
