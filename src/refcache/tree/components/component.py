"""``TreeComponent``: one kind of value that the nodes of a tree have, and its accounts."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from refcache.errors import BrokenAccounts, LockUnderflow
from refcache.tree.components.node import ComponentData, HybridTreeNode
from refcache.tree.node import TreeNode
from refcache.types import EvictParams

__all__ = ["ComponentData", "TreeComponent"]


class TreeComponent(ABC):
    """Values of a kind: which nodes have one, in what order they were used, who holds them.

    The abstract methods are the component's rules; a tree calls the others.

    Attributes:
        name: its key in ``HybridTreeNode.components``.
        lru: the nodes that have a value, least recently used first; never the root.
        evictable_size, protected_size: sizes of the values that nobody, or somebody, holds.
    """

    name: str

    def __init__(self) -> None:
        self.lru: dict[TreeNode, None] = {}
        self.evictable_size = 0
        self.protected_size = 0

    # ---- rules -----------------------------------------------------------------------------------

    @abstractmethod
    def size(self, node: TreeNode) -> int:
        """How much the value of a node counts."""

    @abstractmethod
    def usable(self, path: Sequence[TreeNode]) -> bool:
        """Is the prefix that ends at the last node of ``path`` (from the root's child) usable?"""

    @abstractmethod
    def halve(self, child: TreeNode, upper: TreeNode) -> None:
        """Give ``upper``, a new node for the first half of ``child``, what it will have."""

    @abstractmethod
    def split(self, child: TreeNode, upper: TreeNode) -> None:
        """``child`` has been cut: change what it has."""

    @abstractmethod
    def used(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """Of ``path`` (from the root's child), the nodes whose values a request goes on with."""

    @abstractmethod
    def to_lock(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """The nodes that a holder of the end of ``path`` (from that node upwards) locks.

        Raises:
            StaleMatch: they do not have what a holder needs.
        """

    @abstractmethod
    def to_unlock(self, path: Sequence[TreeNode], uuid: int | None) -> Sequence[TreeNode]:
        """The nodes that a holder has locked, who was given ``uuid`` for it.

        Raises:
            InvalidArgument: nobody was given it for this node.
            LockUnderflow: they are not locked.
        """

    @abstractmethod
    def wanted(self, params: EvictParams, freed: int) -> int:
        """How much an eviction, that has freed so much with the leaves, is still asked for."""

    @abstractmethod
    def free(self, node: TreeNode) -> None:
        """Give back the value of a node that keeps its KV."""

    @abstractmethod
    def free_with_leaf(self, node: TreeNode) -> None:
        """Give back what has not gone with the KV of a leaf."""

    # ---- accounts --------------------------------------------------------------------------------

    def of(self, node: TreeNode) -> ComponentData:
        """What a node has of this component."""
        assert isinstance(node, HybridTreeNode)
        return node.component(self.name)

    def holds(self, node: TreeNode) -> bool:
        """The node has a value (is no tombstone)."""
        return self.of(node).value is not None

    def put(self, node: TreeNode, value: torch.Tensor) -> None:
        """A node of the tree, a tombstone so far, has this value from now on; it is the latest."""
        self.of(node).value = value
        self.evictable_size += self.size(node)
        self.use(node)

    def use(self, node: TreeNode) -> None:
        """The node is the one most recently used, if it has a value."""
        if self.holds(node):
            self.lru.pop(node, None)
            self.lru[node] = None

    def evict(self, node: TreeNode) -> None:
        """Give back the value of a node with children; it becomes a tombstone."""
        self.free(node)
        self._forget(node)

    def leave(self, node: TreeNode) -> None:
        """A leaf leaves the tree; its KV is freed already."""
        if self.holds(node):
            self.free_with_leaf(node)
            self._forget(node)

    def _forget(self, node: TreeNode) -> None:
        self.evictable_size -= self.size(node)
        del self.lru[node]
        self.of(node).value = None

    def first_unlocked(self) -> TreeNode | None:
        """The least recently used node whose value nobody holds."""
        return next((node for node in self.lru if self.of(node).lock_ref == 0), None)

    def lock(self, nodes: Sequence[TreeNode]) -> int | None:
        """One holder more of these nodes; returns what the holder has to give back for it."""
        for node in nodes:
            if self.of(node).lock_ref == 0:
                self.evictable_size -= self.size(node)
                self.protected_size += self.size(node)
            self.of(node).lock_ref += 1
        return None

    def unlock(self, nodes: Sequence[TreeNode]) -> None:
        """One holder less of these nodes."""
        for node in nodes:
            if self.of(node).lock_ref == 1:
                self.evictable_size += self.size(node)
                self.protected_size -= self.size(node)
            self.of(node).lock_ref -= 1

    def locked(self, nodes: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """These nodes, all of which are locked.

        Raises:
            LockUnderflow: one is not.
        """
        for node in nodes:
            if self.of(node).lock_ref < 1:
                raise LockUnderflow(f"dec_lock_ref of {node}: its {self.name} part is not locked")
        return nodes

    def check(self, nodes: Sequence[TreeNode]) -> None:
        """Refuse accounts that differ from what ``nodes``, all but the root, have.

        Raises:
            BrokenAccounts: they do.
        """
        there = [node for node in nodes if self.holds(node)]
        held = sum(self.size(node) for node in there if self.of(node).lock_ref)
        sizes = (sum(self.size(node) for node in there) - held, held)
        if sizes != (self.evictable_size, self.protected_size):
            raise BrokenAccounts(
                f"{self.name}: {self.evictable_size} evictable and {self.protected_size} protected "
                f"are counted; the nodes have {sizes[0]} and {sizes[1]}"
            )
        if self.lru.keys() != set(there):
            raise BrokenAccounts(
                f"{self.name}: {len(self.lru)} nodes are in order of use; {len(there)} have a value"
            )
