"""Drives a two-tier tree cache on the simulated machine, with copies left pending for as long as
the program likes.

Everything :class:`~refcache.oracle.tree_driver.TreeDriver` does, and: load-back at admission and on
its own, with quotas; forwards and copies as launches on streams, their bytes checked when they run;
the machine advanced launch by launch (``work``); acknowledgements polled (``poll``), or everything
finished (``settle``). The tracker reports every pair of accesses that nothing orders.

The forward pass writes rows that name their origin (:mod:`refcache.tags`) into the device pool, and
reads the request's whole row through the pool's getters, which wait for the layers of a load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from refcache.errors import InvalidArgument, RefcacheError
from refcache.oracle.driver import step
from refcache.oracle.event_check import EventReplay
from refcache.oracle.host_content import HostContent
from refcache.oracle.host_invariants import HostState, InFlight, check_host_state
from refcache.oracle.host_view import HostView, TransferView
from refcache.oracle.invariants import State
from refcache.oracle.ledger import Prefix, RecordingAllocator
from refcache.oracle.reentry import EvictingAllocator
from refcache.oracle.request import Request
from refcache.oracle.target import CacheConfig
from refcache.oracle.tree_driver import TreeDriver
from refcache.oracle.violation import Violation
from refcache.runtime import SimulatedRuntime, Tracker, eager, lazy

HITS_UNTIL_WRITTEN = {"write_through": 1, "write_through_selective": 2, "write_back": None}


@dataclass(frozen=True)
class HiCacheConfig(CacheConfig):
    """How a two-tier cache under test is built.

    ``host_size`` in tokens, whole pages, more than ``size``; 0 means one page more. ``delay``:
    launches wait until the program or the cache makes them run; else they run at once.
    ``reentrant``: every allocation, on either tier, first evicts all that can be evicted there.
    """

    host_size: int = 0
    write_policy: str = "write_through"
    layout: str = "layer_first"
    io_backend: str = "kernel"
    load_back_threshold: int = 1
    hit_policy: str = "per_visit"
    mla: bool = False
    tp_group: Any = None
    delay: bool = True
    reentrant: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_size == 0:
            object.__setattr__(self, "host_size", self.size + self.page_size)
        if self.host_size <= self.size or self.host_size % self.page_size:
            raise InvalidArgument(
                f"host_size={self.host_size}: expected whole pages, more than size={self.size}"
            )


class HiCacheParts(NamedTuple):
    """What a target makes: a tree over ``allocator`` and ``rows``, whose KV is in ``pool``.

    ``counter``: the layer counter whose ``set_consumer`` the worker calls before a forward.
    ``host_pool``: its ``alloc`` is watched for refusals; ``host_planes``: its buffers, one a plane.
    """

    tree: Any
    allocator: Any
    rows: Any
    pool: Any
    host_pool: Any
    host_planes: Any
    counter: Any


class HiCacheDriver(TreeDriver):
    """See the module docstring.

    Attributes:
        machine: the simulated machine; ``forward_stream``: where forwards run.
        in_flight: copies that are not acknowledged, by (kind, op), as they were submitted.
    """

    needs = frozenset({"allocator", "tree", "inspect", "hicache"})
    Config = HiCacheConfig
    config: HiCacheConfig

    def build(self) -> None:
        c = self.config
        self.machine = SimulatedRuntime(lazy if c.delay else eager, Tracker())
        self.forward_stream = self.machine.Stream("forward")
        self.in_flight: dict[tuple[str, Any], InFlight] = {}
        self.consumer = -1
        self.no_room = False
        self._seen: dict[str, Any] | None = None
        self.host_events = EventReplay(above=lambda: self.events)

        def wrap(allocator: Any) -> RecordingAllocator:
            kind = EvictingAllocator if c.reentrant else RecordingAllocator
            return kind(allocator, self.ledger)

        parts: HiCacheParts = self.on_target(
            self.target.hicache, c, self.machine, self.forward_stream, wrap
        )
        self.tree, self.allocator, self.rows, self.pool = parts[:4]
        self.counter = parts.counter
        self.content = HostContent(self.pool, parts.host_planes, c.layout, c.page_size)
        self._watch(parts.host_pool)
        if isinstance(self.allocator, EvictingAllocator):
            everything = self.target.EvictParams(num_tokens=c.size)
            self.allocator.make_room = lambda: self.tree.evict(everything)

    def _watch(self, host_pool: Any) -> None:
        """See from outside when the host pool refuses, and what a host eviction frees."""
        alloc, free, evict_host = host_pool.alloc, host_pool.free, self.tree.evict_host
        freed: list[int] = []
        refusals = 0

        def watched_alloc(need_size: int) -> Any:
            nonlocal refusals
            if self.config.reentrant:
                self.tree.evict_host(self.config.host_size)
            slots = alloc(need_size)
            refusals = refusals + 1 if slots is None else 0
            self.no_room |= refusals > 1
            return slots

        def watched_free(indices: torch.Tensor) -> Any:
            freed.append(len(indices))
            return free(indices)

        def watched_evict_host(num_tokens: int) -> Any:
            freed.clear()
            count = evict_host(num_tokens)
            total = sum(freed)
            if count != total:
                self.note("E1", f"evict_host returned {count}, it freed {total} slots")
            if freed and total - freed[-1] >= num_tokens:
                self.note("E2", f"evict_host({num_tokens}) freed {freed}, the last for nothing")
            host = self._host()
            left = [n for n in host.leaves if not host.nodes[n].host_ref]
            if total < num_tokens and left:
                self.note("E3", f"evict_host({num_tokens}) freed {total}, {left[0]!r} is left")
            return count

        host_pool.alloc, host_pool.free = watched_alloc, watched_free
        self.tree.evict_host = watched_evict_host

    # ---- steps -----------------------------------------------------------------------------------

    @step
    def load_back(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        quota: int | None = None,
        start: bool = True,
    ) -> None:
        """A match, and a load of what is only on the host, without the scheduler's own lock."""
        self._load_back(tokens, extra_key, quota, start)

    def _load_back(
        self, tokens: Sequence[int], extra_key: str | None, quota: int | None, start: bool
    ) -> None:
        found = self._match(tokens, extra_key)
        if found.host_hit_length:
            self._load(found, tokens, extra_key, quota)
            if start:
                self._start_loads()

    @step
    def readmit(self, which: int, token: int, chunk: int | None = None, priority: int = 0) -> None:
        """Admit a request for something that is on the host only, and one token more."""
        known = self._on_host_only(which)
        if known is not None:
            self._admit((*known[0], token), known[1], chunk, priority)

    @step
    def reload(self, which: int, quota: int | None = None, start: bool = True) -> None:
        """``load_back`` of something that is on the host only."""
        known = self._on_host_only(which)
        if known is not None:
            self._load_back(*known, quota, start)

    def _on_host_only(self, which: int) -> tuple[tuple[int, ...], str | None] | None:
        state = self.state()
        places = [i for i, node in enumerate(state.view.nodes) if node.device is None]
        if not places:
            return None
        index = places[which % len(places)]
        return tuple(self.content.tokens(state, index)), state.view.nodes[index].extra_key

    @step
    def start_loads(self) -> None:
        """``ready_to_load_host_cache``, for a batch that comes later."""
        self._start_loads()

    @step
    def poll(self) -> None:
        """``check_hicache_events``: acknowledge what is done."""
        self._poll()

    @step
    def work(self, choices: Sequence[int]) -> None:
        """The machine runs a few launches: of the streams that could go on, the one named."""
        for choice in choices:
            ready = self.machine.runnable()
            if ready:
                self._on_machine(self.machine.run_next, ready[choice % len(ready)])

    @step
    def settle(self) -> None:
        """Every launch finishes and is acknowledged; every byte on both tiers is compared."""
        self._settle_all()

    def _settle_all(self) -> None:
        self._start_loads()
        self._on_machine(self.machine.synchronize)
        self._poll()
        left = [f"{t.kind} {t.op}" for t in self._host().transfers]
        self.require(not left, "L6", f"every copy is done and polled, but {left} are not released")
        state = self.state()
        for violation in self.content.compare(state):
            raise violation
        self._check_host_events()

    @step
    def wind_down(self) -> None:
        """End every request, drop every lock, empty both tiers: nothing may be left over."""
        while self.requests:
            self._finish(self.requests[0], insert=self.requests[0].prefilled)
        while self.holds:
            self._unlock(*self.holds.pop())
        self._settle_all()
        self.on_target(self.tree.evict_host, self.config.host_size)
        self._evict(self.config.size)
        free = int(self.on_target(self.allocator.available_size))
        self.require(
            free == self.config.size,
            "P1",
            f"{free} of {self.config.size} tokens are free after everything was evicted",
        )
        self.on_target(self.tree.evict_host, self.config.host_size)
        host_free = len(self._host().free)
        self.require(
            host_free == self.config.host_size,
            "H1",
            f"{host_free} of {self.config.host_size} host slots are free after everything was "
            "evicted",
        )

    # ---- what the steps are made of --------------------------------------------------------------

    def on_target(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().on_target(self._guard(function), *args, **kwargs)
        return result

    def _guard(self, function: Any) -> Any:
        """What the tracker reports inside a call is the violation, not a crash."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except RefcacheError as error:
                race = self.content.as_violation(error)
                if race is None:
                    raise
                raise race from error

        guarded.__qualname__ = getattr(function, "__qualname__", repr(function))
        return guarded

    def _on_machine(self, function: Any, *args: Any) -> None:
        self.on_target(function, *args)

    def _poll(self) -> None:
        self.on_target(self.tree.check_hicache_events)

    def _last_victim(self, calls: Sequence[int]) -> int:
        """Under write-back a victim may be freed later than one chosen after it: any of them."""
        return max(calls) if self.config.write_policy == "write_back" else calls[-1]

    def _before_reset(self) -> None:
        if "refuses_misuse" not in self.target.capabilities:  # it may neither refuse nor wait
            self._settle_all()

    def _start_loads(self) -> None:
        index = self.on_target(self.tree.ready_to_load_host_cache)
        if index >= 0:
            self.consumer = index

    def state(self) -> State:
        if self._seen is None:
            return super().state()
        if "state" not in self._seen:
            self._seen["state"] = super().state()
        state: State = self._seen["state"]
        return state

    def _host(self) -> HostView:
        seen = {} if self._seen is None else self._seen
        if "host" not in seen:
            seen["host"] = self.target.inspect_host(self.tree)
        host: HostView = seen["host"]
        return host

    def _match(self, tokens: Sequence[int], extra_key: str | None) -> Any:
        self.ledger.may_free = self.ledger.only(set())
        key = self.target.RadixKey(list(tokens), extra_key)
        found = self.on_target(self.tree.match_prefix, self.target.MatchPrefixParams(key=key))
        slots = found.device_indices.tolist()
        here = self.ledger.longest((extra_key, self._elements(tokens)))
        self.require(
            slots == self.ledger.slots(here),
            "C1",
            f"match gave slots {slots}, but the KV is in {self.ledger.slots(here)}",
        )
        cached = self.content.longest(self.state(), extra_key, self._elements(tokens))
        self.require(
            len(slots) + found.host_hit_length == cached,
            "M0",
            f"match found {len(slots)} tokens on the device and {found.host_hit_length} on the "
            f"host, but {cached} are cached",
        )
        return found

    def _bring(
        self, found: Any, tokens: Sequence[int], extra_key: str | None
    ) -> tuple[Any, torch.Tensor]:
        """Lock, load the host hit, unlock: as the scheduler admits a request."""
        slots = found.device_indices
        if not found.host_hit_length:
            return found.last_device_node, slots
        prefix = (extra_key, self._elements(tokens)[: len(slots)])
        self._lock(found.last_device_node, prefix)
        node, loaded = self._load(found, tokens, extra_key, None)
        self._unlock(found.last_device_node, prefix)
        return node, torch.cat([slots, loaded])

    def _load(
        self, found: Any, tokens: Sequence[int], extra_key: str | None, quota: int | None
    ) -> tuple[Any, torch.Tensor]:
        hit, before = found.host_hit_length, len(found.device_indices)
        self.ledger.may_free = self.ledger.only_unlocked
        self.ledger.freed = []
        slots, node = self.on_target(
            self.tree.init_load_back,
            self.target.InitLoadBackParams(
                last_host_node=found.last_host_node, host_hit_length=hit, mem_quota=quota
            ),
        )
        got = slots.tolist()
        refused = hit < self.config.load_back_threshold or (quota is not None and hit > quota)
        self.require(
            len(got) in (0, hit) and not (got and refused),
            "Q1",
            f"a load of {hit} tokens (threshold {self.config.load_back_threshold}, quota {quota}) "
            f"gave {len(got)}",
        )
        if not got:
            self.require(
                node == found.last_device_node,
                "B1",
                f"nothing was loaded; the last node is {node!r}, not {found.last_device_node!r}",
            )
            if not refused and quota is None and self.config.write_policy != "write_back":
                room = int(self.allocator.available_size()) + self._evictable()
                self.require(
                    room - before < hit,
                    "Q2",
                    f"a load of {hit} was refused, {room} tokens are free",
                )
            return node, slots
        elements = self._elements(tokens)[: before + hit]
        self.ledger.take(got, "the load")
        self.raise_noted()
        for part in self.ledger.prefixes((extra_key, elements)):
            if len(part[1]) > before:
                self.ledger.adopt(part, got[len(part[1]) - 1 - before] // self.page_size)
        return node, slots

    def _must_stay(self) -> bool:
        """Under write-back: leaves above nodes that are on the host only, without room there."""
        view = self.target.inspect(self.tree)
        above = {node.parent for node in view.nodes if node.device is None}
        leaves = view.evictable_leaves or frozenset()
        tight = self.config.write_policy == "write_back" and self.no_room
        return tight and all(view.nodes[i].host is None and i in above for i in leaves)

    def _write_kv(
        self, row: list[int], start: int, tokens: tuple[int, ...], extra_key: str | None
    ) -> None:
        self._start_loads()  # the scheduler does so before every batch
        machine = self.machine

        def forward() -> None:
            with machine.stream(self.forward_stream):
                self.forward_stream.wait_stream(machine.default_stream())
                self.counter.set_consumer(self.consumer)
                self.content.forward(machine, row, start, tokens, extra_key, self.note)
                self.counter.set_consumer(-1)

        self.on_target(forward)
        self.consumer = -1
        self._results = machine.Event()
        self._results.record(self.forward_stream)
        if "fences" not in self.target.capabilities:
            self._on_machine(self._results.synchronize)

    def _cache(self, req: Request) -> None:
        self._on_machine(self._results.synchronize)
        super()._cache(req)

    def _finish(self, req: Request, insert: bool) -> None:
        if insert:
            self._on_machine(self._results.synchronize)
        super()._finish(req, insert)

    def _row_slots(self, req: Request) -> torch.Tensor:
        slots: torch.Tensor = self.rows.read(req.req_pool_idx, slice(0, req.allocated))
        return slots

    def _holders(self) -> list[Any]:
        return super()._holders() + [t.handles[-1] for t in self._host().transfers if t.locks]

    # ---- checks ----------------------------------------------------------------------------------

    def _read_check(self, req: Request) -> None:
        """Rows are compared when the forward runs; see ``HostContent.forward``."""

    def check(self) -> None:
        self._seen = {}  # no check changes anything: all of them look at one view
        try:
            super().check()
            self._check_host()
        finally:
            self._seen = None

    def _check_events(self, events: EventReplay) -> None:
        taken = self.on_target(self.tree.take_events)
        for event in taken:
            medium = getattr(event, "medium", None)
            if medium in (None, "GPU"):
                events.apply([event])
            if medium != "GPU":
                self.host_events.apply([event])
        events.check(self.ledger)

    def _check_host(self) -> None:
        c, state, host = self.config, self.state(), self._host()
        live = {(t.kind, t.op): t for t in host.transfers}
        self.in_flight = {key: op for key, op in self.in_flight.items() if key in live}
        for key, transfer in live.items():
            if key not in self.in_flight:
                self.in_flight[key] = InFlight(transfer, self._pages_of(state, transfer))
        check_host_state(
            HostState(
                state,
                host,
                prefix_closed=c.write_policy != "write_back",
                in_flight=list(self.in_flight.values()),
                threshold=HITS_UNTIL_WRITTEN[c.write_policy],
                no_room=self.no_room,
            )
        )

    def _pages_of(self, state: Any, transfer: TransferView) -> dict[Prefix, tuple[int, int]]:
        size = self.page_size
        pages: dict[Prefix, tuple[int, int]] = {}
        for index, prefix in state.view.paths():
            node = state.view.nodes[index]
            if node.handle not in transfer.handles or node.host is None or node.device is None:
                continue
            start = len(prefix) - len(node.key)
            for k in range(len(node.key) // size):
                name = (node.extra_key, prefix[: start + (k + 1) * size])
                pages[name] = (int(node.host[k * size]) // size, int(node.device[k * size]) // size)
        return pages

    def _check_host_events(self) -> None:
        if self.events is None:
            return
        self._check_events(self.events)
        seen = sorted(self.host_events.resident.values())
        size, expected = self.page_size, []
        view = self.target.inspect(self.tree)
        for index, prefix in view.paths():
            node = view.nodes[index]
            if node.host is not None:
                start = len(prefix) - len(node.key)
                expected += [prefix[: end + size] for end in range(start, len(prefix), size)]
        if seen != sorted(expected):
            raise Violation(
                "N2", f"the host's events leave {seen} stored, the host holds {sorted(expected)}"
            )

    def describe(self) -> str:
        host = self._host()
        lines = [super().describe(), f"free host slots: {host.free.tolist()}"]
        for node in self.target.inspect(self.tree).nodes:
            slots = "" if node.host is None else f", host {node.host.tolist()}"
            device = "" if node.device is None else f", device {node.device.tolist()}"
            lines.append(f"node {list(node.key)}{device}{slots}, lock {node.lock_ref}")
        lines += [f"in flight: {t.kind} of {len(t.handles)} nodes" for t in host.transfers]
        return "\n".join(lines)
