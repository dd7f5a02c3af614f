"""The Hypothesis state machine of suite ``hicache.ranks``: ranks that differ in time only."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from refcache.oracle.drivers.ranks.driver import RanksDriver
from refcache.testing.machines.hicache import HiCacheMachine
from refcache.testing.machines.strategies import hicache_configs, index

delays = st.sampled_from([(True, False), (True, True), (False, True), (True, True, False)])


class RanksMachine(HiCacheMachine):
    """What ``hicache.state`` does, on two or three ranks; each machine is advanced on its own."""

    d: RanksDriver  # type: ignore[assignment]
    make = RanksDriver  # type: ignore[assignment]

    @initialize(config=hicache_configs(), delays=delays)
    def start(self, config: dict[str, Any], delays: Any) -> None:
        self.begin(**config | {"delays": delays})

    acknowledge_one_by_one = None  # type: ignore[assignment]  # it advances one machine

    @rule(rank=index, choices=st.lists(index, min_size=1, max_size=6).map(tuple))
    def work(self, rank: int, choices: Any) -> None:
        self.d.work(rank, choices)
