"""Who hands out device slots: one token at a time, or in pages.

Models SGLang's ``mem_cache/allocator.py`` without its sliding-window and hybrid variants.
"""

from refcache.allocator.base import BaseTokenToKVPoolAllocator, LentPages
from refcache.allocator.paged import PagedTokenToKVPoolAllocator
from refcache.allocator.token import TokenToKVPoolAllocator

__all__ = [
    "BaseTokenToKVPoolAllocator",
    "LentPages",
    "PagedTokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
]
