"""Who hands out device slots: one token at a time, or in pages.

Models SGLang's ``mem_cache/allocator.py``, and the allocator of ``swa_memory_pool.py``.
"""

from refcache.allocator.base import BaseTokenToKVPoolAllocator, LentPages
from refcache.allocator.paged import PagedTokenToKVPoolAllocator
from refcache.allocator.swa import SWAAllocatorState, SWATokenToKVPoolAllocator
from refcache.allocator.token import TokenToKVPoolAllocator

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "LentPages",
    "PagedTokenToKVPoolAllocator",
    "SWAAllocatorState",
    "SWATokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
]
