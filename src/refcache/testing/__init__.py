"""Property suites for caches and allocators, with Hypothesis: strategies, machines, runs.

The names below are imported at first use: pytest loads :mod:`refcache.testing.plugin` in every
session where refcache is installed, and must not load PyTorch for it.
"""

from typing import TYPE_CHECKING

from refcache.lazy import lazy_names

if TYPE_CHECKING:
    from refcache.testing.registry import SUITES, Suite, list_suites
    from refcache.testing.run import Caught, Failure, SuiteResult, hunt, run_suite

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

__getattr__ = lazy_names(__name__)
