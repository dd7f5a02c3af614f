"""LMCache's ``LocalCPUBackend`` behind the contract ``offload``, over either of its allocators.

The backend knows a block when its store is complete; until then the adapter holds its memory. It
evicts key by key, so a store has one key. Bytes are those of the memory objects. With ``+partial``
blocks may be short, as the last one of a prompt is.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from refcache.oracle.target.base import Target
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.offload.contract import Key, OffloadTraits
from refcache.peers.others.sources import module

ALIGNED = 4096
"""Bytes of a block: what the tensor allocator rounds up to."""


class Blocks:
    """The backend as the contract's manager."""

    def __init__(self, backend: Any, page_size: int, token_bytes: int) -> None:
        self.backend, self.page_size, self.token_bytes = backend, page_size, token_bytes
        self.pending: dict[Key, Any] = {}

    def key(self, key: Key) -> Any:
        number = int.from_bytes(key, "big")
        return module("lmcache", "utils").CacheEngineKey("model", 1, 0, number, torch.uint8)

    def lookup(self, keys: Sequence[Key]) -> int:
        return [*(self.backend.contains(self.key(key)) for key in keys), False].index(False)

    def prepare_store(
        self, keys: Sequence[Key], tokens: Sequence[int] | None = None
    ) -> dict[Key, int] | None:
        (key,), (count,) = keys, tokens or [self.page_size]
        if key in self.pending or self.backend.contains(self.key(key)):
            return {}
        shape = torch.Size([1, 1, count * self.token_bytes, 1])
        found = self.backend.allocate([shape], [torch.uint8], busy_loop=False)
        if found is not None:
            self.pending[key] = found
        return None if found is None else {key: found.meta.address}

    def complete_store(self, keys: Sequence[Key], ok: bool) -> None:
        for key in keys:
            memory = self.pending.pop(key)
            if ok:
                self.backend.submit_put_task(self.key(key), memory)
            memory.ref_count_down()

    def prepare_load(self, keys: Sequence[Key]) -> list[int]:
        return [self.backend.get_blocking(self.key(key)).meta.address for key in keys]

    def complete_load(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.backend.hot_cache[self.key(key)].ref_count_down()

    def touch(self, keys: Sequence[Key]) -> None:
        self.backend.keys_in_request = [k for k in map(self.key, keys) if self.backend.contains(k)]
        self.backend.touch_cache()

    def write(self, key: Key, data: bytes) -> None:
        self.pending[key].raw_data[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)

    def read(self, key: Key) -> bytes:
        return bytes(self.backend.hot_cache[self.key(key)].byte_array)

    def reset(self) -> None:
        self.backend.clear()


class Backend(Target):
    """``LocalCPUBackend`` over ``TensorMemoryAllocator``."""

    name = "lmcache 0.5.6 LocalCPUBackend (tensor allocator)"
    capabilities = frozenset({"offload"})
    offload_traits = OffloadTraits(batch=1)

    def allocator(self, config: CacheConfig) -> Any:
        found = module("lmcache", "v1.memory_allocators.tensor_memory_allocator")
        buffer = torch.zeros(ALIGNED * config.pages, dtype=torch.uint8)
        return found.TensorMemoryAllocator(buffer, ALIGNED)

    def offload(self, config: CacheConfig) -> Blocks:
        found = module("lmcache", "v1.storage_backend.local_cpu_backend")
        settings = SimpleNamespace(
            cache_policy="LRU", local_cpu=True, lmcache_instance_id="one", use_layerwise=False,
            enable_blending=False,
        )  # fmt: skip
        made = found.LocalCPUBackend(settings, memory_allocator=self.allocator(config))
        return Blocks(made, config.page_size, self.offload_traits.token_bytes)


class PagedBackend(Backend):
    """The same over ``PagedTensorMemoryAllocator``."""

    name = "lmcache 0.5.6 LocalCPUBackend (paged allocator)"

    def allocator(self, config: CacheConfig) -> Any:
        found = module("lmcache", "v1.memory_allocators.paged_tensor_memory_allocator")
        shape = torch.Size([1, 1, config.page_size * self.offload_traits.token_bytes, 1])
        buffer = torch.zeros(shape.numel() * config.pages, dtype=torch.uint8)
        return found.PagedTensorMemoryAllocator(buffer, [shape], [torch.uint8])


class Partial(Backend):
    """:class:`Backend` with short blocks."""

    offload_traits = OffloadTraits(batch=1, partial=True)


class PagedPartial(PagedBackend):
    """:class:`PagedBackend` with short blocks."""

    offload_traits = OffloadTraits(batch=1, partial=True)
