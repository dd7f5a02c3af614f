"""nano-vllm's ``BlockManager`` behind the contract ``sequences``.

The scheduler's part is as in its ``scheduler.py``: a prompt is admitted with all its pages, and a
result is hashed before the next token is sampled.
"""

from typing import Any

from refcache.oracle.target.base import Target
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.sequences.blocks import RequestCache
from refcache.oracle.target.traits import Traits
from refcache.peers.others.sources import module


class Blocks(RequestCache):
    """The manager as the contract has it."""

    def __init__(self, pages: int, size: int) -> None:
        self.size = size
        self.manager = module("nanovllm", "engine.block_manager").BlockManager(pages, size)

    def make(self, seq: int, tokens: list[int], namespace: str | None) -> Any:
        return module("nanovllm", "engine.sequence").Sequence(tokens)

    def admit(self, request: Any) -> int | None:
        found: int = self.manager.can_allocate(request)
        if found >= 0:
            self.manager.allocate(request, found)
        return None if found < 0 else found * self.size

    def push(self, request: Any, token: int) -> None:
        request.append_token(token)

    def more(self, request: Any, n: int) -> bool:
        if len(request.block_table) * self.size < n and self.manager.can_append(request):
            self.manager.may_append(request)
        return len(request.block_table) * self.size >= n

    def mark(self, request: Any, n: int) -> None:
        request.num_scheduled_tokens = n - request.num_cached_tokens
        self.manager.hash_blocks(request)
        request.num_cached_tokens = n

    def release(self, request: Any) -> None:
        self.manager.deallocate(request)

    def pages(self, request: Any) -> Any:
        return request.block_table


class NanoVllm(Target):
    """``BlockManager`` of nano-vllm at bb823b3."""

    name = "nano-vllm bb823b3 BlockManager"
    capabilities = frozenset({"sequences"})
    traits = Traits(
        page_sizes=(2, 4),
        namespaces=False,
        caches_when="computed",
        dummy_page=None,
        loses_children=True,
        forgets_duplicates=True,
    )

    def sequences(self, config: CacheConfig) -> Blocks:
        module("nanovllm", "engine.sequence").Sequence.block_size = config.page_size
        return Blocks(config.pages, config.page_size)
