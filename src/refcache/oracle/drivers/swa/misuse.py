"""Misuse of a tree over two pools, among legal calls: each must be refused and change nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from refcache.oracle.drivers.swa.bench import SWABench
from refcache.oracle.drivers.tree.driver import TreeDriver


class SWAMisuse:
    """Each method is one misuse of what a driver drives."""

    def __init__(self, driver: TreeDriver, bench: SWABench) -> None:
        self.driver, self.target, self.trial = driver, driver.target, driver.trial
        self.bench, self.config, self.tree = bench, bench.config, bench.tree
        self.ledger, self.holds = driver.ledger, driver.holds

    def unlock_unlocked(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """``dec_lock_ref`` of a node that nobody holds."""
        found = self.bench.match(tokens, extra_key)
        prefix = (extra_key, self.bench.elements(tokens)[: len(found.device_indices)])
        if prefix[1] and prefix not in self.ledger.locked():
            self._unchanged(
                "dec_lock_ref of an unlocked node", self.tree.dec_lock_ref, found.last_device_node
            )

    def unlock_elsewhere(self, index: int) -> None:
        """``dec_lock_ref`` of a held node with another's ``swa_uuid_for_lock``, or without its
        own."""
        if not self.holds:
            return
        held = self.holds[index % len(self.holds)]
        own = self.bench.uuids[held][-1]
        for uuid in (None, 10_000_000):
            if uuid != own and held[1][1]:
                params = self.target.DecLockRefParams(uuid)
                what = f"dec_lock_ref with uuid {uuid} of what was locked with {own}"
                self._unchanged(what, self.tree.dec_lock_ref, held[0], params)

    def lock_without_window(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A node is locked whose window was evicted since the match."""
        found = self.bench.match(tokens, extra_key)
        prefix = (extra_key, self.bench.elements(tokens)[: len(found.device_indices)])
        self.bench.evict(0, self.config.swa_size)
        if prefix[1] and prefix != self.bench.usable(self.ledger.longest(prefix)):
            what = "inc_lock_ref of a node without its window"
            self._unchanged(what, self.tree.inc_lock_ref, found.last_device_node)

    def insert_unfit(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A slot too few; windows given back up to inside a page, or to before the first."""
        size = self.bench.page_size
        count = len(self.bench.whole(tokens))
        if not count:
            return
        key = self.target.RadixKey(list(tokens[: count + self.config.is_eagle]), extra_key)
        slots = torch.arange(count) + size
        for what, value, evicted in (
            ("insert with a slot too few", slots[1:], 0),
            ("insert with windows gone inside a page", slots, size - 1),
            ("insert with windows gone before the first", slots, -size),
        ):
            if evicted or len(value) < count:
                params = self.target.InsertParams(key=key, value=value, swa_evicted_seqlen=evicted)
                self._unchanged(what, self.tree.insert, params)

    def free_window_outside(self, index: int) -> None:
        """Windows of slot 0 and of one past the pool are given back; a page is, that is free."""
        allocator, size = self.bench.allocator.inner, self.bench.page_size
        for slot in (0, self.config.size + size + index):
            what = f"free_swa of slot {slot}"
            self._unchanged(what, allocator.free_swa, torch.tensor([slot]))
        free = self.ledger.free
        if free and self.ledger.queued is None:
            slots = torch.arange(size) + free[index % len(free)] * size
            self._unchanged(f"free of {slots.tolist()}, which are free", allocator.free, slots)

    def _unchanged(self, what: str, function: Callable[..., Any], *args: Any) -> None:
        before = self.bench.shape()
        self.trial.misused(what, function, *args)
        self.bench.same_shape(before, "Z3", f"the refused call ({what})")
