"""The same target, seed and size give the same cases, whatever else the process does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from environment import environment
from refcache.testing.registry import SUITES

PROGRAM = str(Path(__file__).parent.parent / "helpers" / "cases_program.py")
EXAMPLES = "20"
CONSTANTS = [*range(100, 600), *(i / 499 for i in range(1, 499)), -(2**40), 2**40]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The folder of a user's module, full of constants."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "of_a_user.py").write_text(f"CONSTANTS = {CONSTANTS}\n")
    return folder


def start(folder: Path, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    env = environment(folder, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", **variables)
    return subprocess.Popen(
        [sys.executable, PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=folder,
    )


def test_cases_depend_on_target_seed_and_size_only(theirs: Path) -> None:
    """Not on what is imported, hash seeds, a Hypothesis profile, the order of the suites, or on
    whether it is the command line, a campaign or pytest that runs them."""
    mine = {"PROFILE": "1", "REVERSED": "1", "CI": "1"}
    running = [
        start(theirs, "check", EXAMPLES, PYTHONHASHSEED="1"),
        start(theirs, "campaign", EXAMPLES, "of_a_user", "zipapp", PYTHONHASHSEED="2", **mine),
        start(theirs, "pytest", EXAMPLES, "refcache.cli.main", "of_a_user", PYTHONHASHSEED="3"),
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    first, *others = (json.loads(out.splitlines()[-1]) for out, _ in outputs)
    assert len(first) == len(SUITES)
    assert others == [first, first]
