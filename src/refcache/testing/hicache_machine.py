"""The Hypothesis state machine of suite ``hicache.state``: two tiers, copies left pending."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from refcache.oracle.hicache_driver import HiCacheDriver
from refcache.testing.machines import TreeMachine
from refcache.testing.strategies import hicache_configs, index, namespaces, prompts

quotas = st.one_of(st.none(), st.none(), st.integers(0, 12))


class HiCacheMachine(TreeMachine):
    """Everything a one-tier tree does, and what moves between the tiers."""

    d: HiCacheDriver

    @initialize(config=hicache_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.d = HiCacheDriver(self.target, **config)
        self.start_driver(self.d)

    @rule(tokens=prompts, extra_key=namespaces, quota=quotas, start=st.booleans())
    def load_back(self, tokens: Any, extra_key: Any, quota: Any, start: bool) -> None:
        self.d.load_back(tokens, extra_key, quota, start)

    @rule()
    def start_loads(self) -> None:
        self.d.start_loads()

    @rule()
    def poll(self) -> None:
        self.d.poll()

    @rule(choices=st.lists(index, min_size=1, max_size=6).map(tuple))
    def work(self, choices: Any) -> None:
        self.d.work(choices)

    @rule()
    def settle(self) -> None:
        self.d.settle()
