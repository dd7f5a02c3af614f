"""Property suites for caches and allocators, with Hypothesis: strategies, machines, runs.

The names below are imported at first use: pytest loads :mod:`refcache.testing.plugin` in every
session where refcache is installed, and must not load PyTorch for it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from refcache.testing.registry import SUITES, Suite
    from refcache.testing.run import Caught, Failure, SuiteResult, hunt, list_suites, run_suite

__all__ = [
    "SUITES",
    "Caught",
    "Failure",
    "Suite",
    "SuiteResult",
    "hunt",
    "list_suites",
    "run_suite",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "registry" if name in ("SUITES", "Suite") else "run"
    return getattr(importlib.import_module(f"refcache.testing.{home}"), name)
