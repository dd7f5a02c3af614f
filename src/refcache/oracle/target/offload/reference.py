"""The reference manager: ``HiCacheController`` over a host pool, with an index from key to pages.

Bytes are real. A store is copied from one staging page on the device to the block's host page, all
layers and planes of it; a load comes back to a staging page. The block that goes is the one that
was stored, loaded or touched longest ago.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refcache.controller import HiCacheController
from refcache.controller.operation import CacheOperation
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.offload.contract import Key
from refcache.pool import MHATokenToKVPool, host_pool_for
from refcache.types import ServerArgs

LAYERS, WIDTHS = 2, (2, 1)
TOKEN_BYTES = 8 * LAYERS * sum(WIDTHS)
"""Of one token: int64 elements, every layer of K and of V."""


@dataclass
class Block:
    """One key's page: int64 host slots ``[page_size]``; ``readers``: loads that are not over."""

    slots: torch.Tensor
    ready: bool = False
    readers: int = 0

    @property
    def idle(self) -> bool:
        """Whether it may go."""
        return self.ready and not self.readers


class HostBlocks:
    """See the module docstring.

    Attributes:
        blocks: by key; the least recently used comes first.
    """

    def __init__(self, config: CacheConfig, allocator: Any) -> None:
        """``allocator(pool)``: of the device; its pool holds one page."""
        page = self.page_size = config.page_size
        k_width, v_width = WIDTHS
        pool = MHATokenToKVPool(
            page, page, torch.int64, 1, k_width, LAYERS, "cpu", v_head_dim=v_width
        )
        self.allocator = allocator(pool)
        args = ServerArgs(page_size=page, hicache_ratio=config.pages - 1, hicache_size=0)
        self.host = host_pool_for(pool, args)
        self.controller = HiCacheController(self.allocator, self.host, page, io_backend="kernel")
        self.pool = pool
        self.blocks: dict[Key, Block] = {}
        self._events: list[tuple[str, Key]] = []

    # ---- the contract ----------------------------------------------------------------------------

    def lookup(self, keys: Sequence[Key]) -> int:
        for count, key in enumerate(keys):
            if key not in self.blocks or not self.blocks[key].ready:
                return count
        return len(keys)

    def prepare_store(self, keys: Sequence[Key]) -> dict[Key, int] | None:
        wanted = [key for key in keys if key not in self.blocks]
        victims = self.victims(len(wanted) - self.host.available_size() // self.page_size, keys)
        if victims is None:
            return None
        for key in victims:
            self.drop(key)
        for key in wanted:
            slots = self.host.alloc(self.page_size)
            assert slots is not None  # room was made
            self.blocks[key] = Block(slots)
        return {key: self.slot(key) for key in wanted}

    def complete_store(self, keys: Sequence[Key], ok: bool) -> None:
        for key in keys:
            if ok:
                self.blocks[key].ready = True
                self._events.append(("stored", key))
            else:
                self.drop(key)

    def prepare_load(self, keys: Sequence[Key]) -> list[int]:
        for key in keys:
            self.blocks[key].readers += 1
        self.touch(keys)
        return [self.slot(key) for key in keys]

    def complete_load(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.blocks[key].readers -= 1

    def touch(self, keys: Sequence[Key]) -> None:
        for key in keys:
            if key in self.blocks:
                self.blocks[key] = self.blocks.pop(key)

    def events(self) -> list[tuple[str, Key]]:
        found, self._events = self._events, []
        return found

    def reset(self) -> None:
        for key in list(self.blocks):
            self.drop(key)

    # ---- rooms -----------------------------------------------------------------------------------

    def slot(self, key: Key) -> int:
        """A block's place: the number of its page."""
        return int(self.blocks[key].slots[0]) // self.page_size

    def victims(self, count: int, kept: Sequence[Key]) -> list[Key] | None:
        """The ``count`` blocks that go first, none of ``kept``; None: there are not so many."""
        idle = [key for key, block in self.blocks.items() if block.idle and key not in kept]
        count = max(0, count)
        return idle[:count] if count <= len(idle) else None

    def drop(self, key: Key) -> None:
        """A block is gone and its page is free."""
        block = self.blocks.pop(key)
        self.host.free(block.slots)
        if block.ready:
            self._events.append(("removed", key))

    # ---- bytes -----------------------------------------------------------------------------------

    def write(self, key: Key, data: bytes) -> None:
        """Copy ``TOKEN_BYTES`` a token to the host, through the staging page."""
        elements = torch.frombuffer(bytearray(data), dtype=torch.int64)
        staging = self.allocator.alloc(self.page_size)
        for layer, of_layer in enumerate(elements.view(LAYERS, -1)):
            rows = of_layer.view(self.page_size, 1, sum(WIDTHS)).split(list(WIDTHS), dim=2)
            self.pool.set_kv_buffer(layer, staging, *rows)
        self.controller.write_queue.append(CacheOperation(self.blocks[key].slots, staging, -1))
        self.controller.start_writing()
        self._finished(self.controller.ack_write_queue)
        self.allocator.free(staging)

    def read(self, key: Key) -> bytes:
        """Copy a block back to the staging page; its bytes, in the order of :meth:`write`."""
        staging = self.controller.load(self.blocks[key].slots)
        assert staging is not None  # nothing else uses the staging page
        self.controller.start_loading()
        self._finished(self.controller.ack_load_queue)
        layers = [self.pool.get_kv_buffer(layer) for layer in range(LAYERS)]
        rows = [torch.cat([plane[staging] for plane in planes], dim=2) for planes in layers]
        self.allocator.free(staging)
        return array("q", torch.stack(rows).flatten().tolist()).tobytes()

    @staticmethod
    def _finished(queue: list[Any]) -> None:
        """Wait for the copies that run, and acknowledge them."""
        for ack in queue:
            ack.finish_event.synchronize()
        queue.clear()
