"""The bench of a tree cache: what is on trial, the ledger, single calls, and the checks of a state.

A call says what it may free, find and return before it is made, and is judged at once. The ledger
knows the tree's exact content from outside; any victim, split point and free page is legal. What a
request does with these calls is in :mod:`refcache.oracle.drivers.tree.serving`, the steps of a
program in :mod:`refcache.oracle.drivers.tree.driver`. With the capability ``inspect`` every rule
about nodes is checked as well.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from refcache.oracle.drivers.tree.forwards import Forwards, PlayedForwards
from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.ledger.ledger import Freed, Ledger, Prefix
from refcache.oracle.ledger.recording import RecordingAllocator
from refcache.oracle.program.trial import Trial
from refcache.oracle.rules.check import check_state
from refcache.oracle.rules.events import EventReplay, TierEvents
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.view.state import RequestView, State

Shape = tuple[Any, ...]
"""Sizes, locks and leaves: everything that a call may have to leave as it was."""


@dataclass(frozen=True)
class EvictionTerms:
    """What an eviction may leave undone.

    Attributes:
        excused: whether everything that is still evictable may stay where it is.
        last: of the pages that each free gave back, those of the victim that was chosen last.
    """

    excused: Callable[[], bool] = lambda: False
    last: Callable[[Sequence[int]], int] = lambda counts: counts[-1]


class TreeBench:
    """See the module docstring.

    Attributes:
        allocator, rows, tree: what is on trial; the allocator is the target's, recorded.
        forwards: how KV is written and read; ``events``: what the tree's events add up to.
        requests: the running ones, oldest first.
        holds: locks that belong to no request, as (handle, prefix).
    """

    allocator: Any
    rows: Any
    tree: Any
    forwards: Forwards
    events: EventReplay | TierEvents | None
    terms = EvictionTerms()

    def __init__(self, trial: Trial, config: CacheConfig) -> None:
        self.trial, self.config, self.target = trial, config, trial.target
        self.page_size = config.page_size
        self.ledger = Ledger(config.pages, config.page_size, trial.note)
        self.requests: list[Request] = []
        self.holds: list[tuple[Any, Prefix]] = []
        self.emits_events = config.enable_kv_cache_events and trial.has("events")
        self._seen: dict[str, Any] | None = None
        self.build()
        self.check()

    def build(self) -> None:
        """Make what is on trial, and what goes with it."""
        config, make = self.config, self.trial.make
        self.allocator = RecordingAllocator(make(self.target.allocator, config), self.ledger)
        self.rows = make(self.target.req_to_token_pool, config)
        self.tree = make(self.target.tree, config, self.allocator, self.rows)
        self.forwards = PlayedForwards(self.trial)
        self.events = EventReplay() if self.emits_events else None

    @property
    def subject(self) -> Any:
        """What a trace records: the tree."""
        return self.tree

    # ---- tokens, rows and sizes ------------------------------------------------------------------

    def elements(self, tokens: Sequence[int]) -> tuple[Any, ...]:
        """What the tree files tokens under: themselves, or their pairs for EAGLE."""
        return tuple(pairwise(tokens)) if self.config.is_eagle else tuple(tokens)

    def whole(self, tokens: Sequence[int]) -> tuple[Any, ...]:
        """The elements that fill whole pages."""
        elements = self.elements(tokens)
        return elements[: len(elements) // self.page_size * self.page_size]

    def row_slots(self, req: Request) -> torch.Tensor:
        """Slots ``[allocated]`` of a request's row, once what is written there has arrived."""
        cells = (req.req_pool_idx, slice(0, req.allocated))
        read = getattr(self.rows, "read", None)
        slots: torch.Tensor = self.rows.req_to_token[cells] if read is None else read(*cells)
        return slots

    def row(self, req: Request) -> list[int]:
        """The same slots as a list."""
        slots: list[int] = self.row_slots(req).tolist()
        return slots

    def available(self) -> int:
        """Tokens that the allocator calls free."""
        return int(self.trial.call(self.allocator.available_size))

    def evictable(self) -> int:
        """Tokens that the tree calls evictable."""
        return int(self.trial.call(self.tree.evictable_size))

    def protected(self) -> int:
        """Tokens that the tree calls protected."""
        return int(self.trial.call(self.tree.protected_size))

    def total(self) -> int:
        """Tokens that the tree has."""
        return int(self.trial.call(self.tree.total_size))

    def shape(self) -> Shape:
        """Everything that a call may have to leave as it was."""
        sizes: Shape = (self.evictable(), self.protected(), self.total(), self.available())
        if self.trial.has("inspect"):
            view = self.target.inspect(self.tree)
            locks = {node.handle: node.lock_ref for node in view.nodes}
            leaves = view.evictable_leaves
            sizes += (locks, leaves and {view.nodes[i].handle for i in leaves})
        return sizes

    def same_shape(self, before: Shape, rule: str, what: str) -> None:
        """``rule``: ``what`` was done since ``before`` and changed nothing."""
        after = self.shape()
        self.trial.require(after == before, rule, f"{what} turned {before} into {after}")

    # ---- calls -----------------------------------------------------------------------------------

    def match(self, tokens: Sequence[int], extra_key: str | None) -> Any:
        """``match_prefix``; it frees nothing, and finds all there is (M0) where it is (C1)."""
        key = self.target.RadixKey(list(tokens), extra_key)
        found = self.trial.call(self.tree.match_prefix, self.target.MatchPrefixParams(key=key))
        self.judge_match(found, extra_key, self.elements(tokens))
        return found

    def judge_match(self, found: Any, extra_key: str | None, elements: tuple[Any, ...]) -> None:
        """Compare an answer of ``match_prefix`` with what is cached."""
        slots = found.device_indices.tolist()
        expected = self.ledger.longest((extra_key, elements))
        length = len(expected[1])
        self.trial.require(
            len(slots) + found.host_hit_length == length,
            "M0",
            f"match found {len(slots)} tokens, but {length} are cached: {list(expected[1])}",
        )
        self.judge_slots(slots, expected)

    def judge_slots(self, slots: list[int], expected: Prefix) -> None:
        """C1: a match gives the slots where the KV of its prefix is."""
        self.trial.require(
            slots == self.ledger.slots(expected),
            "C1",
            f"match gave slots {slots}, but the KV is in {self.ledger.slots(expected)}",
        )

    def bring(
        self, found: Any, tokens: Sequence[int], extra_key: str | None
    ) -> tuple[Any, torch.Tensor]:
        """What a request reuses of a match of its tokens: the handle to lock, and device slots."""
        return found.last_device_node, found.device_indices

    def insert(
        self,
        tokens: tuple[int, ...],
        extra_key: str | None,
        slots: list[int],
        chunked: bool,
        priority: int,
    ) -> None:
        """``insert`` of whole pages that the caller owns; it then frees what was there already.

        The tensor of slots is overwritten afterwards.
        """
        prefix = (extra_key, self.elements(tokens))
        known = len(self.ledger.longest(prefix)[1])
        value = torch.tensor(slots)
        result = self.trial.call(
            self.tree.insert,
            self.target.InsertParams(
                key=self.target.RadixKey(list(tokens), extra_key),
                value=value,
                chunked=chunked,
                priority=priority,
            ),
        )
        value.fill_(-1)
        self.trial.require(
            result.prefix_len == known,
            "M3",
            f"insert returned {result.prefix_len}, but {known} tokens were cached before",
        )
        self.adopt(prefix, slots, known)
        self.free(slots[:known])

    def adopt(self, prefix: Prefix, slots: list[int], known: int) -> None:
        """The tree now owns the pages of ``prefix`` after its first ``known`` elements."""
        for part in self.ledger.prefixes(prefix):
            if len(part[1]) > known:
                self.ledger.adopt(part, slots[len(part[1]) - 1] // self.page_size)

    def lock(self, handle: Any, prefix: Prefix) -> None:
        """``inc_lock_ref``; K1 for what it returns."""
        before = self.evictable()
        result = self.trial.call(self.tree.inc_lock_ref, handle)
        self.ledger.hold(handle, prefix)
        self._judge_delta("inc_lock_ref", result.delta, before)

    def unlock(self, handle: Any, prefix: Prefix) -> None:
        """``dec_lock_ref``; K1 for what it returns."""
        before = self.evictable()
        result = self.trial.call(self.tree.dec_lock_ref, handle)
        self.ledger.drop(handle, prefix)
        self._judge_delta("dec_lock_ref", result.delta, before)

    def _judge_delta(self, name: str, delta: int | None, before: int) -> None:
        grown = self.evictable() - before
        if delta is not None:
            self.trial.require(
                delta == grown, "K1", f"{name} returned {delta}, evictable_size changed by {grown}"
            )

    def evict(self, num_tokens: int) -> None:
        """``evict``: any unlocked leaves, and E1 to E3 for how many."""
        with self.ledger.permits(self.ledger.only_unlocked) as freed:
            before = self.available()
            params = self.target.EvictParams(num_tokens=num_tokens)
            result = self.trial.call(self.tree.evict, params)
            grown = self.available() - before
        self._judge_eviction(num_tokens, result.num_tokens_evicted, freed, grown)

    def _judge_eviction(self, asked: int, count: int, freed: Freed, grown: int) -> None:
        """E1, T1, E3 and E2 of an eviction that returned ``count``."""
        require, size = self.trial.require, self.page_size
        tokens = len(freed.pages) * size
        if self.ledger.queued is None:
            require(count == grown, "E1", f"evict returned {count}, the free space grew by {grown}")
        require(count == tokens, "E1", f"evict returned {count}, it freed {tokens} tokens")
        self.judge_whole_prefixes()
        locked = self.ledger.locked()
        left = [p for p in self.ledger.cached if p not in locked]
        if tokens < asked and left:
            require(
                self.evictable() == 0 or self.terms.excused(),
                "E3",
                f"evict({asked}) freed {tokens} although {list(left[0][1])} is not locked",
            )
        if self.trial.has("minimal_evict") and len(freed.counts) > 1:
            last = self.terms.last(freed.counts) * size
            require(
                tokens - last < asked,
                "E2",
                f"evict({asked}) freed {tokens}, the last {last} for nothing",
            )

    def judge_whole_prefixes(self) -> None:
        """T1 of what is cached after an eviction."""
        for space, elements in self.ledger.cached:
            above = (space, elements[: -self.page_size])
            self.trial.require(
                not above[1] or above in self.ledger.cached,
                "T1",
                f"the page of {list(above[1])} was evicted, but {list(elements)} is still cached",
            )

    def make_room(self, count: int) -> None:
        """Evict what is short of ``count`` free tokens, as a scheduler does."""
        short = count - self.available()
        if short > 0:
            self.evict(short)

    def granted(self, slots: Any, pages: int, owner: str) -> bool:
        """Whether an allocation of ``pages`` gave slots, which are the owner's then; AL2."""
        free = len(self.ledger.free)
        self.trial.require(
            (slots is None) == (pages > free),
            "AL2",
            f"{pages} pages were {'refused' if slots is None else 'granted'}, {free} are free",
        )
        if slots is None:
            return False
        self.ledger.take(slots.tolist(), owner)
        self.trial.raise_noted()
        return True

    def alloc(self, count: int, owner: str) -> list[int] | None:
        """Whole pages, evicting what is needed; None when there are none."""
        self.make_room(count)
        out = self.trial.call(self.allocator.alloc, count)
        return out.tolist() if self.granted(out, count // self.page_size, owner) else None

    def free(self, slots: list[int]) -> None:
        """The caller gives back what is its own."""
        if slots:
            with self.ledger.permits({slot // self.page_size for slot in slots}):
                self.trial.call(self.allocator.free, torch.tensor(slots))

    def reset(self) -> None:
        """Forget everything, as ``flush_cache`` does when nothing runs; Z1."""
        self.trial.call(self.tree.reset)
        self.trial.call(self.allocator.clear)
        self.trial.call(self.rows.clear)
        self.ledger.clear()
        self.forwards.forget()
        sizes = (self.evictable(), self.protected(), self.total())
        self.trial.require(sizes == (0, 0, 0), "Z1", f"after reset the tree has sizes {sizes}")

    def evict_everything(self) -> None:
        """Nothing is locked: every page must be free afterwards."""
        self.evict(self.config.size)
        free = self.available()
        self.trial.require(
            free == self.config.size,
            "P1",
            f"{free} of {self.config.size} tokens are free after everything was evicted",
        )

    # ---- checks ----------------------------------------------------------------------------------

    def holders(self) -> list[Any]:
        """Every handle that is locked, one entry a lock."""
        return [handle for handle, _ in self.ledger.holders]

    def check(self) -> None:
        """Sizes, reads, events and nodes against the ledger."""
        self._check_sizes()
        for req in self.requests:
            self.forwards.read(req, self.row)
        self.check_events()
        if self.trial.has("inspect"):
            check_state(self.state())

    def check_events(self) -> None:
        """N1 and N2."""
        if self.events is not None:
            self.events.apply(self.trial.call(self.tree.take_events))
            self.events.check(self.ledger)

    def _check_sizes(self) -> None:
        """P1, A1, A2 and R3 from the sizes alone."""
        require, size = self.trial.require, self.page_size
        free, evictable = self.available(), self.evictable()
        protected, total = self.protected(), self.total()
        cached, locked = len(self.ledger.cached) * size, len(self.ledger.locked()) * size
        require(
            free == len(self.ledger.free) * size,
            "P1",
            f"available_size() = {free}, but nobody owns {len(self.ledger.free) * size} tokens",
        )
        require(
            evictable + protected == cached == total,
            "A1",
            f"{evictable} evictable + {protected} protected, {total} in all, but {cached} tokens "
            "are cached",
        )
        held = locked or len(self.holders()) > len(self.ledger.holders)
        fits = protected >= locked if held else protected == 0
        require(fits, "A2", f"protected_size() = {protected}, but holders lock {locked} tokens")
        rows = self.rows.available_size()
        require(
            rows == self.config.max_requests - len(self.requests),
            "R3",
            f"{rows} rows are free and {len(self.requests)} in use, of {self.config.max_requests}",
        )

    @contextmanager
    def looking_once(self) -> Iterator[None]:
        """Nothing changes in the block: all that look at the target in it see one view."""
        self._seen = {}
        try:
            yield
        finally:
            self._seen = None

    def look(self, what: str, make: Callable[[], Any]) -> Any:
        """What ``make`` shows of the target: now, or what was seen in :meth:`looking_once`."""
        if self._seen is None:
            return make()
        if what not in self._seen:
            self._seen[what] = make()
        return self._seen[what]

    def state(self) -> State:
        """What the rules about a state look at."""
        state: State = self.look("state", self._state)
        return state

    def _state(self) -> State:
        """The state as it is now."""
        return State(
            view=self.target.inspect(self.tree),
            page_size=self.page_size,
            pages=self.config.pages,
            free=self.ledger.free,
            queued=self.ledger.queued or (),
            holders=self.holders(),
            requests=[
                RequestView(
                    req.rid,
                    self.row_slots(req),
                    req.cache_protected_len,
                    req.last_node,
                    req.req_pool_idx,
                )
                for req in self.requests
            ],
            cached=self.ledger.cached,
        )

    def choices(self) -> dict[str, Any]:
        """Everything the target was free to choose and that can be seen, by name."""
        chosen: dict[str, Any] = {f"slots of {r.rid}": self.row(r) for r in self.requests}
        for (space, elements), page in self.ledger.cached.items():
            chosen[f"page cached for {list(elements)} in namespace {space!r}"] = page
        return chosen

    def describe(self) -> str:
        """The state as the ledger has it, one line an owner."""
        lines = [f"free pages: {self.ledger.free}"]
        lines += [self.ledger.says(page) for page in self.ledger.cached.values()]
        for req in self.requests:
            lines.append(
                f"{req.rid}: tokens {list(req.tokens)}, {req.computed} computed, "
                f"{req.cache_protected_len} protected, slots {self.row(req)}"
            )
        lines += [f"held: {list(prefix[1])}" for _, prefix in self.holds]
        return "\n".join(lines)
