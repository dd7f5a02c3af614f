"""The inspection protocol: what a tree cache shows of itself, in plain data.

A :class:`TreeView` is a snapshot. Invariants are functions of it, not of anybody's node class, so
an engine unlocks the deeper checks with one function that fills it in. :func:`inspect_radix` does
so for every tree that has SGLang's field names (refcache's and SGLang's own).
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

PagePrefix = tuple[str | None, tuple[Any, ...]]
"""A namespace, and the elements (tokens or pairs) up to the end of a page."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node below the root.

    Attributes:
        handle: what callers hold to lock the node.
        parent: index in ``TreeView.nodes`` of the node that lists it; -1 for the root.
        parent_agrees: its own parent pointer names that node.
        filed_under, child_key: the key its parent files it under, and the one it should.
        key: its elements (tokens, or pairs), as a sized iterable.
        extra_key: its namespace.
        device, host: int64 slots ``[len(key)]`` on each tier, None where it is not.
        lock_ref: how many holders it counts.
        hashes: of each page, when they are known.
        access, created: readings of a clock; hits: visits counted; priority. What eviction may go
            by; None where a tree does not show it. See :mod:`refcache.oracle.explore`.
    """

    handle: Any
    parent: int
    parent_agrees: bool
    filed_under: Hashable
    child_key: Hashable
    key: Any
    extra_key: str | None
    device: "torch.Tensor | None"
    host: "torch.Tensor | None" = None
    lock_ref: int = 0
    hashes: Sequence[Any] | None = None
    access: float | None = None
    created: float | None = None
    hits: int | None = None
    priority: int | None = None

    def first_page(self, page_size: int) -> tuple[Any, ...]:
        return tuple(islice(iter(self.key), page_size))


@dataclass(frozen=True, slots=True)
class TreeView:
    """A tree: nodes in an order where a parent comes before its children.

    ``evictable_leaves`` are indices of ``nodes``; None when the tree keeps no such set. ``root`` is
    the handle of the root, and ``root_key_len`` must be 0.
    """

    nodes: tuple[NodeView, ...]
    root: Any
    evictable_size: int
    protected_size: int
    evictable_leaves: frozenset[int] | None = None
    strangers: tuple[str, ...] = field(default=())
    """Members of ``evictable_leaves`` that are no node of the tree, described."""
    root_key_len: int = 0

    def paths(self) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Each node's index with the elements from the root to its end."""
        prefixes: list[tuple[Any, ...]] = []
        for index, node in enumerate(self.nodes):
            above = prefixes[node.parent] if node.parent >= 0 else ()
            prefixes.append(above + tuple(node.key))
            yield index, prefixes[-1]

    def pages(self, page_size: int) -> Iterator[tuple[int, list[PagePrefix]]]:
        """Each node's index with the prefixes that its pages stand for, in order: page ``k`` is in
        slots ``k * page_size ...`` of the node, on either tier."""
        for index, prefix in self.paths():
            node = self.nodes[index]
            ends = range(len(prefix) - len(node.key) + page_size, len(prefix) + 1, page_size)
            yield index, [(node.extra_key, prefix[:end]) for end in ends]


def walk(
    root: Any, fields: Callable[[Any], dict[str, Any]], leaves: Collection[Any] | None
) -> tuple[tuple[NodeView, ...], frozenset[int] | None, list[Any]]:
    """The nodes below ``root``, parents first, by their ``children`` and ``parent``.

    Args:
        fields: the attributes of :class:`NodeView` that a node has by itself.
        leaves: nodes; None when the tree keeps no such set.

    Returns:
        The nodes; the leaves as indices of them; the leaves that are no node of the tree.
    """
    nodes: list[NodeView] = []
    place: dict[Any, int] = {}
    stack = [(filed, child, -1, root) for filed, child in root.children.items()]
    while stack:
        filed, node, parent, lister = stack.pop()
        here = place[node] = len(nodes)
        nodes.append(
            NodeView(
                parent=parent,
                parent_agrees=node.parent is lister,
                filed_under=filed,
                **fields(node),
            )
        )
        stack.extend((key, child, here, node) for key, child in node.children.items())
    if leaves is None:
        return tuple(nodes), None, []
    known = frozenset(place[n] for n in leaves if n in place)
    return tuple(nodes), known, [n for n in leaves if n not in place]


def inspect_radix(
    tree: Any, child_key: Callable[[Any], Hashable], lock: str = "lock_ref"
) -> TreeView:
    """View of a tree with SGLang's field names; ``child_key`` maps a key to its place in a parent.

    ``lock`` names the count of locks of a node.

    Reads ``root_node``, ``evictable_leaves`` and the sizes; of nodes ``children``, ``parent``,
    ``key``, ``value``, ``host_value``, ``lock_ref``, ``hash_value``, and where there are any
    ``last_access_time``, ``creation_time``, ``hit_count``, ``priority``.
    """

    def fields(node: Any) -> dict[str, Any]:
        return {
            "handle": node,
            "child_key": child_key(node.key) if len(node.key) else None,
            "key": node.key,
            "extra_key": node.key.extra_key,
            "device": node.value,
            "host": getattr(node, "host_value", None),
            "lock_ref": getattr(node, lock),
            "hashes": getattr(node, "hash_value", None),
            "access": getattr(node, "last_access_time", None),
            "created": getattr(node, "creation_time", None),
            "hits": getattr(node, "hit_count", None),
            "priority": getattr(node, "priority", None),
        }

    root = tree.root_node
    nodes, leaves, strangers = walk(root, fields, getattr(tree, "evictable_leaves", None))
    return TreeView(
        nodes=nodes,
        root=root,
        evictable_size=tree.evictable_size(),
        protected_size=tree.protected_size(),
        evictable_leaves=leaves,
        strangers=tuple(map(repr, strangers)),
        root_key_len=len(root.key) if root.key is not None else 0,
    )
