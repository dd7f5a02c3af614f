"""Property suites for caches and allocators, with Hypothesis: strategies, machines, runs."""

from refcache.testing.registry import SUITES, Suite
from refcache.testing.run import Failure, SuiteResult, list_suites, run_suite

__all__ = ["SUITES", "Failure", "Suite", "SuiteResult", "list_suites", "run_suite"]
