"""What a tree driver keeps, and what must hold after each of its steps.

The base of :class:`~refcache.oracle.tree_driver.TreeDriver`: the parts on trial, the requests that
run, and the checks of sizes, reads, events and nodes against the ledger.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from refcache.oracle.driver import Driver
from refcache.oracle.event_check import EventReplay
from refcache.oracle.invariants import check_state
from refcache.oracle.ledger import Ledger, Prefix, RecordingAllocator
from refcache.oracle.request import Request
from refcache.oracle.state import RequestView, State
from refcache.oracle.target import Target


class TreeChecks(Driver):
    """See the module docstring.

    Attributes:
        requests: the running ones, oldest first.
        holds: locks that belong to no request, as (handle, prefix).
        kv: what each slot holds: a namespace and the tokens up to the slot's own.
    """

    def __init__(self, target: Target, **config: Any) -> None:
        super().__init__(target, **config)
        c = self.config
        self.page_size = c.page_size
        self.ledger = Ledger(c.pages, c.page_size, self.note)
        self.build()
        self.requests: list[Request] = []
        self.holds: list[tuple[Any, Prefix]] = []
        self.kv: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        emits = c.enable_kv_cache_events and "events" in target.capabilities
        self.events = EventReplay() if emits else None
        self._names = 0
        self.check()

    def build(self) -> None:
        """Make what is on trial: ``allocator``, ``rows`` and ``tree``."""
        c, target = self.config, self.target
        self.allocator = RecordingAllocator(self.on_target(target.allocator, c), self.ledger)
        self.rows = self.on_target(target.req_to_token_pool, c)
        self.tree = self.on_target(target.tree, c, self.allocator, self.rows)

    # ---- what the ledger and the rows say --------------------------------------------------------

    def _pick(self, index: int) -> Request | None:
        return self.requests[index % len(self.requests)] if self.requests else None

    def _elements(self, tokens: Sequence[int]) -> tuple[Any, ...]:
        """What the tree files tokens under: themselves, or their pairs for EAGLE."""
        if self.config.is_eagle:
            return tuple(pairwise(tokens))
        return tuple(tokens)

    def _whole(self, tokens: Sequence[int]) -> tuple[Any, ...]:
        elements = self._elements(tokens)
        return elements[: len(elements) // self.page_size * self.page_size]

    def _row(self, req: Request) -> list[int]:
        row: list[int] = self._row_slots(req).tolist()
        return row

    def _row_slots(self, req: Request) -> torch.Tensor:
        slots: torch.Tensor = self.rows.req_to_token[req.req_pool_idx, : req.allocated]
        return slots

    def _holders(self) -> list[Any]:
        """Every handle that is locked, one entry a lock."""
        return [handle for handle, _ in self.ledger.holders]

    def _evictable(self) -> int:
        return int(self.on_target(self.tree.evictable_size))

    def _shape(self) -> tuple[Any, ...]:
        """Everything a call may have to leave as it was."""
        sizes: tuple[Any, ...] = (
            self._evictable(),
            self.tree.protected_size(),
            self.tree.total_size(),
            self.allocator.available_size(),
        )
        if "inspect" in self.target.capabilities:
            view = self.target.inspect(self.tree)
            locks = {node.handle: node.lock_ref for node in view.nodes}
            leaves = view.evictable_leaves
            sizes += (locks, leaves and {view.nodes[i].handle for i in leaves})
        return sizes

    def _same_shape(self, before: tuple[Any, ...], rule: str, what: str) -> None:
        after = self._shape()
        self.require(after == before, rule, f"{what} turned {before} into {after}")

    # ---- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        self._check_sizes()
        for req in self.requests:
            self._read_check(req)
        if self.events is not None:
            self._check_events(self.events)
        if "inspect" in self.target.capabilities:
            check_state(self.state())

    def _check_events(self, events: EventReplay) -> None:
        events.apply(self.on_target(self.tree.take_events))
        events.check(self.ledger)

    def _check_sizes(self) -> None:
        size = self.page_size
        free = int(self.on_target(self.allocator.available_size))
        evictable, protected = self._evictable(), int(self.on_target(self.tree.protected_size))
        total = int(self.on_target(self.tree.total_size))
        cached, locked = len(self.ledger.cached) * size, len(self.ledger.locked()) * size
        self.require(
            free == len(self.ledger.free) * size,
            "P1",
            f"available_size() = {free}, but nobody owns {len(self.ledger.free) * size} tokens",
        )
        self.require(
            evictable + protected == cached == total,
            "A1",
            f"{evictable} evictable + {protected} protected, {total} in all, but {cached} tokens "
            "are cached",
        )
        held = locked or len(self._holders()) > len(self.ledger.holders)
        fits = protected >= locked if held else protected == 0
        self.require(
            fits, "A2", f"protected_size() = {protected}, but holders lock {locked} tokens"
        )
        rows = self.rows.available_size()
        self.require(
            rows == self.config.max_requests - len(self.requests),
            "R3",
            f"{rows} rows are free and {len(self.requests)} in use, of {self.config.max_requests}",
        )

    def _read_check(self, req: Request) -> None:
        tokens = req.tokens
        for position, slot in enumerate(self._row(req)[: req.computed]):
            expected = (req.extra_key, tokens[: position + 1])
            self.require(
                self.kv.get(slot) == expected,
                "C-READ",
                f"{req.rid} reads token {position} from slot {slot}, which holds the KV of "
                f"{self.kv.get(slot)}; expected {expected}",
            )

    def state(self) -> State:
        """What the invariants look at."""
        return State(
            view=self.target.inspect(self.tree),
            page_size=self.page_size,
            pages=self.config.pages,
            free=self.ledger.free,
            queued=self.ledger.queued or (),
            holders=self._holders(),
            requests=[
                RequestView(
                    req.rid,
                    self._row_slots(req),
                    req.cache_protected_len,
                    req.last_node,
                    req.req_pool_idx,
                )
                for req in self.requests
            ],
            cached=self.ledger.cached,
        )

    def choices(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {f"slots of {r.rid}": self._row(r) for r in self.requests}
        for (space, elements), page in self.ledger.cached.items():
            chosen[f"page cached for {list(elements)} in namespace {space!r}"] = page
        return chosen

    def describe(self) -> str:
        lines = [f"free pages: {self.ledger.free}"]
        for space, elements in self.ledger.cached:
            page = self.ledger.cached[space, elements]
            lines.append(self.ledger.says(page))
        for req in self.requests:
            lines.append(
                f"{req.rid}: tokens {list(req.tokens)}, {req.computed} computed, "
                f"{req.cache_protected_len} protected, slots {self._row(req)}"
            )
        lines += [f"held: {list(prefix[1])}" for _, prefix in self.holds]
        return "\n".join(lines)
