"""Property suites for caches and allocators, with Hypothesis: strategies, machines, runs."""

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
