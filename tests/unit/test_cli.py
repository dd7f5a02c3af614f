"""The command line refuses a wrong call in one line, with exit code 2 and nothing written."""

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import refused
from environment import environment
from refcache.cli.main import main
from refcache.readers import read_requests


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "No such command 'nope'"),
        (["--nope"], "No such option: --nope"),
        (["workload"], "Missing argument"),
        (["workload", "x", "--nope"], "No such option: --nope"),
        (["workload", "x", "--requests", "many"], "Invalid value for '--requests'"),
        (["workload", "x", "--requests", "0"], "requests=0: expected 1 to"),
        (["workload", "x", "--turns", "-1"], "turns=-1: expected 1 to"),
        (["workload", "."], "cannot be written: Is a directory"),
        (["workload", "absent/x"], "cannot be written: No such file or directory"),
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
    assert words in refused(arguments, capsys)
    assert list(tmp_path.iterdir()) == []


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: refcache" in capsys.readouterr().out


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "workload" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("refcache 0.")


def test_a_fault_of_ours_is_one_line_and_unknown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*args: object, **kwargs: object) -> None:
        raise KeyError("two\nlines")

    monkeypatch.setattr("refcache.cli.workload.write_requests", breaks)
    line = refused(["workload", "x", "--requests", "1"], capsys, code=3)
    assert "a fault of refcache itself: KeyError" in line


def test_interrupt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("refcache.cli.workload.write_requests", stops)
    assert main(["workload", "x", "--requests", "1"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_workload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert main(["workload", str(path), "--requests", "20", "--seed", "3"]) == 0
    assert len(read_requests(path).requests) == 20
    assert "20 requests" in capsys.readouterr().out
    again = tmp_path / "again.jsonl"
    assert main(["workload", str(again), "--requests", "20", "--seed", "3"]) == 0
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["check", "--without-edge", "list"], 3)]
)
def test_a_reader_that_leaves_is_no_error(arguments: list[str], code: int) -> None:
    """But a verdict that nobody could read is not "all is well"."""
    program = "from refcache.cli.main import run; run()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED="1"),
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait() == code
