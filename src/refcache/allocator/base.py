"""What both allocators share: the free list, the release list, free groups, ownership.

A page is in exactly one of five places: the free list, the release list (``need_sort``), the queue
of an open free group, the list lent to a loop on the device, or handed out. The first four are
tensors; the last is the mask ``_held``, which is what makes a double free an error instead of two
owners of one page. Page 0 is the dummy
page for padded tokens: never handed out, never freed. With page size 1 a page is a slot.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from refcache.arguments import shown, slot_list, whole_number
from refcache.errors import DoubleFree, InvalidArgument, InvalidSlot
from refcache.runtime import ImmediateRuntime, Runtime


class AllocatorState(NamedTuple):
    """What ``backup_state`` returns: the two lists of page numbers."""

    free_pages: torch.Tensor
    release_pages: torch.Tensor


class LentPages(NamedTuple):
    """A free list for a loop on the device, as ``alloc_decode`` and ``alloc_extend`` take it.

    Attributes:
        pages: int64 ``[num_pages]``; the pages that are lent are its end.
        cursor: int64 ``[1]``, entries of ``pages`` that are used; behind its end, by the pages that
            were missing.
    """

    pages: torch.Tensor
    cursor: torch.Tensor


class BaseTokenToKVPoolAllocator:
    """Hands out device slots; pages are numbered from 1 to ``num_pages``.

    Args:
        size: capacity in tokens; a multiple of ``page_size``.
        page_size: slots a page.
        dtype: of the KV cache; kept for callers that ask.
        device: where slot indices live.
        kvcache: the device pool whose slots these are, or None to account only.
        need_sort: freed pages wait in the release list and join the free list, sorted, when a
            request is short. It changes which page comes next, never how many there are.
        runtime: told when a call makes the host wait for the device (``free`` does).

    Raises:
        InvalidArgument: a size below one page or not in whole pages.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: Any,
        need_sort: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        page_size = whole_number("page_size", page_size, 1)
        if whole_number("size", size) < page_size or size % page_size:
            raise InvalidArgument(f"size={size}: expected whole pages of {page_size}")
        self.size = size
        self.page_size = page_size
        self.num_pages = size // page_size
        self.dtype = dtype
        self.device = device
        self.need_sort = need_sort
        self.runtime: Runtime = runtime or ImmediateRuntime()
        self._kvcache = kvcache
        self._lent: LentPages | None = None
        self.clear()

    def clear(self) -> None:
        """Make every page free, in ascending order, close any free group and end any loan."""
        free_pages = torch.arange(1, self.num_pages + 1, device=self.device)
        release_pages = free_pages[:0]
        held = torch.zeros(self.num_pages + 1, dtype=torch.bool, device=self.device)
        self.free_pages, self.release_pages, self._held = free_pages, release_pages, held
        self._lent_from: int | None = None
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []

    def get_kvcache(self) -> Any:
        """The device pool, or None."""
        return self._kvcache

    def debug_print(self) -> str:
        """The number of free pages, in words, for a message."""
        return f"{len(self.free_pages)} free, {len(self.release_pages)} released pages"

    def available_size(self) -> int:
        """Free tokens: both lists. Pages queued in an open free group are not free yet."""
        return (self.free_pages.numel() + self.release_pages.numel()) * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` slots in whole pages, from the front of the free list.

        Returns:
            int64 ``[need_size]``, or None (and nothing changed) when too few are free.

        Raises:
            InvalidArgument: ``need_size`` negative or not in whole pages.
        """
        if whole_number("need_size", need_size) % self.page_size:
            raise InvalidArgument(
                f"alloc({need_size}): expected a multiple of page_size={self.page_size}, 0 or more"
            )
        count = need_size // self.page_size
        return self._take(count, lambda free: self._slots(free[:count]))

    def free(self, free_index: torch.Tensor) -> None:
        """Give slots back: every page that has one of them becomes free (or queued).

        A page named twice in one call is one free.

        Args:
            free_index: integer ``[n]``, in any order.

        Raises:
            InvalidArgument: not a one-dimensional integer tensor on the allocator's device.
            InvalidSlot: a slot of the dummy page, or out of range.
            DoubleFree: a page that is free already, or queued in the open group.
        """
        self.free_each((free_index,))

    def free_each(self, lists: Sequence[torch.Tensor]) -> None:
        """``free`` of one list after another, as one call: all are given back, or none.

        A page must not be in two of them. Raises as :meth:`free`.
        """
        if not isinstance(lists, list | tuple):
            raise InvalidArgument(f"free_each: {shown(lists)}; expected a list of slot lists")
        given = [slot_list("free", slots, self.device) for slots in lists]
        freed = [self._checked(slots) for slots in given if len(slots)]
        if not freed:
            return
        pages = freed[0] if len(freed) == 1 else self._apart(freed)
        lists_after = self._given_back(pages) if self.is_not_in_free_group else None
        self._held[pages] = False
        if lists_after is None:
            self.free_group += freed
        else:
            self.free_pages, self.release_pages = lists_after

    def _checked(self, free_index: torch.Tensor) -> torch.Tensor:
        """The pages that a free of these slots gives back."""
        self.runtime.host_sync()
        pages = self._pages_of(free_index)
        low, high = (int(bound) for bound in pages.aminmax())
        if low < 1 or high > self.num_pages:
            raise InvalidSlot(
                f"free of page {low if low < 1 else high}: expected pages 1 to {self.num_pages}"
            )
        held = self._held[pages]
        if not held.all():
            twice = pages[~held].tolist()
            raise DoubleFree(f"free of page {twice[0]}: it is free already, or queued to be freed")
        return pages

    def _apart(self, freed: list[torch.Tensor]) -> torch.Tensor:
        """The pages of several frees, in the order in which one call would free them."""
        pages = self._in_turn(freed)
        if len(torch.unique(pages)) < len(pages):
            raise DoubleFree("free of several lists: a page is in two of them")
        return pages

    def free_group_begin(self) -> None:
        """Queue the frees that follow until ``free_group_end``. Groups do not nest.

        Raises:
            InvalidArgument: a group is open.
        """
        if not self.is_not_in_free_group:
            raise InvalidArgument("free_group_begin: a free group is open already")
        self.is_not_in_free_group = False

    def free_group_end(self) -> None:
        """Free what was queued, as one call.

        Raises:
            InvalidArgument: no group is open.
        """
        if self.is_not_in_free_group:
            raise InvalidArgument("free_group_end: no free group is open")
        if self.free_group:
            pages = self._order(torch.cat(self.free_group))
            self.free_pages, self.release_pages = self._given_back(pages)
        self.is_not_in_free_group = True
        self.free_group = []

    def backup_state(self) -> AllocatorState:
        """The lists as they are now, for ``restore_state``.

        Raises:
            InvalidArgument: the free pages are lent.
        """
        self._check_not_lent("backup_state")
        return AllocatorState(self.free_pages, self.release_pages)

    def restore_state(self, state: AllocatorState) -> None:
        """Undo every alloc and free since ``backup_state``.

        Raises:
            InvalidArgument: a free group is open, the free pages are lent, or this is no state of
                such an allocator.
        """
        if not self.is_not_in_free_group:
            raise InvalidArgument("restore_state: a free group is open")
        self._check_not_lent("restore_state")
        if not isinstance(state, tuple | list) or len(state) != 2:
            raise InvalidArgument(f"restore_state({shown(state)}): expected what backup_state gave")
        free_pages, release_pages = (slot_list("restore_state", s, self.device) for s in state)
        pages = torch.cat([free_pages, release_pages]).to(torch.int64)
        inside = (pages >= 1) & (pages <= self.num_pages)
        held = torch.ones_like(self._held)
        held[0] = False
        held[pages * inside] = False
        self.runtime.host_sync()
        if not inside.all() or int(held.count_nonzero()) != self.num_pages - len(pages):
            raise InvalidArgument(
                f"restore_state of {len(pages)} pages: expected each of 1 to {self.num_pages} once "
                "at most"
            )
        self.free_pages, self.release_pages, self._held = free_pages, release_pages, held

    def lend_free_pages(self) -> LentPages:
        """Hand all free pages to a loop on the device, a captured CUDA graph for instance.

        The loop passes ``pages`` and ``cursor`` to the allocation ops of ``refcache_ops``. Both
        tensors keep their addresses from one loan to the next. Until :meth:`reclaim_free_pages` the
        pages are neither free nor handed out here: ``alloc`` has what is freed meanwhile, and slots
        that the loop took cannot be freed yet.

        Raises:
            InvalidArgument: they are lent already.
        """
        self._check_not_lent("lend_free_pages")
        free = self.free_pages
        if len(self.release_pages):
            free = torch.cat([free, self.release_pages]).sort().values
        if self._lent is None:
            whole = torch.zeros(self.num_pages, dtype=torch.int64, device=self.device)
            self._lent = LentPages(whole, whole.new_zeros(1))
        first = self.num_pages - len(free)
        self._lent.pages[first:] = free
        self._lent.cursor.fill_(first)
        self.free_pages, self.release_pages, self._lent_from = free[:0], free[:0], first
        return self._lent

    def reclaim_free_pages(self) -> int:
        """Take back what the loop did not use, in front of what was freed meanwhile.

        The pages that it used are handed out from now on. Waits for the device.

        Returns:
            How many pages the loop asked for in vain: 0 unless it ran out.

        Raises:
            InvalidArgument: nothing is lent, or the cursor went backwards.
        """
        first, lent = self._lent_from, self._lent
        if first is None or lent is None:
            raise InvalidArgument("reclaim_free_pages: nothing is lent; call lend_free_pages first")
        self.runtime.host_sync()
        used = int(lent.cursor)
        if used < first:
            raise InvalidArgument(f"reclaim_free_pages: cursor={used}, expected {first} or more")
        held = self._held.clone()
        held[lent.pages[first:used]] = True
        free = torch.cat([lent.pages[used:], self.free_pages])
        self.free_pages, self._held, self._lent_from = free, held, None
        return max(0, used - self.num_pages)

    def _check_not_lent(self, what: str) -> None:
        if self._lent_from is not None:
            raise InvalidArgument(f"{what}: the free pages are lent; call reclaim_free_pages first")

    def merge_and_sort_free(self) -> None:
        """Move the release list into the free list and sort that."""
        self.free_pages, self.release_pages = self._merged()

    def _merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both lists as ``merge_and_sort_free`` leaves them."""
        if len(self.release_pages) == 0:
            return self.free_pages, self.release_pages
        merged = torch.cat([self.free_pages, self.release_pages]).sort().values
        return merged, self.release_pages[:0]

    def _take(
        self, num_pages: int, slots: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """Take pages off the front of the free list; None when there are too few.

        Returns ``slots(free list)``, which is computed before the pages are taken. What was freed
        while ``need_sort`` was on counts, also if it is off by now.
        """
        free, release = self.free_pages, self.release_pages
        if num_pages > len(free):
            free, release = self._merged()
        enough = num_pages <= len(free)
        out = slots(free) if enough else None
        if enough:
            pages, free = free[:num_pages], free[num_pages:]
            self._held[pages] = True
        self.free_pages, self.release_pages = free, release
        return out

    def _slots(self, pages: torch.Tensor) -> torch.Tensor:
        within = torch.arange(self.page_size, device=pages.device)
        return (pages[:, None] * self.page_size + within).flatten()

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The distinct pages of some slots, in the order in which they are freed."""
        raise NotImplementedError

    def _order(self, pages: torch.Tensor) -> torch.Tensor:
        """The order in which the pages of a whole free group are freed."""
        raise NotImplementedError

    def _in_turn(self, freed: list[torch.Tensor]) -> torch.Tensor:
        """The pages of one free after another, as one free that leaves the same lists."""
        raise NotImplementedError

    def _given_back(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both lists with freed pages on the free list, or the release list with ``need_sort``."""
        raise NotImplementedError
