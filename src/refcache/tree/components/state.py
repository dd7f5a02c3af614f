"""``StateComponent``: the recurrent state after exactly the tokens of a prefix.

A state cannot be cut: the upper half of a split has none, and a prefix is usable only where one was
taken. It is one slot of a :class:`~refcache.pool.MambaPool`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.errors import StaleMatch
from refcache.tree.components.component import TreeComponent
from refcache.tree.node import TreeNode
from refcache.types import EvictParams


class StateComponent(TreeComponent):
    """See the module docstring. Sizes are in states.

    Attributes:
        pool: who hands out the slots.
        owned: the slots of all nodes.
    """

    name = "mamba"

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.pool = pool
        self.owned: set[int] = set()

    def put(self, node: TreeNode, value: torch.Tensor) -> None:
        super().put(node, value)
        self.owned.add(int(value))

    def _forget(self, node: TreeNode) -> None:
        self.owned.discard(int(self.slot(node)))
        super()._forget(node)

    def slot(self, node: TreeNode) -> torch.Tensor:
        """The slot, int64 ``[1]``, of a node that has a state."""
        value = self.of(node).value
        assert value is not None
        return value

    def size(self, node: TreeNode) -> int:
        return 1

    def usable(self, path: Sequence[TreeNode]) -> bool:
        return self.holds(path[-1])

    def halve(self, child: TreeNode, upper: TreeNode) -> None:
        """The state is of the end of ``child``: the upper half has none."""

    def split(self, child: TreeNode, upper: TreeNode) -> None:
        """The lower half keeps the state and its locks."""

    def used(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        return path[-1:]

    def to_lock(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        if path and not self.holds(path[0]):
            raise StaleMatch(f"inc_lock_ref of {path[0]}: its state was evicted; match again")
        return path[:1]

    def to_unlock(self, path: Sequence[TreeNode], uuid: int | None) -> Sequence[TreeNode]:
        return self.locked(path[:1])

    def wanted(self, params: EvictParams, freed: int) -> int:
        """As many as asked, beside those that went with leaves."""
        return params.mamba_num

    def free(self, node: TreeNode) -> None:
        self.pool.free(self.slot(node))

    def free_with_leaf(self, node: TreeNode) -> None:
        self.free(node)
