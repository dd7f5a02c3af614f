"""The Hypothesis state machine of suite ``hicache.faults``: inner steps of calls raise.

Programs are those of ``hicache.state``; their calls are made again and again, each time with
another of their inner steps raising (:mod:`refcache.oracle.drivers.hicache.faults`). Some calls are
made in peace only, or nothing would ever reach the host.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from refcache.testing.machines.hicache import HiCacheMachine
from refcache.testing.machines.strategies import hicache_configs, prompts

faults = st.fixed_dictionaries(
    {
        "fault": st.sampled_from([1, 1, 1, 2, 3, 5, 8, 13, 21]),
        "fault_calls": st.sampled_from([1, 2, 3, 5, 7]),
        "fault_tensors": st.booleans(),
        "delay": st.booleans(),
    }
)


class FaultsMachine(HiCacheMachine):
    """See the module docstring."""

    steps = 25

    @initialize(config=hicache_configs(), faults=faults)
    def start(self, config: dict[str, Any], faults: Any) -> None:
        config |= {"reentrant": False, "io_backend": "kernel"} | faults
        self.begin(**config)

    @rule(pages=st.integers(1, 2))
    def copy_by_hand(self, pages: int) -> None:
        self.d.copy_by_hand(pages)

    @rule(batch=st.lists(prompts, min_size=1, max_size=3).map(tuple), overlap=st.booleans())
    def serve(self, batch: Any, overlap: bool) -> None:
        self.d.serve(batch, overlap)

    def teardown(self) -> None:
        super().teardown()
        if self.driver is not None and self.d.bench.faults is not None:
            self.tally.faults += self.d.bench.faults.met
            self.tally.pairs |= self.d.bench.faults.pairs
