"""Drives a tree cache over an allocator, as a scheduler with a handful of requests does.

Admit (match, lock, allocate, compute), go on with the next chunk, decode, cache, finish, abort,
retract; and the bare calls: match, insert, evict, lock, unlock, reset. The forward pass is played:
it writes into a table which prefix each slot holds, so a request that reads another's KV is seen.

The ledger knows the tree's exact content from outside, so what each call must free, find and return
is known. Any victim, split point and free page is legal. With the capability ``inspect`` every
invariant of the nodes is checked as well.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from refcache.keys import TOKEN
from refcache.oracle.driver import Driver, step
from refcache.oracle.event_check import EventReplay
from refcache.oracle.invariants import RequestView, State, check_state
from refcache.oracle.ledger import Ledger, Prefix, RecordingAllocator
from refcache.oracle.request import Request
from refcache.oracle.target import Target

SAMPLED = 1  # the token a request ends with: sampled, but without KV


class TreeDriver(Driver):
    """See the module docstring.

    Attributes:
        requests: the running ones, oldest first.
        holds: locks that belong to no request, as (handle, prefix).
        kv: what each slot holds: a namespace and the tokens up to the slot's own.
    """

    needs = frozenset({"allocator", "tree"})

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

    # ---- requests --------------------------------------------------------------------------------

    @step
    def admit(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        chunk: int | None = None,
        priority: int = 0,
    ) -> None:
        """Match all but the last token, lock, and compute the first ``chunk`` of the rest."""
        self._admit(tokens, extra_key, chunk, priority)

    def _admit(
        self, tokens: Sequence[int], extra_key: str | None, chunk: int | None, priority: int
    ) -> None:
        c = self.config
        if not tokens or len(self.requests) >= c.max_requests or len(tokens) >= c.context_length:
            return
        req = Request(f"request {self._names}", tokens, extra_key, priority)
        self._names += 1
        found = self._match(tokens[:-1], extra_key)
        req.last_node, slots = self._bring(found, tokens[:-1], extra_key)
        prefix = (extra_key, self._elements(tokens[:-1])[: len(slots)])
        req.cache_protected_len, req.prefix_indices = len(slots), slots
        self._lock(req.last_node, prefix)
        self.on_target(self.rows.alloc, [req])
        self._write(req, 0, slots)
        req.computed = req.allocated = len(slots)
        if self._compute(req, chunk):
            self.requests.append(req)
        else:
            self._unlock(req.last_node, prefix)
            self.on_target(self.rows.free, req)

    @step
    def proceed(self, index: int, chunk: int | None = None) -> None:
        """The next chunk of a prefill; what was computed before is cached first."""
        req = self._pick(index)
        if req is not None and not req.prefilled:
            self._cache(req)
            self._compute(req, chunk)

    @step
    def cache(self, index: int) -> None:
        """``cache_unfinished_req`` of what a request has computed."""
        req = self._pick(index)
        if req is not None:
            self._cache(req)

    @step
    def decode(self, index: int, token: int) -> None:
        """One token more, computed at once."""
        req = self._pick(index)
        if req is None or not req.prefilled or req.computed + 2 > self.config.context_length:
            return
        if req.pending:
            self._cache(req)
        if req.allocated == req.computed and not self._allocate(req, 1):
            return
        req.output_ids.append(token)
        self._forward(req, req.computed + 1)

    @step
    def reserve(self, index: int, count: int) -> None:
        """Slots for draft tokens that may never come, as speculative decoding takes them."""
        req = self._pick(index)
        room = self.config.context_length
        if req is not None and req.prefilled and req.allocated + count < room:
            self._allocate(req, count)

    @step
    def finish(self, index: int) -> None:
        """A request ends; its whole pages are cached."""
        req = self._pick(index)
        if req is not None and req.prefilled:
            self._finish(req, insert=True)

    @step
    def abort(self, index: int) -> None:
        """A request ends at any point; nothing is cached."""
        req = self._pick(index)
        if req is not None:
            self._finish(req, insert=False)

    @step
    def retract(self, index: int, chunk: int | None = None) -> None:
        """Take a request's memory away and admit it again with the tokens it has."""
        req = self._pick(index)
        if req is not None:
            tokens = req.tokens
            self._finish(req, insert=False)
            self._admit(tokens, req.extra_key, chunk, req.priority)

    @step
    def finish_together(self, indices: Sequence[int]) -> None:
        """Several requests end inside one free group, as a batch's results are processed."""
        if not self.requests:
            return
        ends = {index % len(self.requests) for index in indices}
        done = [r for i, r in enumerate(self.requests) if i in ends and r.prefilled]
        self.on_target(self.allocator.free_group_begin)
        for req in done:
            self._finish(req, insert=True)
        self.on_target(self.allocator.free_group_end)

    # ---- bare calls ------------------------------------------------------------------------------

    @step
    def match(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Match twice: the second answer is the first."""
        first = self._match(tokens, extra_key)
        before = self._shape()
        again = self._match(tokens, extra_key)
        self.require(
            first.device_indices.tolist() == again.device_indices.tolist()
            and first.last_device_node == again.last_device_node,
            "M1",
            f"a second match gave {again.device_indices.tolist()} at {again.last_device_node}, the "
            f"first {first.device_indices.tolist()} at {first.last_device_node}",
        )
        self._same_shape(before, "M1", "a second match")

    @step
    def insert(
        self,
        tokens: Sequence[int],
        extra_key: str | None = None,
        chunked: bool = False,
        priority: int = 0,
    ) -> None:
        """Insert whole pages with fresh slots; the tensor is overwritten afterwards."""
        elements = self._whole(tokens)
        if not elements:
            return
        slots = self._pages_for(len(elements), "the caller")
        if slots is None:
            return
        tokens = tuple(tokens[: len(elements) + self.config.is_eagle])
        self._write_kv(slots, 0, tokens, extra_key)
        prefix = (extra_key, elements)
        known = len(self.ledger.longest(prefix)[1])
        value = torch.tensor(slots)
        self.ledger.may_free = self.ledger.only(set())
        result = self.on_target(
            self.tree.insert,
            self.target.InsertParams(
                key=self.target.RadixKey(list(tokens), extra_key),
                value=value,
                chunked=chunked,
                priority=priority,
            ),
        )
        value.fill_(-1)
        self._inserted(result.prefix_len, known)
        self._adopt(prefix, slots, known)
        duplicates = slots[:known]
        self._free(duplicates)

    @step
    def evict(self, num_tokens: int) -> None:
        self._evict(num_tokens)

    @step
    def hold(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Match and lock for nobody in particular."""
        found = self._match(tokens, extra_key)
        elements = self._elements(tokens)[: len(found.device_indices)]
        self._lock(found.last_device_node, (extra_key, elements))
        self.holds.append((found.last_device_node, (extra_key, elements)))

    @step
    def unhold(self, index: int) -> None:
        if self.holds:
            self._unlock(*self.holds.pop(index % len(self.holds)))

    @step
    def lock_and_unlock(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """Lock then unlock is the identity."""
        found = self._match(tokens, extra_key)
        elements = self._elements(tokens)[: len(found.device_indices)]
        before = self._shape()
        self._lock(found.last_device_node, (extra_key, elements))
        self._unlock(found.last_device_node, (extra_key, elements))
        self._same_shape(before, "K1", "lock then unlock")

    @step
    def reset(self) -> None:
        """Forget everything, as ``flush_cache`` does when nothing runs."""
        if self.requests or self.holds:
            return
        self._before_reset()
        self.on_target(self.tree.reset)
        self.on_target(self.allocator.clear)
        self.on_target(self.rows.clear)
        self.ledger.clear()
        self.kv.clear()
        sizes = (self.tree.evictable_size(), self.tree.protected_size(), self.tree.total_size())
        self.require(sizes == (0, 0, 0), "Z1", f"after reset the tree has sizes {sizes}")

    @step
    def wind_down(self) -> None:
        """End every request, drop every lock, evict everything: every page must be free."""
        while self.requests:
            self._finish(self.requests[0], insert=self.requests[0].prefilled)
        while self.holds:
            self._unlock(*self.holds.pop())
        self._evict(self.config.size)
        free = int(self.on_target(self.allocator.available_size))
        self.require(
            free == self.config.size,
            "P1",
            f"{free} of {self.config.size} tokens are free after everything was evicted",
        )

    # ---- what the steps are made of --------------------------------------------------------------

    def _before_reset(self) -> None:
        """What a caller must have waited for."""

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

    def _match(self, tokens: Sequence[int], extra_key: str | None) -> Any:
        self.ledger.may_free = self.ledger.only(set())
        key = self.target.RadixKey(list(tokens), extra_key)
        found = self.on_target(self.tree.match_prefix, self.target.MatchPrefixParams(key=key))
        slots = found.device_indices.tolist()
        expected = self.ledger.longest((extra_key, self._elements(tokens)))
        length = len(expected[1])
        self.require(
            len(slots) + found.host_hit_length == length,
            "M0",
            f"match found {len(slots)} tokens, but {length} are cached: {list(expected[1])}",
        )
        self.require(
            slots == self.ledger.slots(expected),
            "C1",
            f"match gave slots {slots}, but the KV is in {self.ledger.slots(expected)}",
        )
        return found

    def _lock(self, handle: Any, prefix: Prefix) -> None:
        before = self._evictable()
        result = self.on_target(self.tree.inc_lock_ref, handle)
        self.ledger.hold(handle, prefix)
        self._delta("inc_lock_ref", result.delta, before)

    def _unlock(self, handle: Any, prefix: Prefix) -> None:
        before = self._evictable()
        result = self.on_target(self.tree.dec_lock_ref, handle)
        self.ledger.drop(handle, prefix)
        self._delta("dec_lock_ref", result.delta, before)

    def _delta(self, name: str, delta: int | None, before: int) -> None:
        grown = self._evictable() - before
        if delta is not None:
            self.require(
                delta == grown, "K1", f"{name} returned {delta}, evictable_size changed by {grown}"
            )

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

    def _compute(self, req: Request, chunk: int | None) -> bool:
        """Allocate and compute up to ``chunk`` more prompt tokens; False when there is no room."""
        left = len(req.origin_input_ids) - req.computed
        count = left if chunk is None else min(left, max(1, chunk))
        if not self._allocate(req, count):
            return False
        self._forward(req, req.computed + count)
        return True

    def _allocate(self, req: Request, count: int) -> bool:
        """``count`` more slots for the row, evicting what is needed; False when there are none."""
        size, old = self.page_size, req.allocated
        pages = -(-(old + count) // size) - -(-old // size)
        short = pages * size - int(self.on_target(self.allocator.available_size))
        if short > 0:
            self._evict(short)
        if size == 1:
            out = self.on_target(self.allocator.alloc, count)
        else:
            last = self._row(req)[-1] if old else -1
            before, after = torch.tensor([old]), torch.tensor([old + count])
            one = torch.tensor([last])
            if count == 1:
                out = self.on_target(self.allocator.alloc_decode, after, after, one)
            else:
                out = self.on_target(
                    self.allocator.alloc_extend, before, before, after, after, one, count
                )
        if not self._granted(out, pages):
            return False
        slots = out.tolist()
        self.ledger.take(slots, req.rid)
        self.raise_noted()
        self._write(req, old, out)
        req.allocated += count
        return True

    def _granted(self, out: Any, pages: int) -> bool:
        free = len(self.ledger.free)
        self.require(
            (out is None) == (pages > free),
            "AL2",
            f"{pages} pages were {'refused' if out is None else 'granted'}, {free} are free",
        )
        return out is not None

    def _pages_for(self, count: int, name: str) -> list[int] | None:
        """Whole pages for a bare insert."""
        short = count - int(self.on_target(self.allocator.available_size))
        if short > 0:
            self._evict(short)
        out = self.on_target(self.allocator.alloc, count)
        if not self._granted(out, count // self.page_size):
            return None
        slots: list[int] = out.tolist()
        self.ledger.take(slots, name)
        self.raise_noted()
        return slots

    def _evict(self, num_tokens: int) -> None:
        size = self.page_size
        self.ledger.may_free = self.ledger.only_unlocked
        self.ledger.freed = []
        before = int(self.on_target(self.allocator.available_size))
        calls = self.allocator.free_calls = []
        result = self.on_target(self.tree.evict, self.target.EvictParams(num_tokens=num_tokens))
        count = result.num_tokens_evicted
        freed = len(self.ledger.freed) * size
        grown = int(self.on_target(self.allocator.available_size)) - before
        if self.ledger.queued is None:
            self.require(
                count == grown, "E1", f"evict returned {count}, the free space grew by {grown}"
            )
        self.require(count == freed, "E1", f"evict returned {count}, it freed {freed} tokens")
        for prefix in self.ledger.cached:
            above = (prefix[0], prefix[1][:-size])
            self.require(
                not above[1] or above in self.ledger.cached,
                "T1",
                f"the page of {list(above[1])} was evicted, but {list(prefix[1])} is still cached",
            )
        locked = self.ledger.locked()
        left = [p for p in self.ledger.cached if p not in locked]
        if freed < num_tokens and left:
            self.require(
                self._evictable() == 0 or self._must_stay(),
                "E3",
                f"evict({num_tokens}) freed {freed} although {list(left[0][1])} is not locked",
            )
        if "minimal_evict" in self.target.capabilities and len(calls) > 1:
            last = self._last_victim(calls) * size
            self.require(
                freed - last < num_tokens,
                "E2",
                f"evict({num_tokens}) freed {freed}, the last {last} for nothing",
            )

    def _must_stay(self) -> bool:
        """Whether everything that is still evictable may not be evicted."""
        return False

    def _last_victim(self, calls: Sequence[int]) -> int:
        """Pages of the victim that was chosen last, by what each call of ``free`` gave back."""
        return calls[-1]

    def _forward(self, req: Request, end: int) -> None:
        """Read every slot before, write the new ones."""
        self._read_check(req)
        self._write_kv(self._row(req)[:end], req.computed, req.tokens, req.extra_key)
        req.computed = end
        req.pending = True

    def _write_kv(
        self, row: list[int], start: int, tokens: tuple[int, ...], extra_key: str | None
    ) -> None:
        """The KV of tokens ``start ...`` goes into the slots of ``row``."""
        for position in range(start, len(row)):
            self.kv[row[position]] = (extra_key, tokens[: position + 1])

    def _bring(
        self, found: Any, tokens: Sequence[int], extra_key: str | None
    ) -> tuple[Any, torch.Tensor]:
        """What a request reuses of a match: the handle to lock, and the device slots."""
        return found.last_device_node, found.device_indices

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

    def _cache(self, req: Request) -> None:
        """``cache_unfinished_req``; what it must free and adopt is known before."""
        req.fill_ids = array(TOKEN, req.tokens[: req.computed])
        elements = self._whole(req.fill_ids)
        prefix = (req.extra_key, elements)
        known, row = self._expect(req, prefix, final=None)
        held = (req.last_node, (req.extra_key, elements[: req.cache_protected_len]))
        self.on_target(self.tree.cache_unfinished_req, req, chunked=not req.prefilled)
        self._settle(prefix, row, known)
        self.ledger.drop(*held)
        self.ledger.hold(req.last_node, prefix)
        self.require(
            req.cache_protected_len == len(elements),
            "R2",
            f"{req.rid}: cache_protected_len = {req.cache_protected_len}, but {len(elements)} "
            "tokens fill whole pages",
        )
        self.require(
            req.prefix_indices.tolist() == self._row(req)[: req.computed],
            "R2",
            f"{req.rid}: prefix_indices = {req.prefix_indices.tolist()}, its row has "
            f"{self._row(req)[: req.computed]}",
        )
        req.pending = False

    def _finish(self, req: Request, insert: bool) -> None:
        computed = req.computed
        req.output_ids.append(SAMPLED)
        committed = req.tokens[:computed]
        prefix = (req.extra_key, self._whole(committed))
        protected = (req.extra_key, prefix[1][: req.cache_protected_len])
        row = self._row(req)
        known, _ = self._expect(req, prefix, final=insert)
        self.on_target(self.tree.cache_finished_req, req, is_insert=insert)
        if insert:
            self._settle(prefix, row, known)
        else:
            self._all_freed()
        self.ledger.drop(req.last_node, protected)
        start = -(-computed // self.page_size) * self.page_size
        self._free(row[start : req.allocated])
        if self.ledger.queued is None:  # an open group may keep views of rows: nobody reuses them
            self._write(req, 0, torch.full((req.allocated,), -1))
        self.on_target(self.rows.free, req)
        self.requests.remove(req)
        if insert:
            found = self._match(committed, req.extra_key)
            self.require(
                len(found.device_indices) == len(prefix[1]),
                "M2",
                f"{len(prefix[1])} tokens were cached, {len(found.device_indices)} match",
            )

    def _expect(self, req: Request, prefix: Prefix, final: bool | None) -> tuple[int, list[int]]:
        """Say what the call may free: duplicates, and at the end the tail.

        ``final``: None for an unfinished request, else whether its pages are inserted.
        """
        size, row = self.page_size, self._row(req)
        known = len(self.ledger.longest(prefix)[1])
        stays = len(prefix[1]) if final is None else req.computed
        allowed = set(row[req.cache_protected_len : known])
        if final is not None:
            allowed |= set(row[len(prefix[1]) if final else req.cache_protected_len : stays])
        self._due = {slot // size for slot in allowed}
        self.ledger.may_free = self.ledger.only(self._due)
        self.ledger.freed = []
        return known, row

    def _all_freed(self) -> None:
        lost = sorted(self._due - set(self.ledger.freed))
        self.require(
            not lost,
            "P1",
            f"pages {lost} belong to nobody: the request gave them up, they were not freed",
        )

    def _settle(self, prefix: Prefix, row: list[int], known: int) -> None:
        """After an insert of a row: duplicates were freed, the rest is the tree's."""
        self._all_freed()
        self._adopt(prefix, row, known)

    def _adopt(self, prefix: Prefix, slots: list[int], known: int) -> None:
        for part in self.ledger.prefixes(prefix):
            if len(part[1]) > known:
                self.ledger.adopt(part, slots[len(part[1]) - 1] // self.page_size)

    def _inserted(self, seen: int, known: int) -> None:
        self.require(
            seen == known, "M3", f"insert returned {seen}, but {known} tokens were cached before"
        )

    def _free(self, slots: list[int]) -> None:
        """The caller gives back what is its own."""
        if slots:
            self.ledger.may_free = self.ledger.only({s // self.page_size for s in slots})
            self.on_target(self.allocator.free, torch.tensor(slots))

    def _row(self, req: Request) -> list[int]:
        row: list[int] = self._row_slots(req).tolist()
        return row

    def _row_slots(self, req: Request) -> torch.Tensor:
        slots: torch.Tensor = self.rows.req_to_token[req.req_pool_idx, : req.allocated]
        return slots

    def _holders(self) -> list[Any]:
        """Every handle that is locked, one entry a lock."""
        return [handle for handle, _ in self.ledger.holders]

    def _write(self, req: Request, start: int, slots: torch.Tensor) -> None:
        self.on_target(self.rows.write, (req.req_pool_idx, slice(start, start + len(slots))), slots)

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
