"""``TreeNode``: one edge of the radix tree, with the slots of its tokens on each tier."""

from collections.abc import Hashable

import torch

from refcache.errors import NotProtected
from refcache.keys import RadixKey


class TreeNode:
    """A run of tokens that extends its parent's prefix.

    Its KV is on the device (``value``), on the host (``host_value``), or on both. The root has an
    empty key and no parent.

    Attributes:
        id: unique in its tree, in order of creation.
        children: keyed by their first page (``RadixKey.child_key``).
        key: whole pages; empty for the root only.
        value: int64 ``[len(key)]`` device slots, or None when evicted. Owns its storage.
        host_value: int64 ``[len(key)]`` host slots, or None. Owns its storage.
        lock_ref: holders in the subtree of this node; above 0 it stays on the device.
        host_ref_counter: operations that use the host slots; above 0 they stay.
        last_access_time, creation_time: readings of the tree's clock.
        hit_count: inserts that passed (which ones: ``HIT_POLICIES``).
        priority: the largest of the inserts that passed.
        hash_value: a digest a page, or None until it is asked for.
    """

    __slots__ = (
        "children", "creation_time", "hash_value", "hit_count", "host_ref_counter", "host_value",
        "id", "key", "last_access_time", "lock_ref", "parent", "priority", "value",
    )  # fmt: skip

    def __init__(self, id: int, now: float, key: RadixKey, priority: int = 0) -> None:
        self.id = id
        self.children: dict[Hashable, TreeNode] = {}
        self.parent: TreeNode | None = None
        self.key = key
        self.value: torch.Tensor | None = None
        self.host_value: torch.Tensor | None = None
        self.lock_ref = 0
        self.host_ref_counter = 0
        self.last_access_time = now
        self.creation_time = now
        self.hit_count = 0
        self.priority = priority
        self.hash_value: list[bytes] | None = None

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

    def __repr__(self) -> str:
        tiers = "".join(t for t, on in (("D", not self.evicted), ("H", self.backuped)) if on)
        return f"TreeNode({self.id}, {len(self.key)} tokens, {tiers or '-'}, lock {self.lock_ref})"
