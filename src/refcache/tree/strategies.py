"""Eviction strategies: the unlocked leaf with the smallest priority goes first.

A strategy is one function of a node. Ties are broken by node id, oldest first; with the logical
clock only equal priorities of lfu, priority and slru could tie, and their second part decides.
"""

from abc import ABC, abstractmethod
from typing import Any

from refcache.errors import InvalidArgument, UnknownName
from refcache.tree.node import TreeNode


class EvictionStrategy(ABC):
    """What orders the leaves."""

    @abstractmethod
    def get_priority(self, node: TreeNode) -> Any:
        """What is compared: the smallest goes first."""


class LRUStrategy(EvictionStrategy):
    """The least recently used goes first."""

    def get_priority(self, node: TreeNode) -> float:
        return node.last_access_time


class LFUStrategy(EvictionStrategy):
    """The least often used goes first, then the least recently used."""

    def get_priority(self, node: TreeNode) -> tuple[int, float]:
        return (node.hit_count, node.last_access_time)


class FIFOStrategy(EvictionStrategy):
    """The oldest goes first."""

    def get_priority(self, node: TreeNode) -> float:
        return node.creation_time


class MRUStrategy(EvictionStrategy):
    """The most recently used goes first."""

    def get_priority(self, node: TreeNode) -> float:
        return -node.last_access_time


class FILOStrategy(EvictionStrategy):
    """The newest goes first."""

    def get_priority(self, node: TreeNode) -> float:
        return -node.creation_time


class PriorityStrategy(EvictionStrategy):
    """The lowest ``priority`` goes first, then the least recently used."""

    def get_priority(self, node: TreeNode) -> tuple[int, float]:
        return (node.priority, node.last_access_time)


class SLRUStrategy(EvictionStrategy):
    """A node with fewer than ``protected_threshold`` hits goes before every node with as many."""

    def __init__(self, protected_threshold: int = 2) -> None:
        """``protected_threshold`` below 0 is refused (InvalidArgument)."""
        if protected_threshold < 0:
            raise InvalidArgument(f"{protected_threshold=}: expected 0 or more")
        self.protected_threshold = protected_threshold

    def get_priority(self, node: TreeNode) -> tuple[int, float]:
        return (int(node.hit_count >= self.protected_threshold), node.last_access_time)


STRATEGIES: dict[str, type[EvictionStrategy]] = {
    "lru": LRUStrategy,
    "lfu": LFUStrategy,
    "fifo": FIFOStrategy,
    "mru": MRUStrategy,
    "filo": FILOStrategy,
    "priority": PriorityStrategy,
    "slru": SLRUStrategy,
}


def eviction_strategy(name: str) -> EvictionStrategy:
    """A new strategy of that name (any case).

    Raises:
        UnknownName: no such strategy.
    """
    if name.lower() not in STRATEGIES:
        raise UnknownName("eviction policy", name, STRATEGIES)
    return STRATEGIES[name.lower()]()
