"""What a two-tier driver keeps, and what must hold after each of its steps.

The base of :class:`~refcache.oracle.hicache_driver.HiCacheDriver`: the parts on the simulated
machine, watched from outside, and the checks of both tiers, of copies in flight and of events.
"""

from typing import Any

import torch

from refcache.errors import RefcacheError
from refcache.oracle.event_check import EventReplay
from refcache.oracle.hicache_config import HiCacheConfig, HiCacheParts
from refcache.oracle.host_content import HostContent
from refcache.oracle.host_invariants import HostState, InFlight, check_host_state
from refcache.oracle.host_view import HostView, TransferView
from refcache.oracle.ledger import Prefix, RecordingAllocator
from refcache.oracle.reentry import EvictingAllocator
from refcache.oracle.request import Request
from refcache.oracle.state import State
from refcache.oracle.tree_driver import TreeDriver
from refcache.oracle.violation import Violation
from refcache.runtime import SimulatedRuntime, Tracker, eager, lazy

HITS_UNTIL_WRITTEN = {"write_through": 1, "write_through_selective": 2, "write_back": None}


class HiCacheChecks(TreeDriver):
    """See the module docstring.

    Attributes:
        machine: the simulated machine; ``forward_stream``: where forwards run.
        in_flight: copies that are not acknowledged, by (kind, op), as they were submitted.
    """

    Config = HiCacheConfig
    config: HiCacheConfig

    def build(self) -> None:
        c = self.config
        self.machine = SimulatedRuntime(lazy if c.delay else eager, Tracker())
        self.forward_stream = self.machine.Stream("forward")
        self.in_flight: dict[tuple[str, Any], InFlight] = {}
        self.consumer = -1
        self._loads = 0  # started since the host last knew that all were finished
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

    # ---- calls on the target ---------------------------------------------------------------------

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

    # ---- what the target shows -------------------------------------------------------------------

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

    def _holders(self) -> list[Any]:
        return super()._holders() + [t.handles[-1] for t in self._host().transfers if t.locks]

    def _row_slots(self, req: Request) -> torch.Tensor:
        slots: torch.Tensor = self.rows.read(req.req_pool_idx, slice(0, req.allocated))
        return slots

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
