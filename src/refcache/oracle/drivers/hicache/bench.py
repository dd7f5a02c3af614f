"""The bench of a two-tier tree, on the simulated machine, watched from outside.

What a call answers is compared with what both tiers hold; after each step come the checks of the
host tier, of copies in flight and of the tracker, which reports every pair of accesses that nothing
orders.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch

from refcache.oracle.drivers.hicache.content import HostContent
from refcache.oracle.drivers.hicache.faults import Faults
from refcache.oracle.drivers.hicache.forwards import LaunchedForwards
from refcache.oracle.drivers.tree.bench import EvictionTerms, TreeBench
from refcache.oracle.ledger.ledger import Prefix
from refcache.oracle.ledger.recording import RecordingAllocator
from refcache.oracle.rules.events import TierEvents
from refcache.oracle.rules.host import HostState, InFlight, check_host_state
from refcache.oracle.target.config import HiCacheConfig, HiCacheParts
from refcache.oracle.view.host import HostView, TransferView
from refcache.oracle.view.state import State
from refcache.runtime import SimulatedRuntime, Tracker, eager, lazy

HITS_UNTIL_WRITTEN = {"write_through": 1, "write_through_selective": 2, "write_back": None}


class HiCacheBench(TreeBench):
    """See the module docstring.

    Attributes:
        machine: the simulated machine, with a tracker; ``content``: the bytes of both tiers.
        in_flight: copies that are not acknowledged, by (kind, op), as they were submitted.
        no_room: the host pool refused twice in a row since the cache was empty.
        faults: who makes inner steps fail, if the configuration asks for it.
        lent: host slots of prefetches from storage, where there is storage.
    """

    config: HiCacheConfig
    forwards: LaunchedForwards
    events: TierEvents | None
    lent: Collection[int] = ()

    @property
    def hits_until_written(self) -> int | None:
        """W1: what the policy says."""
        return HITS_UNTIL_WRITTEN[self.config.write_policy]

    def build(self) -> None:
        c = self.config
        self.machine = SimulatedRuntime(lazy if c.delay else eager, Tracker())
        forward_stream = self.machine.Stream("forward")
        self.in_flight: dict[tuple[str, Any], InFlight] = {}
        self.no_room = False
        self.events = TierEvents() if self.emits_events else None
        parts: HiCacheParts = self.trial.make(
            self.target.hicache,
            c,
            self.machine,
            forward_stream,
            lambda allocator: RecordingAllocator(allocator, self.ledger),
        )
        self.tree, self.allocator, self.rows = parts.tree, parts.allocator, parts.rows
        self.host_pool = parts.host_pool
        self.content = HostContent(parts.pool, parts.host_planes, c.layout, c.page_size)
        self.trial.explained = self.content.as_violation
        self.forwards = LaunchedForwards(
            self.trial, self.machine, forward_stream, self.content, parts
        )
        self._watch(parts.host_pool)
        self.faults = Faults(self, parts) if c.fault else None
        if c.reentrant:
            everything = self.target.EvictParams(num_tokens=c.size)
            self.allocator.make_room = lambda: self.tree.evict(everything)
        if c.write_policy == "write_back":
            # a victim may be freed later than one that was chosen after it: any of them was last
            self.terms = EvictionTerms(self._must_stay, max)

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

        @functools.wraps(evict_host)
        def watched_evict_host(num_tokens: int) -> Any:
            freed.clear()
            count, note = evict_host(num_tokens), self.trial.note
            total = sum(freed)
            if count != total:
                note("E1", f"evict_host returned {count}, it freed {total} slots")
            if freed and total - freed[-1] >= num_tokens:
                note("E2", f"evict_host({num_tokens}) freed {freed}, the last for nothing")
            host = self.host()
            left = [n for n in host.leaves if not host.nodes[n].host_ref]
            if total < num_tokens and left:
                note("E3", f"evict_host({num_tokens}) freed {total}, {left[0]!r} is left")
            return count

        host_pool.alloc, host_pool.free = watched_alloc, watched_free
        self.tree.evict_host = watched_evict_host

    def host(self) -> HostView:
        """What the target shows of its host tier."""
        view: HostView = self.look("host", lambda: self.target.inspect_host(self.tree))
        return view

    # ---- calls -----------------------------------------------------------------------------------

    def judge_match(self, found: Any, extra_key: str | None, elements: tuple[Any, ...]) -> None:
        slots = found.device_indices.tolist()
        self.judge_slots(slots, self.ledger.longest((extra_key, elements)))
        cached = self.content.longest(self.state(), extra_key, elements)
        self.trial.require(
            len(slots) + found.host_hit_length == cached,
            "M0",
            f"match found {len(slots)} tokens on the device and {found.host_hit_length} on the "
            f"host, but {cached} are cached",
        )

    def bring(
        self, found: Any, tokens: Sequence[int], extra_key: str | None
    ) -> tuple[Any, torch.Tensor]:
        """Lock, load the host hit, unlock: as the scheduler admits a request."""
        slots = found.device_indices
        if not found.host_hit_length:
            return found.last_device_node, slots
        prefix = (extra_key, self.elements(tokens)[: len(slots)])
        self.lock(found.last_device_node, prefix)
        if self.faults is not None:
            self.faults.relied_on = True
        node, loaded = self.load(found, tokens, extra_key, None)
        self.unlock(found.last_device_node, prefix)
        return node, torch.cat([slots, loaded])

    def load(
        self, found: Any, tokens: Sequence[int], extra_key: str | None, quota: int | None
    ) -> tuple[Any, torch.Tensor]:
        """``init_load_back`` of a match's host hit: Q1, Q2 and B1; the node and the new slots."""
        hit, before = found.host_hit_length, len(found.device_indices)
        params = self.target.InitLoadBackParams(
            last_host_node=found.last_host_node, host_hit_length=hit, mem_quota=quota
        )
        left = None if quota is None else quota - self._newly_pinned(found.last_device_node)
        with self.ledger.permits(self.ledger.only_unlocked):
            slots, node = self.trial.call(self.tree.init_load_back, params)
        loaded = slots.tolist()
        refused = hit < self.config.load_back_threshold or (left is not None and hit > left)
        self.trial.require(
            len(loaded) in (0, hit) and not (loaded and refused),
            "Q1",
            f"a load of {hit} tokens (threshold {self.config.load_back_threshold}, quota {quota}, "
            f"of which {left} are left by what it pins) gave {len(loaded)}",
        )
        if not loaded:
            self.trial.require(
                node == found.last_device_node,
                "B1",
                f"nothing was loaded; the last node is {node!r}, not {found.last_device_node!r}",
            )
            if not refused and quota is None and self.config.write_policy != "write_back":
                room = int(self.allocator.available_size()) + self.evictable()
                self.trial.require(
                    room - before < hit,
                    "Q2",
                    f"a load of {hit} was refused, {room} tokens are free",
                )
            return node, slots
        self.ledger.take(loaded, "the load")
        self.trial.raise_noted()
        elements = self.elements(tokens)[: before + hit]
        row = [*found.device_indices.tolist(), *loaded]
        self.adopt((extra_key, elements), row, before)
        return node, slots

    def _newly_pinned(self, handle: Any) -> int:
        """Tokens on the path to a node that nobody has locked yet: a load from there pins them."""
        state, pinned = self.state(), 0
        index = state.place.get(handle, -1)
        while index >= 0:
            node = state.view.nodes[index]
            pinned += len(node.key) if node.lock_ref == 0 else 0
            index = node.parent
        return pinned

    def on_host_only(self, which: int) -> tuple[tuple[int, ...], str | None] | None:
        """The tokens and the namespace of a node that is on the host only; None without one."""
        state = self.state()
        places = [i for i, node in enumerate(state.view.nodes) if node.device is None]
        if not places:
            return None
        index = places[which % len(places)]
        return tuple(self.content.tokens(state, index)), state.view.nodes[index].extra_key

    def poll(self) -> None:
        """``check_hicache_events``: acknowledge what is done."""
        self.trial.call(self.tree.check_hicache_events)
        if self.forwards.loads:
            self.forwards.acknowledged(self.host().transfers)

    def settle(self) -> None:
        """Every launch finishes and is acknowledged (L6); every byte on both tiers is compared."""
        self.forwards.finish()
        self.poll()
        left = [f"{t.kind} {t.op}" for t in self.host().transfers]
        self.trial.require(
            not left, "L6", f"every copy is done and polled, but {left} are not released"
        )
        for violation in self.content.compare(self.state()):
            raise violation
        if self.events is not None:
            self.check_events()
            self.events.check_host(self.target.inspect(self.tree), self.page_size)

    def evict_host_everything(self) -> None:
        """``evict_host`` of all host slots."""
        self.trial.call(self.tree.evict_host, self.config.host_size)

    def _must_stay(self) -> bool:
        """Under write-back: leaves above nodes that are on the host only, without room there."""
        view = self.target.inspect(self.tree)
        above = {node.parent for node in view.nodes if node.device is None}
        leaves = view.evictable_leaves or frozenset()
        return self.no_room and all(view.nodes[i].host is None and i in above for i in leaves)

    # ---- checks ----------------------------------------------------------------------------------

    def holders(self) -> list[Any]:
        return super().holders() + [t.handles[-1] for t in self.host().transfers if t.locks]

    def check(self) -> None:
        with self.looking_once():
            super().check()
            self._check_host()

    def _check_host(self) -> None:
        """The rules of the host tier, with the copies in flight as they were submitted."""
        c, state, host = self.config, self.state(), self.host()
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
                threshold=self.hits_until_written,
                no_room=self.no_room,
                lent=self.lent,
            )
        )

    def _pages_of(self, state: State, transfer: TransferView) -> dict[Prefix, tuple[int, int]]:
        """The host page and the device page of each prefix that a copy moves."""
        size = self.page_size
        pages: dict[Prefix, tuple[int, int]] = {}
        if "device" not in transfer.tiers:
            return pages
        for index, names in state.view.pages(size):
            node = state.view.nodes[index]
            if (
                node.handle in transfer.handles
                and node.host is not None
                and node.device is not None
            ):
                both = [(slots[::size] // size).tolist() for slots in (node.host, node.device)]
                pages.update(zip(names, zip(*both, strict=True), strict=False))
        return pages

    def describe(self) -> str:
        host = self.host()
        lines = [super().describe(), f"free host slots: {host.free.tolist()}"]
        for node in self.target.inspect(self.tree).nodes:
            slots = "" if node.host is None else f", host {node.host.tolist()}"
            device = "" if node.device is None else f", device {node.device.tolist()}"
            lines.append(f"node {list(node.key)}{device}{slots}, lock {node.lock_ref}")
        lines += [f"in flight: {t.kind} of {len(t.handles)} nodes" for t in host.transfers]
        return "\n".join(lines)
