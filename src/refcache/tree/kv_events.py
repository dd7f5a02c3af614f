"""``EventLog``: the KV events of a tree, and the page hashes of its nodes.

Hashes are computed only when events are on, and kept in the node, so a split cuts the list and
never recomputes it (invariant N1).
"""

from collections.abc import Iterable

from refcache.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from refcache.keys import hash_str_to_int64, page_hashes
from refcache.tree.node import TreeNode


def node_hashes(node: TreeNode, page_size: int) -> list[str]:
    """The hash of each page of ``node``, chained from the root of its namespace."""
    missing: list[TreeNode] = []
    step: TreeNode | None = node
    while step is not None and step.parent is not None and step.hash_value is None:
        missing.append(step)
        step = step.parent
    for below in reversed(missing):
        above = below.parent
        assert above is not None
        prior = above.hash_value[-1] if above.hash_value else None
        below.hash_value = page_hashes(below.key, page_size, prior)
    return node.hash_value or []


class EventLog:
    """Collects events until they are taken. Silent unless ``enabled``.

    Attributes:
        queue: the events so far, oldest first.
    """

    def __init__(self, page_size: int, enabled: bool) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.queue: list[KVCacheEvent] = []

    def prepare(self, nodes: Iterable[TreeNode]) -> None:
        """Hash the pages of nodes whose events are to come, so that nothing is left to fail."""
        if self.enabled:
            for node in nodes:
                node_hashes(node, self.page_size)

    def stored(self, node: TreeNode, medium: str = MEDIUM_GPU) -> None:
        """The node's pages became resident on ``medium``."""
        if not self.enabled:
            return
        hashes = node_hashes(node, self.page_size)
        parent = node.parent
        above = node_hashes(parent, self.page_size) if parent is not None else []
        before = hash_str_to_int64(above[-1]) if above else None
        for page, page_hash in enumerate(hashes):
            tokens = node.key[page * self.page_size : (page + 1) * self.page_size].token_ids
            block = hash_str_to_int64(page_hash)
            self.queue.append(BlockStored([block], before, tokens, self.page_size, medium=medium))
            before = block

    def removed(self, node: TreeNode, medium: str = MEDIUM_GPU) -> None:
        """The node's pages left ``medium``."""
        if self.enabled:
            for page_hash in node_hashes(node, self.page_size):
                self.queue.append(BlockRemoved([hash_str_to_int64(page_hash)], medium))

    def cleared(self) -> None:
        """Nothing is resident any more."""
        if self.enabled:
            self.queue.append(AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        """The events so far; the log is empty afterwards."""
        taken, self.queue = self.queue, []
        return taken
