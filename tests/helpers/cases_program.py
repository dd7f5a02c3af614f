"""Prints a digest of the cases that each suite draws on the reference, as JSON.

``python cases_program.py WAY EXAMPLES [MODULE ...]``: a WAY is how the suites are run (``check``,
``campaign`` or ``pytest``); the modules are imported first. ``REVERSED`` in the environment runs
the suites from the last to the first, ``PROFILE`` loads a Hypothesis profile as a user may have it.
"""

import importlib
import json
import os
import sys
import tempfile
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import settings

from refcache.cli.workers import Run
from refcache.testing.campaign import Plan, one_run
from refcache.testing.machines.base import DriverMachine
from refcache.testing.registry import SUITES

drawn: dict[str, Any] = {}
wind_down = DriverMachine.teardown


def noting(machine: DriverMachine) -> None:
    """Note the program of a case when it ends."""
    name = type(machine).__name__
    drawn.setdefault(name, sha256()).update(repr((machine.d.log[0], machine.d.call_log)).encode())
    wind_down(machine)


def main(way: str, examples: int, *modules: str) -> None:
    """See the module's text."""
    for module in modules:
        importlib.import_module(module)
    if "PROFILE" in os.environ:
        settings.register_profile(
            "theirs", max_examples=3, derandomize=True, stateful_step_count=7, database=None
        )
        settings.load_profile("theirs")
    DriverMachine.teardown = noting  # type: ignore[method-assign]
    for suite in SUITES.values():
        suite.machine.opening = ()  # it is fixed
    suites = [*SUITES][:: -1 if "REVERSED" in os.environ else 1]
    if way == "check":
        for suite in suites:
            result = Run(suite, "refcache", examples, 0).work()
            assert result.verdict == "ok", result
    elif way == "campaign":
        with tempfile.TemporaryDirectory() as folder:
            for suite in suites:
                run = one_run(Plan("refcache", (), max_examples=examples), folder, suite, 0)
                assert run.verdict == "ok", run
    else:
        os.dup2(2, 1)
        options = ["--refcache-target=refcache", f"--refcache-examples={examples}"]
        tests = "refcache.testing.test_target"
        assert not pytest.main(["-q", "-p", "no:cacheprovider", "--pyargs", tests, *options])
    digests = {name: digest.hexdigest()[:16] for name, digest in sorted(drawn.items())}
    print(json.dumps(digests), file=os.fdopen(saved, "w"))


if __name__ == "__main__":
    saved = os.dup(1)
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
