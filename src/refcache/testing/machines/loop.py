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
    token,
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

    @rule(
        tokens=prompts,
        other=prompts,
        more=st.lists(token, min_size=1, max_size=3).map(tuple),
        beyond=st.integers(-1, 1),
        outputs=st.integers(1, 6),
    )
    def submit_again(self, tokens: Any, other: Any, more: Any, beyond: int, outputs: int) -> None:
        """A prompt of half the pool, another one that runs on, and the first with more behind it:
        when it comes to the third, its prefix is cached, unlocked, and most of what can be
        evicted."""
        half = (self.d.config.size + 1) // 2 + beyond
        first, second = ((prompt * half)[:half] for prompt in (tokens, other))
        self.d.submit(first)
        self.d.submit(second, outputs)
        self.d.submit((*first, *more))

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
