"""Suite of the serving loop."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from refcache.oracle import LoopDriver
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.strategies import (
    index,
    loop_configs,
    namespaces,
    priorities,
    prompts,
)


class LoopMachine(DriverMachine):
    """Suite ``loop.state``."""

    d: LoopDriver
    make = LoopDriver

    @initialize(config=loop_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.begin(**config)

    @rule(
        tokens=prompts,
        max_new_tokens=st.integers(1, 6),
        extra_key=namespaces,
        priority=priorities,
    )
    def submit(self, tokens: Any, max_new_tokens: int, extra_key: Any, priority: int) -> None:
        self.d.submit(tokens, max_new_tokens, extra_key, priority)

    @rule(batch=st.lists(prompts, min_size=2, max_size=3), max_new_tokens=st.integers(1, 6))
    def submit_together(self, batch: Any, max_new_tokens: int) -> None:
        for tokens in batch:
            self.d.submit(tokens, max_new_tokens)

    @rule(steps=st.integers(1, 4))
    def run(self, steps: int) -> None:
        self.d.run(steps)

    @precondition(lambda self: self.d.scheduler.live_reqs)
    @rule(index=index)
    def abort(self, index: int) -> None:
        self.d.abort(index)

    @precondition(lambda self: self.d.running)
    @rule()
    def retract(self) -> None:
        self.d.retract()

    @rule(num_tokens=st.integers(1, 9))
    def evict(self, num_tokens: int) -> None:
        self.d.evict(num_tokens)

    @precondition(lambda self: self.d.scheduler.is_idle())
    @rule()
    def flush(self) -> None:
        self.d.flush()
