"""Run SGLang's own tests of its cache on refcache: nothing but their imports is redirected.

``PYTHONPATH=src:aliases python scripts/sglang_tests.py FILE_OR_FOLDER...``, with test files of
SGLang 0.5.10, for example from a clone of its repository::

    test/registered/unit/mem_cache/test_radix_cache_unit.py
    test/registered/unit/mem_cache/test_evict_policy.py
    test/registered/unit/managers/test_prefill_adder.py
    test/manual/test_schedule_policy.py

``from sglang.srt.x.y import Name`` gives refcache's public ``Name``, wherever it lives here, and an
ImportError if there is none. ``HARNESS`` is what else those files import: the registration with a
CI, the base class of the test cases, and a global that refcache does not have. Prints every test
that does not pass, with the error, then the counts; exits with 0 when every test could be run.
"""

import argparse
import importlib
import importlib.abc
import importlib.machinery
import sys
import unittest
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch

HOMES = (
    "refcache.types",
    "refcache.keys",
    "refcache.events",
    "refcache.allocator",
    "refcache.pool",
    "refcache.controller",
    "refcache.tree",
    "refcache.engine",
    "refcache.engine.alloc",
)
"""Where a public name may live, lowest floor first."""


def nothing(*_: Any, **__: Any) -> None:
    """What registering a test with a CI, or setting a global, does here."""


HARNESS = {
    "CustomTestCase": unittest.TestCase,
    "get_device": lambda *_: "cuda" if torch.cuda.is_available() else "cpu",
    "register_amd_ci": nothing,
    "register_cpu_ci": nothing,
    "register_cuda_ci": nothing,
    "set_global_server_args_for_scheduler": nothing,
}


def find(name: str) -> Any:
    """refcache's public ``name``, or ImportError."""
    for home in HOMES:
        module = importlib.import_module(home)
        if name in vars(module):
            return vars(module)[name]
    if name in HARNESS:
        return HARNESS[name]
    raise ImportError(f"refcache has no {name}")


class Redirected(ModuleType):
    """A module ``sglang...``: its names are refcache's."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every module below ``sglang`` a :class:`Redirected` one."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] == "sglang":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Redirected(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Outcomes:
    """A pytest plugin: the outcome of each test, and of each file that cannot be imported."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}
        self.errors: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        failed_before = self.tests.get(report.nodeid) == "failed"  # in a subtest
        if not failed_before and (report.when == "call" or report.outcome != "passed"):
            self.tests[report.nodeid] = report.outcome
            if report.failed:
                self.errors[report.nodeid] = last_line(report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors[report.nodeid] = last_line(report)


def last_line(report: Any) -> str:
    """The error of a report, in one line."""
    lines = [line[1:].strip() for line in report.longreprtext.splitlines() if line[:2] == "E "]
    return lines[-1] if lines else report.longreprtext.splitlines()[-1]


def main() -> int:
    """The command; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+")
    parser.add_argument("-k", default="", help="only tests whose names match, as in pytest")
    given = parser.parse_args()
    sys.meta_path.insert(0, Finder())
    outcomes = Outcomes()
    options = ["-p", "no:cacheprovider", "-p", "no:terminalreporter", "-c", "/dev/null"]
    options += ["--rootdir", "/", "--continue-on-collection-errors", "-k", given.k]
    pytest.main([*options, *given.paths], plugins=[outcomes])
    for name, error in outcomes.errors.items():
        print(f"{name.rpartition('/')[2]}\n    {error}")
    for file in sorted({name.partition("::")[0] for name in (*outcomes.tests, *outcomes.errors)}):
        counts = Counter(o for name, o in outcomes.tests.items() if name.startswith(file))
        told = ", ".join(f"{n} {o}" for o, n in sorted(counts.items())) or "cannot be imported"
        print(f"{file.rpartition('/')[2]}: {told}")
    return 0 if outcomes.tests else 1


if __name__ == "__main__":
    sys.exit(main())
