"""The pytest plugin: options, expected failures, and nothing at all for everybody else."""

import subprocess
import sys
from pathlib import Path

import pytest

from environment import environment
from refcache.errors import InvalidArgument
from refcache.testing import Failure, SuiteResult, list_suites
from refcache.testing.xfails import Xfails, read_xfails

LENIENT = """
from refcache.oracle import Target
from refcache.oracle import NaiveAllocator


class Lenient(NaiveAllocator):
    def free(self, free_index):
        try:
            super().free(free_index)
        except ValueError:
            pass


class MyTarget(Target):
    capabilities = frozenset({"allocator", "refuses_misuse"})

    def allocator(self, config):
        return Lenient(config.size, config.page_size)
"""
FAILURE = Failure("P1", "a sentence", "some evidence", (), "the whole text")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lenient.py").write_text(LENIENT)
    return tmp_path


def run(folder: Path, *options: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of pytest over the packaged suites."""
    command = [sys.executable, "-m", "pytest", "-q", "-rsxX", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--pyargs", "refcache.testing", *options],
        cwd=folder,
        env=environment(folder, COLUMNS="200", **variables),
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


SMALL = ("--refcache-examples", "20", "--refcache-seed", "1")


def test_options_name_the_target_and_the_size(folder: Path) -> None:
    code, out = run(folder, "--refcache-target", "lenient:MyTarget", *SMALL)
    assert code == 1, out
    assert f"1 failed, 2 passed, {len(list_suites()) - 3} skipped" in out
    assert "REFUSE: " in out
    assert "Traceback" not in out
    same = run(
        folder, REFCACHE_TARGET="lenient:MyTarget", REFCACHE_EXAMPLES="20", REFCACHE_SEED="1"
    )
    assert same[0] == 1
    assert f"1 failed, 2 passed, {len(list_suites()) - 3} skipped" in same[1]


def test_expected_failures(folder: Path) -> None:
    (folder / "known").write_text(
        "# known\nallocator.misuse  # lenient\n\nallocator.state:P1\nno.e\n"
    )
    options = ("--refcache-target", "lenient:MyTarget", "--refcache-xfails", "known")
    code, out = run(folder, *options, *SMALL)
    assert code == 0, out
    assert "1 xfailed, 1 xpassed" in out
    assert "refcache: xfail no.e matches no suite and rule" in out
    (folder / "known").write_text("allocator.misuse:P1\n")
    code, out = run(folder, *options, *SMALL)
    assert code == 1, out
    assert "1 failed, 2 passed" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--refcache-xfails", "absent"], "refcache: xfails absent: cannot be read"),
        (["--refcache-xfails", "bad"], "refcache: xfails bad:2: 'P 1': expected a suite"),
        (["--refcache-examples", "0"], "refcache: examples '0': expected 1 or more"),
        (["--refcache-examples", "x"], "invalid int value: 'x'"),
        (["--refcache-seed", "-1"], "refcache: seed '-1': expected 0 or more"),
    ],
)
def test_wrong_options_are_refused(folder: Path, options: list[str], words: str) -> None:
    (folder / "bad").write_text("tree.state\nP 1\n")
    code, out = run(folder, *options)
    assert code == 4
    assert words in out
    assert "Traceback" not in out


def test_loading_the_plugin_loads_nothing_heavy() -> None:
    code = (
        "import sys, pytest; import refcache.testing.plugin; "
        "print(sorted(n for n in sys.modules if n.partition('.')[0] in ('torch', 'hypothesis') "
        "or n.startswith('refcache.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    names = ("lazy", "testing", "testing.plugin")
    assert done.stdout.strip() == str([f"refcache.{name}" for name in names])


def test_the_file_of_expected_failures(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text("# all\n\n  tree.misuse # lax\ntree.state:P1\ntree.misuse\nodd.one:P1\n")
    xfails = read_xfails(path)
    assert xfails.ids == ("tree.misuse", "tree.state:P1", "odd.one:P1")
    assert xfails.unmatched(["tree.misuse", "tree.state"]) == ["odd.one:P1"]
    assert Xfails(("tree.state:P99",)).unmatched(["tree.state"]) == ["tree.state:P99"]
    for text, line in (("tree", 1), ("# x\ntree.state:", 2), ("tree.state P1", 1)):
        path.write_text(text)
        with pytest.raises(InvalidArgument, match=f"known:{line}: "):
            read_xfails(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        read_xfails(path)


@pytest.mark.parametrize(
    ("ids", "verdict", "shown"),
    [
        ((), "violation", "violation"),
        (("tree.state",), "violation", "xfail"),
        (("tree.state:P1",), "violation", "xfail"),
        (("tree.state:P2",), "violation", "violation"),
        (("tree.misuse",), "violation", "violation"),
        (("tree.state:P2",), "ok", "xpass"),
        (("tree.state",), "skipped", "skipped"),
        (("tree.state",), "unknown", "unknown"),
    ],
)
def test_what_is_expected(ids: tuple[str, ...], verdict: str, shown: str) -> None:
    failure = FAILURE if verdict == "violation" else None
    row = SuiteResult("tree.state", 1, 1, verdict, failure)
    assert Xfails(ids).apply(row).verdict == shown
