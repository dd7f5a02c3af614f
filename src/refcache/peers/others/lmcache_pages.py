"""LMCache's allocators of memory objects behind the contract ``allocator``: an object is a page."""

from typing import Any

import torch

from refcache.oracle.target.base import Target
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.paged import PagedAdapter
from refcache.peers.others.lmcache_backend import ALIGNED
from refcache.peers.others.sources import module

SHAPE = torch.Size([ALIGNED])


class Objects(PagedAdapter):
    """``TensorMemoryAllocator``: objects in a buffer, found by their address."""

    first, unit = 0, ALIGNED

    def open(self) -> None:
        self.objects: dict[int, Any] = {}
        self.pool = self.made(torch.zeros(ALIGNED * self.config.pages, dtype=torch.uint8))

    def made(self, buffer: torch.Tensor) -> Any:
        found = module("lmcache", "v1.memory_allocators.tensor_memory_allocator")
        return found.TensorMemoryAllocator(buffer, ALIGNED)

    def take(self, n: int) -> list[int] | None:
        if n > self.count():
            return None
        made = [self.pool.allocate([SHAPE], [torch.uint8]) for _ in range(n)]
        pages = [one.meta.address // self.unit for one in made]
        self.objects |= dict(zip(pages, made, strict=True))
        return pages

    def give(self, pages: Any) -> None:
        for page in pages:
            self.objects[page].ref_count_down()

    def count(self) -> int:
        return int(self.pool.address_manager.get_free_size()) // ALIGNED


class PagedObjects(Objects):
    """``PagedTensorMemoryAllocator``: a list of free objects."""

    unit = 1

    def made(self, buffer: torch.Tensor) -> Any:
        found = module("lmcache", "v1.memory_allocators.paged_tensor_memory_allocator")
        return found.PagedTensorMemoryAllocator(buffer, [SHAPE], [torch.uint8])


class TensorPages(Target):
    """An allocator of ``config.pages`` objects."""

    name = "lmcache 0.5.6 TensorMemoryAllocator"
    capabilities = frozenset({"allocator"})

    def allocator(self, config: CacheConfig) -> Objects:
        return Objects(config)


class PagedPages(TensorPages):
    """The same of the paged allocator."""

    name = "lmcache 0.5.6 PagedTensorMemoryAllocator"

    def allocator(self, config: CacheConfig) -> Objects:
        return PagedObjects(config)
