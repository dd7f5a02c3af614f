"""Steps of the two-tier state machine a second, with every check and the race tracker, on one core.

A step is a step of the driver, as the suites count them. What is timed is all that it costs: to
draw it, to make the call, the checks after it. A run counts only if no rule is broken; the figure
is the median of 10,000 steps.
"""

import statistics
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import initialize, run_state_machine_as_test

from refcache.oracle import HiCacheDriver, resolve
from refcache.testing.machines.base import Tally, machine_for
from refcache.testing.machines.hicache import HiCacheMachine
from refcache.testing.machines.strategies import hicache_configs

TARGET = 500
COUNTED = 10_000


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_steps_a_second(benchmark: Any, page_size: int) -> None:
    torch.set_num_threads(1)
    times: list[float] = []

    class TimedDriver(HiCacheDriver):
        def __init__(self, *args: Any, **config: Any) -> None:
            super().__init__(*args, **config)
            self.last = time.process_time()

        def check(self) -> None:
            super().check()
            now = time.process_time()
            times.append(now - self.last)
            self.last = now

    class Timed(HiCacheMachine):
        make = TimedDriver

        @initialize(config=hicache_configs().filter(lambda c: c["page_size"] == page_size))
        def start(self, config: dict[str, Any]) -> None:
            self.begin(**config)

    tally = Tally()
    machine = seed(0)(machine_for(Timed, resolve("refcache"), tally))
    config = settings(
        max_examples=COUNTED // HiCacheMachine.steps,
        stateful_step_count=HiCacheMachine.steps,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    benchmark.pedantic(run_state_machine_as_test, (machine,), {"settings": config}, rounds=1)
    assert tally.failed is None
    assert len(times) >= COUNTED
    rate = 1 / statistics.median(times[:COUNTED])
    mean = COUNTED / sum(times[:COUNTED])
    benchmark.extra_info.update(steps=COUNTED, rate=rate, mean=mean, target=TARGET)
    print(f"\npage size {page_size}: {rate:.0f} steps a second (mean {mean:.0f}; target {TARGET})")
