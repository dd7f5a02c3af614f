"""Eviction strategies: the unlocked leaf with the smallest key goes first.

A strategy is one function of a node. Ties are broken by node id, oldest first; with the logical
clock only equal keys of lfu, priority and slru could tie, and their second part decides.
"""

from collections.abc import Callable
from typing import Any

from refcache.errors import UnknownName
from refcache.tree.node import TreeNode

EvictionStrategy = Callable[[TreeNode], Any]

PROTECTED_HITS = 2  # slru: a node with so many hits outlives every node with fewer

STRATEGIES: dict[str, EvictionStrategy] = {
    "lru": lambda node: node.last_access_time,
    "lfu": lambda node: (node.hit_count, node.last_access_time),
    "fifo": lambda node: node.creation_time,
    "mru": lambda node: -node.last_access_time,
    "filo": lambda node: -node.creation_time,
    "priority": lambda node: (node.priority, node.last_access_time),
    "slru": lambda node: (node.hit_count >= PROTECTED_HITS, node.last_access_time),
}


def eviction_strategy(name: str) -> EvictionStrategy:
    """The strategy ``name`` (any case).

    Raises:
        UnknownName: no such strategy.
    """
    if name.lower() not in STRATEGIES:
        raise UnknownName("eviction policy", name, STRATEGIES)
    return STRATEGIES[name.lower()]
