"""Single calls on a two-tier tree: match, load back, poll, settle; and forwards on their stream.

What a call answers is compared with what both tiers hold.
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.controller.layer_events import NUM_COUNTERS
from refcache.oracle.hicache_checks import HiCacheChecks
from refcache.oracle.request import Request


class HiCacheCalls(HiCacheChecks):
    """A :class:`HiCacheChecks` that calls."""

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

    def _load_back(
        self, tokens: Sequence[int], extra_key: str | None, quota: int | None, start: bool
    ) -> None:
        found = self._match(tokens, extra_key)
        if found.host_hit_length:
            self._load(found, tokens, extra_key, quota)
            if start:
                self._start_loads()

    def _on_host_only(self, which: int) -> tuple[tuple[int, ...], str | None] | None:
        state = self.state()
        places = [i for i, node in enumerate(state.view.nodes) if node.device is None]
        if not places:
            return None
        index = places[which % len(places)]
        return tuple(self.content.tokens(state, index)), state.view.nodes[index].extra_key

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

    def _start_loads(self) -> None:
        if self._loads == NUM_COUNTERS and "load_slots" not in self.target.capabilities:
            self._on_machine(self.machine.synchronize)
            self._loads = 0
        index = self.on_target(self.tree.ready_to_load_host_cache)
        if index >= 0:
            self.consumer = index
            self._loads += 1

    def _poll(self) -> None:
        self.on_target(self.tree.check_hicache_events)
        if self._loads and all(t.kind != "load" for t in self._host().transfers):
            self._loads = 0

    def _settle_all(self) -> None:
        self._start_loads()
        self._on_machine(self.machine.synchronize)
        self._loads = 0
        self._poll()
        left = [f"{t.kind} {t.op}" for t in self._host().transfers]
        self.require(not left, "L6", f"every copy is done and polled, but {left} are not released")
        state = self.state()
        for violation in self.content.compare(state):
            raise violation
        self._check_host_events()

    def _before_reset(self) -> None:
        if "refuses_misuse" not in self.target.capabilities:  # it may neither refuse nor wait
            self._settle_all()

    def _must_stay(self) -> bool:
        """Under write-back: leaves above nodes that are on the host only, without room there."""
        view = self.target.inspect(self.tree)
        above = {node.parent for node in view.nodes if node.device is None}
        leaves = view.evictable_leaves or frozenset()
        tight = self.config.write_policy == "write_back" and self.no_room
        return tight and all(view.nodes[i].host is None and i in above for i in leaves)

    def _last_victim(self, calls: Sequence[int]) -> int:
        """Under write-back a victim may be freed later than one chosen after it: any of them."""
        return max(calls) if self.config.write_policy == "write_back" else calls[-1]

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
            self._loads = 0  # it waited for the newest load, and loads finish in order

    def _cache(self, req: Request) -> None:
        self._on_machine(self._results.synchronize)
        super()._cache(req)

    def _finish(self, req: Request, insert: bool) -> None:
        if insert:
            self._on_machine(self._results.synchronize)
        super()._finish(req, insert)
