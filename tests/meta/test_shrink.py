"""Shrinking a log: what it comes to, what it tries, and what it may spend."""

from typing import Any

import pytest

from refcache.oracle import Violation, resolve
from refcache.oracle.program.driver import Driver, step
from refcache.oracle.program.shrink import shrink
from refcache.oracle.target.config import HiCacheConfig


class Sums(Driver):
    """A driver of nothing, with the configuration of two tiers: numbers must stay below ten."""

    Config = HiCacheConfig
    added = 0

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.total = 0

    @step
    def add(self, numbers: tuple[int, ...]) -> None:
        Sums.added += 1
        self.total += sum(numbers)
        self.trial.require(self.total < 10, "P1", f"{self.total}")


@pytest.fixture
def failing() -> Sums:
    """A program of eleven calls that breaks the rule at its last."""
    d = Sums(resolve("refcache"), page_size=2, size=8, host_size=20, write_policy="write_back")
    for i in range(9):
        d.add((i % 2, 0, 0))
    d.add((2, 0, 2))
    with pytest.raises(Violation):
        d.add((0, 0, 2))
    return d


def test_the_smallest_program_is_found_and_nothing_is_tried_twice(
    failing: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    made = Sums.__init__

    def init(self: Sums, *args: Any, **config: Any) -> None:
        made(self, *args, **config)
        tried.append("")

    def add(self: Sums, numbers: tuple[int, ...]) -> None:
        tried[-1] += f"{self.config} {self.log} {numbers}"
        original(self, numbers)

    original = Sums.add
    monkeypatch.setattr(Sums, "__init__", init)
    monkeypatch.setattr(Sums, "add", add)
    small = shrink(failing)
    assert small.config == HiCacheConfig(size=1)
    numbers = [number for _, (numbers,) in small.call_log for number in numbers]
    assert sum(numbers) == 10
    assert len(small.call_log) <= len(numbers) <= 7
    assert len(tried) < 1000
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("budget", [0, 1, 40, 200])
def test_the_budget_is_counted_in_calls(failing: Sums, budget: int) -> None:
    """The program that spends the last of it is ended."""
    Sums.added = 0
    small = shrink(failing, budget)
    assert small.found is not None
    assert Sums.added <= budget + failing.calls * (budget > 0)
