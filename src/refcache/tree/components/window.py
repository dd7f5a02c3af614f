"""``WindowComponent``: the KV of layers that attend to the last ``sliding_window_size`` tokens.

Such layers have a pool of their own, and each full slot has a slot of that pool beside it, or none
any more (:class:`~refcache.allocator.SWATokenToKVPoolAllocator` knows which). A node keeps the
window slots of all its tokens, or of none: the value of a node is its own full slots, or None.

A holder needs the window behind the node it ends at. Its locks go up until they cover one; the node
where they end gets a ``uuid``, which the holder gives back, since by then a split may have moved
that end: the ``uuid`` stays with the upper half.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from refcache.errors import InvalidArgument, StaleMatch
from refcache.tree.components.component import TreeComponent
from refcache.tree.insert_plan import Halves, InsertPlan
from refcache.tree.node import TreeNode
from refcache.types import EvictParams


@dataclass
class WindowPlan(InsertPlan):
    """An insert into a tree with windows, ready to be carried out.

    ``own`` are here slots that a tombstone takes over, window slots and all, in place of its own.

    Attributes:
        cut: the tombstone in which the window slots of the caller begin, or None; its upper half
            is in ``path``, before it.
        live: the new node behind ``leaf``, which then has no window slots; or None.
        freed: all that goes back to the allocator: of the caller's slots, and of tombstones.
        usable: the prefix will be usable at the end of the key.
    """

    cut: Halves | None
    live: TreeNode | None
    freed: torch.Tensor
    usable: bool

    @property
    def last(self) -> TreeNode | None:
        return self.live or super().last

    def given_up(self, slots: torch.Tensor, start: int) -> torch.Tensor:
        return self.freed

    def slots(self) -> list[torch.Tensor]:
        live = None if self.live is None else self.live.value
        return [*super().slots(), *([] if live is None else [live])]


class WindowComponent(TreeComponent):
    """See the module docstring. Sizes are in tokens.

    Attributes:
        window: how many tokens a layer looks back, ``sliding_window_size``.
        allocator: who gives window slots back (``free_swa``).
    """

    name = "swa"

    def __init__(self, window: int, allocator: Any) -> None:
        super().__init__()
        self.window = window
        self.allocator = allocator
        self._uuids = count(1)

    def size(self, node: TreeNode) -> int:
        return len(node.key)

    def usable(self, path: Sequence[TreeNode]) -> bool:
        return self.covered((len(node.key), self.holds(node)) for node in reversed(path))

    def covered(self, pieces: Iterable[tuple[int, bool]]) -> bool:
        """Is the last window live, or everything? ``pieces``: tokens and liveness, last first."""
        tokens = 0
        for size, live in pieces:
            if not live:
                return False
            tokens += size
            if tokens >= self.window:
                return True
        return True

    def halve(self, child: TreeNode, upper: TreeNode) -> None:
        """Both halves have window slots if the whole had, and the same locks."""
        if self.holds(child):
            self.of(upper).value = upper.value
        self.of(upper).lock_ref = self.of(child).lock_ref

    def split(self, child: TreeNode, upper: TreeNode) -> None:
        """The locks that end in this node end in its upper half."""
        self.of(upper).uuid, self.of(child).uuid = self.of(child).uuid, None
        if self.holds(child):
            self.of(child).value = child.value

    def used(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        return self._window_of(path[::-1])[::-1]

    def to_lock(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        nodes = self._window_of(path)
        for node in nodes:
            if not self.holds(node):
                raise StaleMatch(
                    f"inc_lock_ref of {path[0]}: the window slots of {node}, within "
                    f"{self.window} tokens, were evicted; match again"
                )
        return nodes

    def to_unlock(self, path: Sequence[TreeNode], uuid: int | None) -> Sequence[TreeNode]:
        ends = [i for i, node in enumerate(path) if self.of(node).uuid == uuid]
        reaches_root = sum(len(node.key) for node in path) < self.window
        if reaches_root != (uuid is None) or not (reaches_root or ends):
            raise InvalidArgument(
                f"dec_lock_ref with swa_uuid_for_lock={uuid}: expected what inc_lock_ref returned"
            )
        return self.locked(path if reaches_root else path[: ends[0] + 1])

    def lock(self, nodes: Sequence[TreeNode]) -> int | None:
        """The ``uuid`` of the last node; None when the locks reach the root."""
        super().lock(nodes)
        if sum(len(node.key) for node in nodes) < self.window:
            return None
        end = self.of(nodes[-1])
        if end.uuid is None:
            end.uuid = next(self._uuids)
        return end.uuid

    def _window_of(self, path: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """From the end of a path upwards, the nodes until they cover a window."""
        tokens = 0
        for index, node in enumerate(path):
            tokens += len(node.key)
            if tokens >= self.window:
                return path[: index + 1]
        return path

    def wanted(self, params: EvictParams, freed: int) -> int:
        """What was asked, less what went with leaves."""
        return params.swa_num_tokens - freed

    def free(self, node: TreeNode) -> None:
        self.allocator.free_swa(node.value)

    def free_with_leaf(self, node: TreeNode) -> None:
        """The allocator has freed both slots of each token."""
