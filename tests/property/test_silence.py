"""Suites of one tier are silent on the reference, and on the naive allocator and tree."""

import pytest
from hypothesis import settings

from refcache.oracle import resolve
from refcache.testing import run_suite


@pytest.mark.parametrize(
    ("suite", "target"),
    [
        ("allocator.state", "refcache"),
        ("allocator.state", "naive"),
        ("allocator.misuse", "refcache"),
        ("allocator.misuse", "naive"),
        ("allocator.exact", "refcache"),
        ("tree.state", "refcache"),
        ("tree.state", "naive"),
        ("tree.misuse", "refcache"),
        ("tree.misuse", "naive"),
        ("tree.exact", "refcache"),
        ("loop.state", "refcache"),
        ("loop.state", "naive"),
    ],
)
def test_silence(suite: str, target: str) -> None:
    result = run_suite(suite, resolve(target), max_examples=settings().max_examples)
    assert result.verdict == "ok", result.failure.text if result.failure else result.reason
    assert result.steps > 5 * result.cases > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("suite", "max_examples"),
    [
        ("allocator.state", 2000),
        ("allocator.misuse", 2000),
        ("tree.state", 1000),
        ("tree.misuse", 1000),
        ("loop.state", 500),
    ],
)
def test_silence_for_long(suite: str, max_examples: int, seed: int) -> None:
    result = run_suite(suite, resolve("refcache"), max_examples=max_examples, seed=seed)
    assert result.verdict == "ok", result.failure.text if result.failure else result.reason
