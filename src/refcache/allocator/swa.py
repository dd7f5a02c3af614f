"""``SWATokenToKVPoolAllocator``: a slot of the full pool and one of the window's pool, together.

A model with sliding-window layers keeps each token's KV in two pools: that of the layers with full
attention, for as long as the token is cached, and that of the layers with a window, for as long as
the token is inside the window (or a tree keeps it). A token is named by its full slot;
``full_to_swa_index_mapping`` says which window slot it has: 0 when it has none. So

* an allocation takes of both pools or of none;
* :meth:`free_swa` gives back window slots only, :meth:`free` both;
* a table entry above 0 is the one owner of its window slot, and is 0 from the moment it is freed:
  an entry that outlived its slot would free somebody else's.

With pages, what frees a slot frees its page, in both pools.

Models SGLang's class of this name. Stricter than 0.5.10: there ``alloc_decode`` takes full pages
and then fails for window pages, the saved state lacks the table, naming half a page in ``free_swa``
leaves the other half's entries, and a double free is noticed after it has happened.
"""

from typing import Any, NamedTuple

import torch

from refcache.allocator.base import AllocatorState, BaseTokenToKVPoolAllocator
from refcache.allocator.paged import PagedTokenToKVPoolAllocator
from refcache.allocator.token import TokenToKVPoolAllocator
from refcache.arguments import INTEGERS
from refcache.errors import InvalidArgument, InvalidSlot
from refcache.runtime import ImmediateRuntime, Runtime


class SWAAllocatorState(NamedTuple):
    """What ``backup_state`` returns: of both pools, and a copy of the table."""

    full: AllocatorState
    swa: AllocatorState
    full_to_swa_index_mapping: torch.Tensor


