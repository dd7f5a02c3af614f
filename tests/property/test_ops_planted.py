"""Every planted kernel bug passes its smoke test and is caught by the suite."""

import subprocess
import sys

import pytest

from environment import environment
from refcache.errors import InvalidArgument
from refcache.oracle import resolve
from refcache.planted import PlantedBug, kernels
from refcache.testing import hunt, run_suite

pytest.importorskip("triton")


@pytest.mark.parametrize("bug", kernels.BUGS, ids=lambda bug: bug.name)
def test_planted_kernel_bug_is_caught(bug: PlantedBug) -> None:
    caught = hunt(bug)
    assert caught.smoke, "the smoke test sees it"
    assert caught.used, "the patched code was not executed"
    assert caught.by in ("OP1", "OP2", "OP3"), caught.failure and caught.failure.text


def test_the_kernels_themselves_pass() -> None:
    result = run_suite("ops.transfer", resolve("refcache"), max_examples=20)
    assert (result.verdict, result.cases) == ("ok", 3)
    for bug in kernels.BUGS:
        bug.smoke(resolve("refcache"))


def test_a_bug_whose_line_is_gone_says_so() -> None:
    gone = kernels.line("gone", "slip", "", kernels.COPY, "no such line", "")
    with pytest.raises(InvalidArgument, match="0 times"), gone.active():
        pass


def test_a_printed_program_ends_without_a_word_after_the_violation() -> None:
    program = "from refcache.planted import plant; plant('kernel-page-in-32-bits')"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
