"""``PagedTokenToKVPoolAllocator``: whole pages, and the tail of a request's last page.

Freed pages go, ascending, to the *front* of the free list (SGLang 0.5.10): the page that was freed
last is used next.
"""

from typing import Any

import torch

from refcache.allocator.base import BaseTokenToKVPoolAllocator
from refcache.arguments import shown, slot_list, whole_number
from refcache.backend import Backend, resolve
from refcache.errors import InvalidArgument
from refcache.reference import new_pages_needed
from refcache.runtime import Runtime


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Hands out pages; also grows requests token by token. Arguments as in the base class.

    ``backend`` names who computes the slots ("reference" or "triton"); None picks by device.

    >>> allocator = PagedTokenToKVPoolAllocator(16, 4, torch.float16, "cpu", kvcache=None)
    >>> allocator.alloc(8).tolist()
    [4, 5, 6, 7, 8, 9, 10, 11]
    >>> prefix, seq, last = torch.tensor([2]), torch.tensor([7]), torch.tensor([5])
    >>> allocator.alloc_extend(prefix, prefix, seq, seq, last, 5).tolist()
    [6, 7, 12, 13, 14]
    >>> allocator.available_size()
    4
    >>> prefix, seq, last = torch.tensor([0]), torch.tensor([12]), torch.tensor([-1])
    >>> allocator.alloc_extend(prefix, prefix, seq, seq, last, 12) is None
    True
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
        backend: str | None = None,
    ) -> None:
        self.ops: Backend = resolve(backend, device)
        super().__init__(size, page_size, dtype, device, kvcache, need_sort, runtime)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        """Slots for request i to grow from ``prefix_lens[i]`` to ``seq_lens[i]`` tokens.

        Capacity is decided first, from the CPU lengths. Which slots: see
        :func:`refcache.reference.alloc_extend`.

        Args:
            prefix_lens, seq_lens, last_loc: integer ``[batch]`` on the device.
            prefix_lens_cpu, seq_lens_cpu: the same lengths on the CPU.
            extend_num_tokens: ``sum(seq_lens - prefix_lens)``.

        Returns:
            int64 ``[extend_num_tokens]``, or None (and nothing changed) when too few are free.

        Raises:
            InvalidArgument: lengths that shrink, a sum that is not ``extend_num_tokens``, shapes
                that differ, or a ``last_loc`` that is not at the offset of token ``prefix - 1``
                (the last is checked on CPU tensors only: reading a device tensor would wait).
        """
        batch = prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc
        return self._take(
            self.pages_to_extend(*batch, extend_num_tokens),
            lambda free: self.ops.alloc_extend(
                prefix_lens, seq_lens, last_loc, free, self.page_size, extend_num_tokens
            ),
        )

    def pages_to_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> int:
        """How many pages :meth:`alloc_extend` of the same arguments takes; its refusals too."""
        self._check_batch(prefix_lens, seq_lens, last_loc, on_cpu=(prefix_lens_cpu, seq_lens_cpu))
        before, after = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist()
        if any(not 0 <= b <= a for b, a in zip(before, after, strict=True)):
            raise InvalidArgument(
                f"alloc_extend from {before} to {after} tokens: expected lengths of 0 or more that "
                "do not shrink"
            )
        whole_number("extend_num_tokens", extend_num_tokens)
        growth = sum(after) - sum(before)
        if growth != extend_num_tokens:
            raise InvalidArgument(f"{extend_num_tokens=}: the lengths grow by {growth} in all")
        self._check_same(prefix_lens, prefix_lens_cpu)
        self._check_same(seq_lens, seq_lens_cpu)
        self._check_last_loc(last_loc, prefix_lens_cpu)
        return new_pages_needed(prefix_lens_cpu, seq_lens_cpu, self.page_size)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        """One slot a request, for its token ``seq_lens[i] - 1``. Contract as ``alloc_extend``."""
        return self._take(
            self.pages_to_decode(seq_lens, seq_lens_cpu, last_loc),
            lambda free: self.ops.alloc_decode(seq_lens, last_loc, free, self.page_size),
        )

    def pages_to_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> int:
        """How many pages :meth:`alloc_decode` of the same arguments takes; its refusals too."""
        self._check_batch(seq_lens, last_loc, on_cpu=(seq_lens_cpu,))
        if seq_lens_cpu.numel() and int(seq_lens_cpu.min()) < 1:
            raise InvalidArgument(f"alloc_decode to {seq_lens_cpu.tolist()} tokens: expected 1 up")
        self._check_same(seq_lens, seq_lens_cpu)
        before = seq_lens_cpu - 1
        self._check_last_loc(last_loc, before)
        return int((before % self.page_size == 0).count_nonzero())

    def _check_batch(self, *tensors: torch.Tensor, on_cpu: tuple[torch.Tensor, ...]) -> None:
        for t in (*on_cpu, *tensors):
            device = "cpu" if any(t is other for other in on_cpu) else self.device
            slot_list("lengths and last_loc", t, device)
            if len(t) != len(on_cpu[0]) or t.dtype not in (torch.int32, torch.int64):
                raise InvalidArgument(
                    f"lengths and last_loc: {shown(t)}; expected int32 or int64 [{len(on_cpu[0])}]"
                )

    @staticmethod
    def _check_same(lens: torch.Tensor, lens_cpu: torch.Tensor) -> None:
        """On the CPU, where it costs no wait: both say the same."""
        if lens is not lens_cpu and lens.device.type == "cpu" and bool((lens != lens_cpu).any()):
            raise InvalidArgument(
                f"lengths {lens.tolist()} and {lens_cpu.tolist()} on the CPU: expected the same"
            )

    def _check_last_loc(self, last_loc: torch.Tensor, prefix_lens: torch.Tensor) -> None:
        if last_loc.device.type != "cpu" or not last_loc.numel():
            return
        page_size, end = self.page_size, self.size + self.page_size
        low, high = last_loc.aminmax()
        inside = page_size <= int(low) and int(high) < end
        if inside and not int(((last_loc + 1 - prefix_lens) % page_size).count_nonzero()):
            return
        pairs = zip(last_loc.tolist(), prefix_lens.tolist(), strict=True)
        for i, (last, prefix) in enumerate(pairs):  # which one, unless it has no prefix
            if prefix and not (page_size <= last < end and (last + 1 - prefix) % page_size == 0):
                raise InvalidArgument(
                    f"last_loc[{i}]={last} for a prefix of {prefix} tokens at {page_size=}: not "
                    "the slot of the prefix's last token"
                )

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        pages = torch.div(slots.to(torch.int64), self.page_size, rounding_mode="floor")
        # neighbours first: a run of slots is mostly one page after another, and sorting is slow
        distinct: torch.Tensor = torch.unique(torch.unique_consecutive(pages))
        return distinct

    def _order(self, pages: torch.Tensor) -> torch.Tensor:
        return pages.sort().values

    def _in_turn(self, freed: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(freed[::-1])

    def _given_back(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.need_sort:
            return self.free_pages, torch.cat([pages, self.release_pages])
        return torch.cat([pages, self.free_pages]), self.release_pages
