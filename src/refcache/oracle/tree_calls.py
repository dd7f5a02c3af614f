"""Single calls on a tree and its allocator, each with what it must free, find and return.

The ledger knows the tree's exact content from outside. Any victim, split point and free page is
legal.
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.oracle.ledger import Prefix
from refcache.oracle.request import Request
from refcache.oracle.tree_checks import TreeChecks


class TreeCalls(TreeChecks):
    """A :class:`TreeChecks` that calls: match, lock, evict, allocate, free, write."""

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

    def _free(self, slots: list[int]) -> None:
        """The caller gives back what is its own."""
        if slots:
            self.ledger.may_free = self.ledger.only({s // self.page_size for s in slots})
            self.on_target(self.allocator.free, torch.tensor(slots))

    def _write(self, req: Request, start: int, slots: torch.Tensor) -> None:
        self.on_target(self.rows.write, (req.req_pool_idx, slice(start, start + len(slots))), slots)

    def _write_kv(
        self, row: list[int], start: int, tokens: tuple[int, ...], extra_key: str | None
    ) -> None:
        """The KV of tokens ``start ...`` goes into the slots of ``row``."""
        for position in range(start, len(row)):
            self.kv[row[position]] = (extra_key, tokens[: position + 1])

    def _adopt(self, prefix: Prefix, slots: list[int], known: int) -> None:
        for part in self.ledger.prefixes(prefix):
            if len(part[1]) > known:
                self.ledger.adopt(part, slots[len(part[1]) - 1] // self.page_size)

    def _inserted(self, seen: int, known: int) -> None:
        self.require(
            seen == known, "M3", f"insert returned {seen}, but {known} tokens were cached before"
        )
