"""Rules about the tree on the device: matches, inserts, evictions, locks, and requests' rows."""

from typing import Any

from refcache.oracle.ledger.ledger import Prefix
from refcache.oracle.rules.violation import Violation
from refcache.trace import format as f
from refcache.trace.model import show
from refcache.trace.rules import Rules, Undecidable, op_of


class TreeRules(Rules):
    """The calls of a tree cache of one tier."""

    def _longest_on_host(self, prefix: Prefix, start: int) -> int:
        """How far ``prefix`` goes on in the host tier, from ``start`` elements on."""
        end = start
        for part in self.host.prefixes(prefix):
            if len(part[1]) > start:
                if part not in self.host.cached:
                    break
                end = len(part[1])
        return end

    def _match_prefix(self, call: f.MatchPrefix) -> None:
        prefix = self._whole(call.tokens, call.extra_key)
        here = self.device.longest(prefix)
        length = len(here[1])
        expected = self.device.slots(here)
        if call.slots != expected:
            common = next(
                (i for i, (a, b) in enumerate(zip(call.slots, expected, strict=False)) if a != b),
                min(len(call.slots), len(expected)),
            )
            pages = self.pages_of((call.slots if len(call.slots) > common else expected)[common:])
            raise Violation(
                "M0" if common == min(len(call.slots), length) else "C1",
                f"match of {show(prefix)} gave {len(call.slots)} slots, {length} tokens are on the "
                f"device: {show(here)}; they differ from token {common} on, in pages {pages[:4]}",
            )
        there = self._longest_on_host(prefix, length)
        self._require(
            call.host_hit_length == there - length,
            "M0",
            f"match of {show(prefix)} found {length} tokens on the device and "
            f"{call.host_hit_length} on the host, but {there - length} more are on the host",
        )
        self.nodes[call.node] = here
        if call.host_hit_length:
            self.nodes[call.host_node] = (prefix[0], prefix[1][:there])

    def _insert(self, call: f.Insert) -> None:
        prefix = self._whole(call.tokens, call.extra_key)
        known = len(self.device.longest(prefix)[1])
        if len(call.slots) < len(prefix[1]):
            raise Undecidable(f"{len(call.slots)} slots for {len(prefix[1])} elements")
        self._require(
            call.prefix_len == known,
            "M3",
            f"insert of {show(prefix)} returned {call.prefix_len}, but {known} tokens were on the "
            "device before",
        )
        self._adopt(prefix, call.slots, known)

    def _adopt(self, prefix: Prefix, slots: f.Slots, known: int) -> None:
        """The tree takes over whole pages of a caller."""
        size = self.page_size
        for part in self.device.prefixes(prefix):
            end = len(part[1])
            if end <= known:
                continue
            page, mine = slots[end - size] // size, slots[end - size : end]
            self._require(
                mine == list(range(page * size, (page + 1) * size)),
                "P2",
                f"slots {mine} were cached as a page of {size}",
            )
            self._require(
                isinstance(self.device.owner.get(page), str),
                "P1",
                f"page {page} was cached for {show(part)}; {self.device.says(page)}",
            )
            self.device.adopt(part, page)

    def _evict(self, call: f.Evict) -> None:
        """Its frees are inner records."""

    def _returned(self, line: f.Line) -> None:
        """E1: what an eviction returns is what it gave back, on its own tier."""
        call = line.call
        if not isinstance(call, f.Evict | f.EvictHost) or call.error is not None or not self.totals:
            return
        kind, what = (f.Free, "tokens") if isinstance(call, f.Evict) else (f.HostFree, "host slots")
        parts = [part for part in line.inner if isinstance(part, kind) and part.error is None]
        pages = [page for part in parts for page in self.pages_of(part.slots)]
        freed = len(pages) * self.page_size
        self._require(
            call.num_tokens_evicted == freed or len({*pages}) < len(pages),
            "E1",
            f"{op_of(call)} returned {call.num_tokens_evicted}, it freed {freed} {what}",
        )

    def _evicted_enough(self, call: f.Evict, after: f.Sizes) -> None:
        """E3; under write-back a leaf without room on the host may have to stay."""
        freed = call.num_tokens_evicted
        if freed >= call.num_tokens or self.header.write_policy == "write_back":
            return
        locked = self.device.locked()
        busy = {page for copy in self.copies.values() for page in copy.device}
        left = (p for p, page in self.device.cached.items() if p not in locked and page not in busy)
        unlocked = next(left, None)
        self._require(
            unlocked is None or after.evictable == 0,
            "E3",
            f"evict({call.num_tokens}) freed {freed} although {show(unlocked or (None, ()))} is "
            "not locked",
        )

    def _inc_lock_ref(self, call: f.IncLockRef) -> None:
        self._lock(call.node, self._prefix_of(call.node))

    def _lock(self, node: int, prefix: Prefix) -> None:
        gone = prefix[1] and prefix not in self.device.cached
        self._require(not gone, "L2", f"{show(prefix)} was locked, and is not on the device")
        if prefix[1]:
            self.device.hold(node, prefix)

    def _dec_lock_ref(self, call: f.DecLockRef) -> None:
        self._unlock(call.node, self._prefix_of(call.node))

    def _unlock(self, node: int, prefix: Prefix) -> None:
        if prefix[1]:
            self.device.drop(node, prefix)

    def _reset(self, call: f.Reset) -> None:
        self.device.forget()
        self.host.forget()
        self.copies.clear()

    def due(self, call: f.CacheUnfinishedReq | f.CacheFinishedReq) -> set[int]:
        """The pages that the call has to free: duplicates, and at the end the tail."""
        if call.tokens is None or call.row is None:
            raise Undecidable("the cache did not ask how many tokens were computed")
        if len(call.row) != len(call.tokens):
            raise Undecidable(f"{len(call.row)} slots for {len(call.tokens)} tokens")
        protected = call.cache_protected_len
        whole = self._whole(call.tokens, call.extra_key)
        known = len(self.device.longest(whole)[1])
        row = call.row
        self._check_row(call, (whole[0], whole[1][:protected]))
        slots = row[protected:known]
        if isinstance(call, f.CacheFinishedReq):
            slots = slots + row[len(whole[1]) :] if call.is_insert else row[protected:]
        return set(self.pages_of(slots))

    def _check_row(
        self, call: f.CacheUnfinishedReq | f.CacheFinishedReq, protected: Prefix
    ) -> None:
        """The row before the call: first the tree's pages, then the request's own."""
        assert call.row is not None
        size, row, length = self.page_size, call.row, call.cache_protected_len
        self._require(
            length % size == 0 and 0 <= length <= len(protected[1]),
            "R2",
            f"{length} protected tokens of {len(row)}, page size {size}",
        )
        ours = self.device.slots(protected) if self._is_cached(protected) else None
        if ours != row[:length]:
            pages = self.pages_of(row[:length])
            raise Violation(
                "R2",
                f"the row starts with pages {pages[:4]}; the tree has {show(protected)} in "
                f"{'no' if ours is None else self.pages_of(ours)[:4]} pages",
            )
        for start in range(length, len(row), size):
            page, mine = row[start] // size, row[start : start + size]
            self._require(
                mine == list(range(page * size, page * size + len(mine))),
                "R1",
                f"tokens {start} to {start + len(mine) - 1} are in slots {mine}, page size {size}",
            )
            self._require(
                isinstance(self.device.owner.get(page), str),
                "P1",
                f"token {start} of the row is in page {page}; {self.device.says(page)}",
            )

    def _cache_unfinished_req(self, call: f.CacheUnfinishedReq) -> None:
        whole = self._whole(call.tokens, call.extra_key)
        self._settle(call, whole, call.row, insert=True)
        self._require(
            call.new_protected_len == len(whole[1]),
            "R2",
            f"cache_protected_len = {call.new_protected_len}, but {len(whole[1])} tokens fill "
            "whole pages",
        )
        expected = self.device.slots(whole) + call.row[len(whole[1]) :]
        self._require(
            call.new_row == expected,
            "R2",
            f"the row is {call.new_row[:16]} after the call, expected {expected[:16]} "
            f"(pages {self.pages_of(expected)[:4]})",
        )
        self.nodes[call.new_node] = whole
        self._lock(call.new_node, whole)
        self._unlock(call.last_node, self._held_by(call, whole))

    def _cache_finished_req(self, call: f.CacheFinishedReq) -> None:
        assert call.tokens is not None
        assert call.row is not None
        whole = self._whole(call.tokens, call.extra_key)
        self._settle(call, whole, call.row, call.is_insert)
        self._unlock(call.last_node, self._held_by(call, whole))

    def _held_by(self, call: Any, whole: Prefix) -> Prefix:
        self._prefix_of(call.last_node)
        return whole[0], whole[1][: call.cache_protected_len]

    def _settle(self, call: Any, whole: Prefix, row: f.Slots, insert: bool) -> None:
        freed = set(self.device.freed.pages)
        known = len(self.device.longest(whole)[1])
        due = set(self.pages_of(row[call.cache_protected_len : known]))
        if isinstance(call, f.CacheFinishedReq):
            start = len(whole[1]) if insert else call.cache_protected_len
            due = (due if insert else set()) | set(self.pages_of(row[start:]))
        lost = sorted(due - freed)
        self._require(
            not lost,
            "P1",
            f"pages {lost} belong to nobody: the request gave them up, they were not freed",
        )
        if insert:
            self._adopt(whole, row, known)
