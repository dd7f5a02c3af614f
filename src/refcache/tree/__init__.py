"""The prefix trees: which KV is cached where, what is locked, what goes first."""

from refcache.tree.hiradix_cache import HiRadixCache
from refcache.tree.node import TreeNode
from refcache.tree.radix_cache import RadixCache

__all__ = ["HiRadixCache", "RadixCache", "TreeNode"]
