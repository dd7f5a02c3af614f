"""Suites ``storage.state`` and ``storage.faults``: a cache of three tiers, threads left pending.

What goes wrong in storage needs a prompt that storage alone has (``store_and_forget``), and
somebody who changes the tree, gives up or detaches between the query, the reads and the scheduler's
next step. In ``storage.faults`` the store fails besides, at a drawn rate of each kind of fault.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from refcache.oracle.drivers.tier.driver import TierDriver
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.hicache import HiCacheMachine
from refcache.testing.machines.strategies import (
    chunks,
    index,
    namespaces,
    priorities,
    prompts,
    tier_configs,
    token,
)
from refcache.testing.machines.tree import TreeMachine

some = st.lists(index, min_size=0, max_size=4).map(tuple)
"""Launches and jobs that run."""
much = st.integers(4, 24)


class TierMachine(DriverMachine):
    """See the module docstring."""

    d: TierDriver
    make = TierDriver
    steps = 30

    admit = TreeMachine.admit
    proceed = TreeMachine.proceed
    finish = TreeMachine.finish
    match = TreeMachine.match
    insert = TreeMachine.insert
    evict = TreeMachine.evict
    reset = TreeMachine.reset
    bury = HiCacheMachine.bury
    _bury = HiCacheMachine._bury
    reload = HiCacheMachine.reload
    poll = HiCacheMachine.poll
    work = HiCacheMachine.work
    settle = HiCacheMachine.settle

    @initialize(config=tier_configs())
    def start(self, config: dict[str, Any]) -> None:
        self.begin(**config)

    @rule(tokens=prompts, extra_key=namespaces, work=some)
    def queue(self, tokens: Any, extra_key: Any, work: Any) -> None:
        self.d.queue(tokens, extra_key)
        self.d.work(work)

    @rule(which=index, poll=st.booleans())
    def progress(self, which: int, poll: bool) -> None:
        if poll:
            self.d.poll()
        self.d.progress(which)

    @rule(which=index, work=some)
    def give_up(self, which: int, work: Any) -> None:
        self.d.give_up(which)
        self.d.work(work)

    @rule(which=index, work=some)
    def abort_queued(self, which: int, work: Any) -> None:
        self.d.abort_queued(which)
        self.d.work(work)

    @rule(again=st.sampled_from([True, True, False]))
    def detach(self, again: bool) -> None:
        self.d.detach()
        if again:
            self.d.attach()

    @rule()
    def attach(self) -> None:
        self.d.attach()

    @rule(which=index)
    def lose(self, which: int) -> None:
        self.d.lose(which)

    def _store(self, tokens: Any, extra_key: Any) -> None:
        for _ in range(2):  # write_through_selective writes at the second visit
            self.d.insert(tokens, extra_key)
        self.d.settle()
        self.d.forget()

    @rule(
        tokens=prompts,
        tail=prompts,
        extra_key=namespaces,
        other=namespaces,
        work=some,
        then=st.sampled_from(["progress", "abort", "detach", "reset", "insert", "match", "queue"]),
        keep=st.integers(1, 12),
    )
    def store_and_forget(
        self, tokens: Any, tail: Any, extra_key: Any, other: Any, work: Any, then: str, keep: int
    ) -> None:
        """A prompt that storage alone has is asked for; something happens before it has come."""
        self._store(tokens, extra_key)
        self.d.queue((*tokens, *tail)[:15], extra_key)
        self.d.work(work)
        last = len(self.d.bench.waiting) - 1
        if then == "progress":
            self.d.progress(last)
        elif then == "abort":
            self.d.abort_queued(last)
        elif then == "detach":
            self.d.detach()
            self.d.attach()
        elif then == "reset":
            self.d.reset()
        elif then == "insert":
            self.d.insert(tokens[:keep], extra_key)
        elif then == "match":
            self.d.match((*tokens[:keep], *tail), extra_key)
        else:
            self.d.queue(tokens, other)

    @rule(tokens=prompts, tail=prompts, keep=st.integers(1, 12), work=some, before=st.booleans())
    def split_while_stored(
        self, tokens: Any, tail: Any, keep: int, work: Any, before: bool
    ) -> None:
        """A node is split before or after its copy to the host is acknowledged, while storage
        writes its pages; what is not used goes."""
        for _ in range(2):
            self.d.insert(tokens)
        if before:
            self.d.match((*tokens[:keep], *tail)[:15])
        for _ in range(2):
            self.d.work((*work, 0, 0))
            self.d.poll()
        self.d.match((*tokens[:keep], *tail)[:15])
        self.d.forget()

    @rule(tokens=prompts, tail=prompts, keep=st.integers(1, 12), work=some)
    def split_the_anchor(self, tokens: Any, tail: Any, keep: int, work: Any) -> None:
        """A request hangs from a node that is split while storage is asked; what is not used
        goes."""
        for _ in range(2):
            self.d.insert(tokens)
        self.d.settle()
        self.d.queue((*tokens, *tail)[:15])
        self.d.work(work)
        self.d.match((*tokens[:keep], *tail)[:15])
        self.d.forget()

    @rule(which=index, token=token, chunk=chunks, priority=priorities)
    def readmit(self, which: int, token: int, chunk: Any, priority: int) -> None:
        self.d.readmit(which, token, chunk, priority)


class TierFaultsMachine(TierMachine):
    """The same, over a store that fails."""

    @initialize(
        config=tier_configs(), rate=st.sampled_from([0.1, 0.1, 0.3]), seed=st.integers(0, 999)
    )
    def start(self, config: dict[str, Any], rate: float, seed: int) -> None:
        self.begin(**config, fault_rate=rate, fault_seed=seed)

    def teardown(self) -> None:
        super().teardown()
        if self.driver is not None:
            met = self.d.bench.store.met
            self.tally.faults += met.total()
            self.tally.pairs |= {("store", kind, 0) for kind in met}
