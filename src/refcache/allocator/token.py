"""``TokenToKVPoolAllocator``: page size 1. Freed slots go, in the given order, to the end."""

from typing import Any

import torch

from refcache.allocator.base import BaseTokenToKVPoolAllocator
from refcache.runtime import Runtime


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Hands out single slots, oldest free first. Arguments as in the base class."""

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: str,
        kvcache: Any,
        need_sort: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(size, 1, dtype, device, kvcache, need_sort, runtime)

    def _pages_of(self, slots: torch.Tensor) -> torch.Tensor:
        slots = slots.to(torch.int64)
        distinct, which = torch.unique(slots, return_inverse=True)
        if len(distinct) == len(slots):
            return slots.clone()
        first = torch.full_like(distinct, len(slots)).scatter_reduce_(
            0, which, torch.arange(len(slots), device=slots.device), "amin"
        )
        return slots[first.sort().values]

    def _order(self, pages: torch.Tensor) -> torch.Tensor:
        return pages

    def _in_turn(self, freed: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(freed)

    def _given_back(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.need_sort:
            return self.free_pages, torch.cat([self.release_pages, pages])
        return torch.cat([self.free_pages, pages]), self.release_pages
