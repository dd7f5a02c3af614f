"""Misuse of a tree of tokens and states, among legal calls: all refused, and nothing changes.

"No state is free" is among them: a match that must copy a state and a row that needs one may raise,
or say None; either way nothing has changed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from refcache.oracle.drivers.mamba.bench import MambaBench
from refcache.oracle.drivers.mamba.request import MambaRequest
from refcache.oracle.drivers.tree.driver import TreeDriver


class MambaMisuse:
    """Each method is one misuse of what a driver drives."""

    def __init__(self, driver: TreeDriver, bench: MambaBench) -> None:
        self.driver, self.target, self.trial = driver, driver.target, driver.trial
        self.bench, self.config, self.tree = bench, bench.config, bench.tree
        self.ledger, self.holds = driver.ledger, driver.holds

    def unlock_unlocked(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """``dec_lock_ref`` of a node that nobody holds."""
        found = self.bench.match(tokens, extra_key)
        prefix = (extra_key, self.bench.elements(tokens)[: len(found.device_indices)])
        if prefix[1] and prefix not in self.bench.states.locked():
            what = "dec_lock_ref of a node whose state is not locked"
            self._unchanged(what, self.tree.dec_lock_ref, found.last_device_node)

    def lock_stranger(self, tokens: Sequence[int]) -> None:
        """A node of another tree is locked and unlocked here."""
        other = type(self.driver)(self.target, size=32, states=6)
        other.insert(tokens)
        found = other.bench.match(tokens, None)
        for what, call in (("inc", self.tree.inc_lock_ref), ("dec", self.tree.dec_lock_ref)):
            if len(found.device_indices):
                said = f"{what}_lock_ref of another tree's node"
                self._unchanged(said, call, found.last_device_node)

    def insert_unfit(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """No state; a slot too few."""
        tokens = tuple(tokens)[: len(self.bench.whole(tokens))]
        if not tokens or not self.bench.states.free:
            return
        key, slots = self.target.RadixKey(list(tokens), extra_key), torch.arange(len(tokens)) + 1
        state = torch.tensor(self.bench.states.free[:1])
        for what, value, given in (
            ("insert without a state", slots, None),
            ("insert with a slot too few", slots[1:], state),
        ):
            params = self.target.InsertParams(key=key, value=value, mamba_value=given)
            self._unchanged(what, self.tree.insert, params)

    def free_free_state(self, index: int) -> None:
        """A state that nobody owns is freed (again); slot 0, and one past the pool."""
        free = self.bench.states.free
        slots = [
            0,
            self.config.states + 1 + index,
            *(free[index % len(free) :][:1] if free else ()),
        ]
        for slot in slots:
            what = f"free of state slot {slot}"
            self._unchanged(what, self.bench.pool.inner.free, torch.tensor([slot]))

    def copy_without_room(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A match that must copy a state where no slot is free nor can be made free."""
        bench = self.bench
        cached = bench.ledger.longest((extra_key, bench.whole(tokens)))
        best = bench.states.best(cached)
        if not best[1] or bench.can_copy(best):
            return
        key = self.target.RadixKey(list(tokens), extra_key)
        bench.match(tokens, extra_key)  # what it splits is split now
        req = MambaRequest("a request without room", tokens, extra_key, 0)
        params = self.target.MatchPrefixParams(key=key, cow_mamba=True, req=req)
        self._unchanged("a copy of a state without room", self.tree.match_prefix, params)
        self._has_nothing(req)

    def row_without_room(self, tokens: Sequence[int]) -> None:
        """Rows for one request more than there are states for."""
        bench, need = self.bench, 1 + self.config.buffers
        count = len(bench.states.free) // need + 1
        if count > bench.rows.available_size():
            return
        reqs = [MambaRequest(f"request {i} too many", tokens, None, 0) for i in range(count)]
        before, rows = bench.shape(), bench.rows.available_size()
        try:
            given = bench.rows.alloc(reqs)
        except self.target.errors:
            given = None
        self.trial.raise_noted()
        self.trial.require(
            given is None,
            "REFUSE",
            f"{count} rows were given, {len(bench.states.free)} states free",
        )
        bench.same_shape(before, "Z3", "an allocation of rows that was refused")
        self.trial.require(
            bench.rows.available_size() == rows, "Z3", "a refused allocation of rows took a row"
        )
        for req in reqs:
            self._has_nothing(req)

    def _has_nothing(self, req: MambaRequest) -> None:
        self.trial.require(
            not req.states and req.req_pool_idx is None,
            "Z3",
            f"{req.rid} was refused; it has row {req.req_pool_idx} and states {req.states}",
        )

    def _unchanged(self, what: str, function: Callable[..., Any], *args: Any) -> None:
        before = self.bench.shape()
        self.trial.misused(what, function, *args)
        self.bench.same_shape(before, "Z3", f"the refused call ({what})")
