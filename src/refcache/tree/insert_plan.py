"""What a match, an insert, or the split of a node will do: computed before anything is changed.

Whatever can fail (tensors, hashes, the clock) is done while a plan is made. Carrying one out only
moves finished parts into place, so a call that raises has changed nothing.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from refcache.keys import RadixKey
from refcache.tree.node import TreeNode
from refcache.types import InsertParams


class Halves(NamedTuple):
    """A node to be cut in two.

    Attributes:
        child: the node, which becomes the lower half; the other fields are what it then has.
        upper: a new node for its upper half, complete, but not in the tree yet.
    """

    child: TreeNode
    upper: TreeNode
    key: RadixKey
    value: torch.Tensor | None
    host_value: torch.Tensor | None
    hash_value: list[str] | None


class MatchPlan(NamedTuple):
    """A match that is ready to be carried out.

    Attributes:
        now: the access time of the path.
        halves: the node that the key ends inside of, or None.
        entered: the nodes that the key gets into, from the starting node down.
        path: those that it passes whole; the upper half of ``halves`` is the last of them.
        found: the part of ``path`` that answers the match.
        slots: the device slots of ``found``.
    """

    now: float
    halves: Halves | None
    entered: list[TreeNode]
    path: list[TreeNode]
    found: list[TreeNode]
    slots: torch.Tensor


@dataclass
class InsertPlan:
    """An insert that is ready to be carried out.

    Attributes:
        params: what was asked, with the key as it is filed.
        now: the access time of the path.
        halves: the node that the key ends inside of, or None.
        path: the nodes that the key passes whole, from the root down; the upper half of ``halves``
            is the last of them.
        own: for each of them the slots it takes over (it is not on the device), or None.
        leaf: a new node for the rest of the key, complete, with its parent; or None.
        value: the slots that came with the key.
    """

    params: InsertParams
    priority: int
    now: float
    halves: Halves | None
    path: list[TreeNode]
    own: list[torch.Tensor | None]
    leaf: TreeNode | None
    value: torch.Tensor

    @property
    def resident(self) -> int:
        """How many tokens of the key are on the device before the insert."""
        return sum(
            len(node.key) for node, own in zip(self.path, self.own, strict=True) if own is None
        )

    @property
    def last(self) -> TreeNode | None:
        """The node that the key ends at once it is inserted; None: the key is empty."""
        return self.leaf or (self.path[-1] if self.path else None)

    def given_up(self, slots: torch.Tensor, start: int) -> torch.Tensor:
        """Of the key's ``slots`` from ``start`` on, those that the tree has as others."""
        return slots[start : self.resident]

    def slots(self) -> list[torch.Tensor]:
        """The device slots of the key once it is inserted, piece by piece."""
        pieces = [
            node.value if own is None else own
            for node, own in zip(self.path, self.own, strict=True)
        ]
        pieces += [self.leaf.value] if self.leaf is not None else []
        return [piece for piece in pieces if piece is not None]
