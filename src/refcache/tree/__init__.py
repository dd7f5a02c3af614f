"""The prefix trees: which KV is cached where, what is locked, what goes first."""

from refcache.tree.components.chunk_cache import ChunkCache, SWAChunkCache
from refcache.tree.hiradix_cache import HiRadixCache
from refcache.tree.mamba_radix_cache import MambaRadixCache
from refcache.tree.node import TreeNode
from refcache.tree.radix_cache import RadixCache
from refcache.tree.strategies import (
    EvictionStrategy,
    FIFOStrategy,
    FILOStrategy,
    LFUStrategy,
    LRUStrategy,
    MRUStrategy,
    PriorityStrategy,
    SLRUStrategy,
)
from refcache.tree.swa_radix_cache import SWARadixCache

__all__ = [
    "ChunkCache",
    "EvictionStrategy",
    "FIFOStrategy",
    "FILOStrategy",
    "HiRadixCache",
    "LFUStrategy",
    "LRUStrategy",
    "MRUStrategy",
    "MambaRadixCache",
    "PriorityStrategy",
    "RadixCache",
    "SLRUStrategy",
    "SWAChunkCache",
    "SWARadixCache",
    "TreeNode",
]
