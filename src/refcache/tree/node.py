"""``TreeNode``: one edge of the radix tree, with the slots of its tokens on each tier."""

from collections.abc import Hashable

import torch

from refcache.errors import NotProtected
from refcache.keys import RadixKey
from refcache.types import LogicalClock

_clock = LogicalClock()


class TreeNode:
    """A run of tokens that extends its parent's prefix.

    Its KV is on the device (``value``), on the host (``host_value``), or on both. The root has an
    empty key and no parent. Of two nodes the one that was used earlier is the smaller.

    A tree gives its nodes ``id``, ``now`` and ``key``. A node made by hand gets the class's
    ``counter`` as id, which counts every node made, and a reading of a clock of all such nodes.

    Attributes:
        id: unique in its tree, in order of creation.
        children: keyed by their first page (``RadixKey.child_key``).
        key: whole pages; empty for the root only; None outside a tree.
        value: int64 ``[len(key)]`` device slots, or None when evicted. Owns its storage.
        host_value: int64 ``[len(key)]`` host slots, or None. Owns its storage.
        lock_ref: holders in the subtree of this node; above 0 it stays on the device.
        host_ref_counter: operations that use the host slots; above 0 they stay.
        last_access_time, creation_time: readings of the tree's clock.
        hit_count: inserts that passed (which ones: ``HIT_POLICIES``).
        priority: the largest of the inserts that passed.
        hash_value: the hash of each page, in hex, or None until it is asked for.
    """

    __slots__ = (
        "children", "creation_time", "hash_value", "hit_count", "host_ref_counter", "host_value",
        "id", "key", "last_access_time", "lock_ref", "parent", "priority", "value",
    )  # fmt: skip

    counter = 0

    def __init__(
        self,
        id: int | None = None,
        priority: int = 0,
        now: float | None = None,
        key: RadixKey | None = None,
    ) -> None:
        self.id = TreeNode.counter if id is None else id
        TreeNode.counter += 1
        self.children: dict[Hashable, TreeNode] = {}
        self.parent: TreeNode | None = None
        self.key: RadixKey = key  # type: ignore[assignment]  # every node of a tree has one
        self.value: torch.Tensor | None = None
        self.host_value: torch.Tensor | None = None
        self.lock_ref = 0
        self.host_ref_counter = 0
        self.last_access_time: float = _clock() if now is None else now
        self.creation_time = self.last_access_time
        self.hit_count = 0
        self.priority = priority
        self.hash_value: list[str] | None = None

    @property
    def evicted(self) -> bool:
        """Not on the device."""
        return self.value is None

    @property
    def backuped(self) -> bool:
        """On the host."""
        return self.host_value is not None

    def protect_host(self) -> None:
        """Keep the host slots until ``release_host``."""
        self.host_ref_counter += 1

    def release_host(self) -> None:
        """Undo one ``protect_host``.

        Raises:
            NotProtected: there is none to undo.
        """
        if self.host_ref_counter < 1:
            raise NotProtected(f"release_host of node {self.id}: it is not protected")
        self.host_ref_counter -= 1

    def get_last_hash_value(self) -> str | None:
        """The hash of the last page; None until the hashes were asked for."""
        return self.hash_value[-1] if self.hash_value else None

    def get_prefix_hash_values(self, node: "TreeNode | None") -> list[str]:
        """A new list of the hashes of every page from the root to the end of ``node``.

        It starts below the nearest ancestor whose hashes nobody has asked for yet.
        """
        hashes: list[str] = []
        while node is not None and node.hash_value is not None:
            hashes[:0] = node.hash_value
            node = node.parent
        return hashes

    def __lt__(self, other: "TreeNode") -> bool:
        return self.last_access_time < other.last_access_time

    def __repr__(self) -> str:
        tiers = "".join(t for t, on in (("D", not self.evicted), ("H", self.backuped)) if on)
        size = 0 if self.key is None else len(self.key)
        return f"TreeNode({self.id}, {size} tokens, {tiers or '-'}, lock {self.lock_ref})"
