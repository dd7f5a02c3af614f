"""Drives allocators and trees with calls that break the contract, among calls that keep it.

Each misuse must raise and leave everything as it was: the ledger does not move, so the checks after
the step, and every later one, see what a half-done refusal has changed. Needs the capability
``refuses_misuse``; what counts as misuse is the list of strictness rules in ``docs/oracle.md``.
:mod:`refcache.oracle.drivers.kinds` tries each kind alone, on any target.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from refcache.oracle.drivers.allocator import AllocatorDriver
from refcache.oracle.drivers.tree.driver import TreeDriver
from refcache.oracle.program.driver import step


class AllocatorMisuseDriver(AllocatorDriver):
    """An :class:`AllocatorDriver` that also misuses the allocator."""

    needs = frozenset({"allocator", "refuses_misuse"})

    @step
    def free_free_page(self, index: int) -> None:
        """A page that nobody owns, or that waits in the open group, is freed (again)."""
        pages = sorted({*self.bench.ledger.free, *(self.queued or ())})
        if pages:
            page = pages[index % len(pages)]
            self._refuses(f"free of page {page}, which is free", [page * self.config.page_size])

    @step
    def free_with_free_page(self, index: int) -> None:
        """A live page and a free one in one call: neither is freed."""
        free = self.bench.ledger.free
        if free and self.sequences:
            live = self.sequences[index % len(self.sequences)][0]
            page = min(free)
            self._refuses(
                f"free of slot {live} and free page {page}", [live, page * self.config.page_size]
            )

    @step
    def free_dummy_page(self) -> None:
        self._refuses("free of slot 0", [0])

    @step
    def free_outside(self, beyond: int) -> None:
        """Slots after the last page, and before the first."""
        end = (self.config.pages + 1) * self.config.page_size
        self._refuses("free past the pool", [end + beyond])
        self._refuses("free of a negative slot", [-1 - beyond])

    @step
    def free_floats(self) -> None:
        if self.sequences:
            slots = torch.tensor(self.sequences[0], dtype=torch.float32)
            self.trial.misused("free of float slots", self.bench.subject.free, slots)

    @step
    def alloc_odd(self, pages: int) -> None:
        """A negative size; a size that fills no whole page."""
        self.trial.misused("alloc of -1 pages", self.bench.subject.alloc, -self.config.page_size)
        if self.config.page_size > 1:
            count = pages * self.config.page_size + 1
            self.trial.misused(f"alloc of {count} slots", self.bench.subject.alloc, count)

    @step
    def shrink(self, index: int) -> None:
        """A sequence grows to less than it has."""
        if self.config.page_size > 1 and self.sequences:
            old = self.sequences[index % len(self.sequences)]
            self._refuses_growth("alloc_extend to fewer tokens", old, -1, old[-1], -1)

    @step
    def wrong_sum(self, index: int, more: int) -> None:
        """The number of new tokens is not what the lengths say."""
        if self.config.page_size > 1 and self.sequences:
            old = self.sequences[index % len(self.sequences)]
            self._refuses_growth("alloc_extend with a wrong sum", old, more, old[-1], more + 1)

    @step
    def wrong_last_loc(self, index: int) -> None:
        """``last_loc`` sits at another offset than the last token."""
        if self.config.page_size > 1 and self.sequences:
            old = self.sequences[index % len(self.sequences)]
            self._refuses_growth("alloc_extend after another slot", old, 1, old[-1] + 1, 1)
            lens = torch.tensor([len(old) + 1])
            last = torch.tensor([old[-1] + 1])
            what = "alloc_decode after another slot"
            self.trial.misused(what, self.bench.subject.alloc_decode, lens, lens, last)

    @step
    def last_loc_outside(self, index: int) -> None:
        """``last_loc`` fits the length, but is in the dummy page, or in the page after the last."""
        if self.config.page_size > 1 and self.sequences:
            old = self.sequences[index % len(self.sequences)]
            lens, offset = torch.tensor([len(old) + 1]), (len(old) - 1) % self.config.page_size
            for page, where in ((0, "in page 0"), (self.config.pages + 1, "past the pool")):
                last = page * self.config.page_size + offset
                self._refuses_growth(f"alloc_extend after a slot {where}", old, 1, last, 1)
                args = (self.bench.subject.alloc_decode, lens, lens, torch.tensor([last]))
                self.trial.misused(f"alloc_decode after a slot {where}", *args)

    def _refuses(self, what: str, slots: Sequence[int]) -> None:
        self.trial.misused(what, self.bench.subject.free, torch.tensor(slots))

    def _refuses_growth(self, what: str, old: list[int], more: int, last: int, total: int) -> None:
        before, after = torch.tensor([len(old)]), torch.tensor([len(old) + more])
        args = (before, before, after, after, torch.tensor([last]), total)
        self.trial.misused(what, self.bench.subject.alloc_extend, *args)


class TreeMisuseDriver(TreeDriver):
    """A :class:`TreeDriver` that also misuses the tree."""

    needs = frozenset({"allocator", "tree", "refuses_misuse"})

    @step
    def unlock_unlocked(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """``dec_lock_ref`` of a node that nobody holds."""
        found = self.bench.match(tokens, extra_key)
        prefix = (extra_key, self.bench.elements(tokens)[: len(found.device_indices)])
        if prefix[1] and prefix not in self.ledger.locked():
            self._refused("dec_lock_ref of an unlocked node", self.tree.dec_lock_ref, found)

    @step
    def lock_stranger(self, tokens: Sequence[int]) -> None:
        """A node of another tree is locked and unlocked here."""
        other = TreeDriver(
            self.target, page_size=self.config.page_size, size=32 * self.config.page_size
        )
        other.insert(tokens)
        found = other.bench.match(tokens, None)
        if len(found.device_indices):
            self._refused("inc_lock_ref of another tree's node", self.tree.inc_lock_ref, found)
            self._refused("dec_lock_ref of another tree's node", self.tree.dec_lock_ref, found)

    @step
    def lock_evicted(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A node is locked that was evicted in between."""
        found = self.bench.match(tokens, extra_key)
        prefix = (extra_key, self.bench.elements(tokens)[: len(found.device_indices)])
        self.bench.evict(self.config.size)
        if prefix[1] and prefix not in self.ledger.cached:
            self._refused("inc_lock_ref of an evicted node", self.tree.inc_lock_ref, found)

    @step
    def insert_unfit(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A key that fills no whole pages; fewer slots than the key has elements."""
        if self.config.page_size > 1:
            odd = tokens[: len(self.bench.whole(tokens)) + 1 + self.config.is_eagle]
            if len(self.bench.elements(odd)) % self.config.page_size:
                self._refuses_insert("insert of a partial page", odd, extra_key, 0)
        whole = tokens[: len(self.bench.whole(tokens)) + self.config.is_eagle]
        if self.bench.whole(whole):
            self._refuses_insert("insert with a slot too few", whole, extra_key, 1)

    @step
    def write_outside_row(self, index: int, beyond: int) -> None:
        """A write that would reach the next request's row."""
        req = self.pick(index)
        if req is not None:
            end = self.config.context_length
            columns = (req.req_pool_idx, slice(end - 1, end + beyond))
            slots = torch.ones(beyond + 1, dtype=torch.int64)
            if beyond > 0:
                self._unchanged("a write past the row", self.bench.rows.write, columns, slots)

    def _refuses_insert(
        self, what: str, tokens: Sequence[int], extra_key: str | None, missing: int
    ) -> None:
        """An insert of ``tokens`` with so many slots too few must be refused."""
        count = len(self.bench.elements(tokens)) - missing
        params = self.target.InsertParams(
            key=self.target.RadixKey(list(tokens), extra_key), value=torch.arange(count) + 1
        )
        self._unchanged(what, self.tree.insert, params)

    def _refused(self, what: str, function: Callable[..., Any], found: Any) -> None:
        self._unchanged(what, function, found.last_device_node)

    def _unchanged(self, what: str, function: Callable[..., Any], *args: Any) -> None:
        before = self.bench.shape()
        self.trial.misused(what, function, *args)
        self.bench.same_shape(before, "Z3", f"the refused call ({what})")
