"""The Hypothesis state machine of suite ``hicache.state``: two tiers, copies left pending.

What corrupts a host tier needs a prefix that is on the host only, over several nodes, while copies
run. Random calls seldom get there, so some rules make several calls: ``bury`` leaves a prompt on
the host, ``reload_two`` puts two loads into one batch. Each call is logged on its own, and a
failing program is reduced call by call.
"""

from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from refcache.oracle.drivers.hicache.driver import HiCacheDriver
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.strategies import (
    chunks,
    hicache_configs,
    index,
    long_prompts,
    namespaces,
    priorities,
    prompts,
    token,
)
from refcache.testing.machines.tree import TreeMachine

quotas = st.one_of(st.none(), st.none(), st.integers(0, 12))
much = st.integers(4, 24)


def _nothing(*_: Any) -> None:
    """A step that an overlap loop does not make."""


class HiCacheMachine(DriverMachine):
    """Most of what a one-tier tree does, and what moves between the tiers."""

    d: HiCacheDriver
    make = HiCacheDriver
    write_policy: ClassVar[str | None] = None
    """The only one that is drawn, if any."""

    admit = TreeMachine.admit
    admit_twins = TreeMachine.admit_twins
    proceed = TreeMachine.proceed
    cache = TreeMachine.cache
    decode = TreeMachine.decode
    finish = TreeMachine.finish
    abort = TreeMachine.abort
    retract = TreeMachine.retract
    match = TreeMachine.match
    insert = TreeMachine.insert
    evict = TreeMachine.evict
    hold = TreeMachine.hold
    unhold = TreeMachine.unhold
    reset = TreeMachine.reset

    @initialize(config=hicache_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.begin(**config)

    def begin(self, **config: Any) -> None:
        """As drawn, but with the write policy that the suite is held to.

        Without ``bare_calls``, and where nothing waits for forwards, only the calls of an overlap
        loop are made: no insert of KV that is being computed, no reset while copies run.
        """
        super().begin(**config | ({"write_policy": self.write_policy} if self.write_policy else {}))
        if not self.target.takes_bare_calls:
            vars(self.d).update(insert=_nothing, reset=_nothing)

    @rule(tokens=prompts, extra_key=namespaces, num_tokens=much)
    def bury(self, tokens: Any, extra_key: Any, num_tokens: int) -> None:
        self._bury(tokens, extra_key, num_tokens)

    @rule(tokens=prompts, tail=prompts, keep=st.integers(1, 12), num_tokens=much)
    def bury_two(self, tokens: Any, tail: Any, keep: int, num_tokens: int) -> None:
        self._bury(tokens, None, 0)
        self._bury((tokens[:keep] + tail)[:15], None, num_tokens)

    def _bury(self, tokens: Any, extra_key: Any, num_tokens: int) -> None:
        self.d.admit(tokens, extra_key)
        self.d.finish(len(self.d.requests) - 1)
        if num_tokens:
            self.d.poll()
            self.d.evict(num_tokens)

    @rule(which=index, token=token, chunk=chunks, priority=priorities)
    def readmit(self, which: int, token: int, chunk: Any, priority: int) -> None:
        self.d.readmit(which, token, chunk, priority)

    @rule(which=index, quota=quotas, start=st.booleans())
    def reload(self, which: int, quota: Any, start: bool) -> None:
        self.d.reload(which, quota, start)

    @rule(first=index, second=index)
    def reload_two(self, first: int, second: int) -> None:
        self.d.reload(first, None, False)
        self.d.reload(second, None, True)

    @rule(which=index, token=token, salt=index)
    def squeeze(self, which: int, token: int, salt: int) -> None:
        """A prompt as long as the device pool, so that the load after it must evict."""
        length = self.d.config.size - 1
        self._bury(tuple((i * i // 2 + salt) % 3 for i in range(length)), None, 0)
        self.d.readmit(which, token)

    @rule(tokens=prompts, again=prompts)
    def insert_and_reset(self, tokens: Any, again: Any) -> None:
        self.d.insert(tokens)
        self.d.reset()
        self.d.insert(again)

    @rule(which=index, length=index)
    def abort_and_reload(self, which: int, length: int) -> None:
        self.d.admit((2,) * (length + 2))
        self.d.abort(len(self.d.requests) - 1)
        self.d.reload(which)

    @rule(which=index)
    def reload_and_settle(self, which: int) -> None:
        self.d.reload(which)
        self.d.insert((which, 2, 1, 0))
        self.d.settle()

    @rule(
        tokens=prompts,
        keep=st.integers(1, 12),
        num_tokens=st.integers(1, 8),
        which=index,
        quota=quotas,
    )
    def reload_below(
        self, tokens: Any, keep: int, num_tokens: int, which: int, quota: int | None
    ) -> None:
        """A load that hangs from a node on the device which nobody locks: it is pinned newly."""
        self.d.insert(tokens[:keep])
        self.d.insert(tokens)
        self.d.settle()
        self.d.evict(num_tokens)
        self.d.reload(which, quota)

    @rule(tokens=prompts, count=st.integers(3, 5))
    def insert_side_by_side(self, tokens: Any, count: int) -> None:
        """Short nodes one after the other: their writes run at the same time."""
        for first in range(count):
            self.d.insert((first, *tokens[:4]))

    @rule(tokens=long_prompts, keep=st.sampled_from([1, 2, 4, 4, 15]), running=st.booleans())
    def load_into_full(self, tokens: Any, keep: int, running: bool) -> None:
        """A load from the host when what it hangs from, and perhaps one more node that was never
        written, are all that could make room for it on the device."""
        while self.d.holds:
            self.d.unhold(0)
        while self.d.requests:
            self.d.abort(0)
        self.d.insert(tokens)
        self.d.insert(tokens)  # write_through_selective writes at the second visit
        self.d.settle()
        self.d.evict(self.d.config.size)
        self.d.insert(tokens[:keep])
        self.d.hold(tokens[:keep])
        self.d.load_back(tokens, None, 0)
        self.d.fill()
        if not running:
            self.d.finish(0)
        self.d.unhold(0)
        self.d.load_back(tokens)

    @rule(pages=st.integers(1, 2))
    def load_three(self, pages: int) -> None:
        """Three prompts that share nothing are on the host only, and come back in one load."""
        length = pages * self.d.config.page_size + self.d.config.is_eagle
        self._insert_apart(range(3), length)
        self.d.settle()
        self.d.evict(self.d.config.size)
        for first in range(3):
            self.d.load_back((first,) * length, None, None, False)
        self.d.settle()

    @rule(pages=st.integers(1, 2), choices=st.lists(index, min_size=30, max_size=30))
    def acknowledge_one_by_one(self, pages: int, choices: Any) -> None:
        """Two writes run; after each launch what is done is acknowledged. Then all that is not
        locked is evicted, and its slots are written again."""
        self._insert_apart(range(2), pages * self.d.config.page_size + self.d.config.is_eagle)
        for choice in choices:
            if sum(copy.kind == "write" for copy in self.d.bench.host().transfers) < 2:
                break
            self.d.work((choice,))
            self.d.poll()
        self.d.evict(self.d.config.size)
        self.d.insert((2,) * (self.d.config.size + self.d.config.is_eagle))
        self.d.settle()

    def _insert_apart(self, firsts: Any, length: int) -> None:
        for _ in range(2):  # write_through_selective writes at the second visit
            for first in firsts:
                self.d.insert((first,) * length)

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