class SWATokenToKVPoolAllocator:
    """Hands out full slots that have a window slot each; see the module docstring.

    Args:
        size, size_swa: tokens of the full pool, and of the window's; whole pages.
        page_size, dtype, device, need_sort, runtime: as of the other allocators.
        kvcache: the :class:`~refcache.pool.SWAKVPool`, which is given the table; None: to account
            only.

    Attributes:
        full_attn_allocator, swa_attn_allocator: who hands out the slots of each pool.
        full_to_swa_index_mapping: int64 ``[size + page_size + 1]``; the last is -1, so -1 is -1.

    >>> allocator = SWATokenToKVPoolAllocator(8, 4, 1, torch.float16, "cpu", None, False)
    >>> slots = allocator.alloc(3)
    >>> allocator.free_swa(slots[:2])
    >>> allocator.full_available_size(), allocator.swa_available_size()
    (5, 3)
    >>> allocator.free(slots)
    >>> allocator.full_available_size(), allocator.swa_available_size()
    (8, 4)
    """

    def __init__(
        self,
        size: int,
        size_swa: int,
        page_size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: Any,
        need_sort: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.need_sort = need_sort
        self.runtime: Runtime = runtime or ImmediateRuntime()
        self._kvcache = kvcache

        def allocator(slots: int, pool: Any) -> BaseTokenToKVPoolAllocator:
            rest: Any = (dtype, device, pool, need_sort, self.runtime)
            if page_size == 1:
                return TokenToKVPoolAllocator(slots, *rest)
            return PagedTokenToKVPoolAllocator(slots, page_size, *rest)

        self.full_attn_allocator = allocator(size, getattr(kvcache, "full_kv_pool", None))
        self.swa_attn_allocator = allocator(size_swa, getattr(kvcache, "swa_kv_pool", None))
        mapping = torch.zeros(size + page_size + 1, dtype=torch.int64, device=device)
        mapping[-1] = -1
        self.full_to_swa_index_mapping = mapping
        if kvcache is not None:
            kvcache.register_mapping(mapping)

    @property
    def size(self) -> int:
        """Tokens that can be handed out at once: the smaller pool's."""
        return min(self.size_full, self.size_swa)

    @property
    def size_full(self) -> int:
        """Tokens of the full pool."""
        return self.full_attn_allocator.size

    @property
    def size_swa(self) -> int:
        """Tokens of the window's pool."""
        return self.swa_attn_allocator.size

    def available_size(self) -> int:
        """Tokens that can be had now: what is free in both pools."""
        return min(self.full_available_size(), self.swa_available_size())

    def full_available_size(self) -> int:
        """Free tokens of the full pool."""
        return self.full_attn_allocator.available_size()

    def swa_available_size(self) -> int:
        """Free tokens of the window's pool."""
        return self.swa_attn_allocator.available_size()

    def get_kvcache(self) -> Any:
        """The pool of both, or None."""
        return self._kvcache

    def debug_print(self) -> str:
        """What is free, in words, for a message."""
        full, swa = self.full_attn_allocator.debug_print(), self.swa_attn_allocator.debug_print()
        return f"full: {full}; window: {swa}"

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """The window slots int32 ``[n]`` of full slots; 0: none; -1 stays -1."""
        return self.full_to_swa_index_mapping[kv_indices].to(torch.int32)

    def clear(self) -> None:
        """Make everything free."""
        self.full_attn_allocator.clear()
        self.swa_attn_allocator.clear()
        self.full_to_swa_index_mapping[:-1] = 0

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """``need_size`` full slots, each with a window slot; page size 1 only.

        Returns:
            int64 ``[need_size]``, or None (and nothing changed) when either pool is short.

        Raises:
            InvalidArgument: a negative size, or pages (see :meth:`alloc_extend`).
        """
        if self.page_size != 1 or need_size < 0:
            raise InvalidArgument(
                f"alloc({need_size}) of page_size={self.page_size}: expected 0 or more tokens of "
                "page_size=1"
            )
        if need_size > self.available_size():
            return None
        full, swa = (one.alloc(need_size) for one in self._both())
        return self._mapped(full, swa)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """As :meth:`PagedTokenToKVPoolAllocator.alloc_extend`; ``last_loc`` are full slots.

        One page a request more than the new tokens must be free in each pool, as in 0.5.10: None
        may be an answer although the pages that are needed are there.

        Raises:
            InvalidArgument: as there; also page size 1, or a last page without its window slots.
        """
        full, swa = self._paged("alloc_extend")
        lengths = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu
        swa_last_loc = self._swa_last_loc(last_loc, prefix_lens)
        for one, last in ((full, last_loc), (swa, swa_last_loc)):
            one.pages_to_extend(*lengths, last, extend_num_tokens)
        if extend_num_tokens + len(seq_lens) * self.page_size > self.available_size():
            return None
        taken = full.alloc_extend(*lengths, last_loc, extend_num_tokens)
        return self._mapped(taken, swa.alloc_extend(*lengths, swa_last_loc, extend_num_tokens))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """As :meth:`PagedTokenToKVPoolAllocator.alloc_decode`; None when either pool is short."""
        full, swa = self._paged("alloc_decode")
        lengths = seq_lens, seq_lens_cpu
        swa_last_loc = self._swa_last_loc(last_loc, seq_lens - 1)
        pages = full.pages_to_decode(*lengths, last_loc)
        swa.pages_to_decode(*lengths, swa_last_loc)
        if pages * self.page_size > self.available_size():
            return None
        taken = full.alloc_decode(*lengths, last_loc)
        return self._mapped(taken, swa.alloc_decode(*lengths, swa_last_loc))

    def free(self, free_index: torch.Tensor) -> None:
        """Give full slots back, and the window slots that they still have. By page, if paged.

        Raises:
            InvalidArgument, InvalidSlot, DoubleFree: as of the other allocators; nothing is freed.
        """
        self.full_attn_allocator.free(free_index)
        self.free_swa(free_index)

    def free_swa(self, free_index: torch.Tensor) -> None:
        """Give back the window slots of full slots; those that have none are left out.

        The full slots stay handed out. With pages, of every page that has one of them.

        Raises:
            InvalidArgument: not a one-dimensional integer tensor.
            InvalidSlot: a slot of the dummy page, or out of range.
        """
        slots = self._whole_pages(free_index)
        swa = self.full_to_swa_index_mapping[slots]
        self.swa_attn_allocator.free(swa[swa > 0])
        self.full_to_swa_index_mapping[slots] = 0

    def free_group_begin(self) -> None:
        """Queue the frees that follow, of both kinds, until ``free_group_end``.

        Raises:
            InvalidArgument: a group is open.
        """
        for one in self._both():
            one.free_group_begin()

    def free_group_end(self) -> None:
        """Free what was queued, as one call a pool.

        Raises:
            InvalidArgument: no group is open.
        """
        for one in self._both():
            one.free_group_end()

    @property
    def is_not_in_free_group(self) -> bool:
        """No group is open."""
        return self.full_attn_allocator.is_not_in_free_group

    def backup_state(self) -> SWAAllocatorState:
        """Both pools' lists and the table as they are now, for ``restore_state``."""
        full, swa = (one.backup_state() for one in self._both())
        return SWAAllocatorState(full, swa, self.full_to_swa_index_mapping.clone())

    def restore_state(self, state: SWAAllocatorState) -> None:
        """Undo every alloc and free since ``backup_state``.

        Raises:
            InvalidArgument: a free group is open.
        """
        self.full_attn_allocator.restore_state(state.full)
        self.swa_attn_allocator.restore_state(state.swa)
        self.full_to_swa_index_mapping.copy_(state.full_to_swa_index_mapping)

    def merge_and_sort_free(self) -> None:
        """Of both pools: move the release list into the free list and sort that."""
        for one in self._both():
            one.merge_and_sort_free()

    def _both(self) -> tuple[BaseTokenToKVPoolAllocator, BaseTokenToKVPoolAllocator]:
        return self.full_attn_allocator, self.swa_attn_allocator

    def _paged(self, what: str) -> tuple[PagedTokenToKVPoolAllocator, PagedTokenToKVPoolAllocator]:
        full, swa = self._both()
        if not isinstance(full, PagedTokenToKVPoolAllocator):
            raise InvalidArgument(f"{what} of page_size=1: expected alloc")
        assert isinstance(swa, PagedTokenToKVPoolAllocator)
        return full, swa

    def _swa_last_loc(self, last_loc: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
        """The window slots of ``last_loc``; any end of a page where the last page is full.

        What grows from a full page does not touch it, so its window slots may be gone.
        """
        if last_loc.device.type == "cpu" and last_loc.numel():
            low, high = (int(bound) for bound in last_loc.aminmax())
            last = self.size_full + self.page_size - 1
            if low < -1 or high > last:
                raise InvalidArgument(f"last_loc {low} to {high}: expected -1 to {last}")
        swa = self.full_to_swa_index_mapping[last_loc]
        if prefix_lens.shape != swa.shape:
            return swa  # refused by whoever is asked next
        gone = (swa == 0) & (prefix_lens % self.page_size == 0)
        return swa.masked_fill(gone, 2 * self.page_size - 1)

    def _mapped(self, full: torch.Tensor | None, swa: torch.Tensor | None) -> torch.Tensor:
        """Enter what was taken of both pools, which was checked to be there, into the table."""
        assert full is not None
        assert swa is not None
        self.full_to_swa_index_mapping[full] = swa
        return full

    def _whole_pages(self, slots: torch.Tensor) -> torch.Tensor:
        """The slots of every page that has one of ``slots``."""
        if slots.dim() != 1 or slots.dtype not in INTEGERS:
            raise InvalidArgument(
                f"free_swa: {slots.dtype} {tuple(slots.shape)}; expected integers [n]"
            )
        if not slots.numel():
            return slots.to(torch.int64)
        self.runtime.host_sync()
        low, high = (int(bound) for bound in slots.aminmax())
        first, last = self.page_size, self.size_full + self.page_size - 1
        if low < first or high > last:
            raise InvalidSlot(f"free_swa of slots {low} to {high}: expected {first} to {last}")
        pages = torch.div(slots.to(torch.int64), self.page_size, rounding_mode="floor")
        distinct: torch.Tensor = torch.unique(pages)
        within = torch.arange(self.page_size, device=pages.device)
        return (distinct[:, None] * self.page_size + within).flatten()
