"""What a tree shows of its second component: recurrent states, or the KV of window layers.

Goes beside :class:`refcache.oracle.view.tree.TreeView`, which has the full KV: there ``lock_ref``
is the full lock, and ``evictable_size`` and ``protected_size`` count full tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from refcache.oracle.view.tree import TreeView, inspect_radix


@dataclass(frozen=True, slots=True)
class ComponentNodeView:
    """Of one node: whether the component is ``live`` here, its ``slot`` (a state's), its lock.

    ``uuid``: ends the window lock of holders below; None where nobody's ends.
    """

    live: bool
    lock_ref: int
    slot: int | None = None
    uuid: int | None = None


@dataclass(frozen=True, slots=True)
class ComponentView:
    """The second component of a tree.

    Attributes:
        evictable, protected: in states, or in tokens of the window.
        nodes: by handle; every node but the root.
        full_order, order: handles in the order in which eviction takes them, of all nodes and of
            those where the component is live; None where a tree does not show it.
    """

    evictable: int
    protected: int
    nodes: dict[Any, ComponentNodeView]
    full_order: tuple[Any, ...] | None = None
    order: tuple[Any, ...] | None = None


class _FullOnly:
    """A tree of two components as :func:`inspect_radix` reads a plain one."""

    def __init__(self, tree: Any) -> None:
        self.root_node = tree.root_node
        self.evictable_size = tree.full_evictable_size
        self.protected_size = tree.full_protected_size


def inspect_full(tree: Any, child_key: Callable[[Any], Any]) -> TreeView:
    """The full KV of a tree with SGLang's field names: nodes have ``full_lock_ref``."""
    return inspect_radix(_FullOnly(tree), child_key, lock="full_lock_ref")


def inspect_states(tree: Any, view: TreeView) -> ComponentView:
    """The states of a tree with SGLang's field names: ``mamba_value``, ``mamba_lock_ref``."""
    nodes = {}
    for node in view.nodes:
        value = node.handle.mamba_value
        slot = None if value is None else int(value.reshape(-1)[0])
        nodes[node.handle] = ComponentNodeView(value is not None, node.handle.mamba_lock_ref, slot)
    return _ordered(
        ComponentView(tree.mamba_evictable_size(), tree.mamba_protected_size(), nodes),
        tree,
        "mamba",
    )


def inspect_window(tree: Any, view: TreeView) -> ComponentView:
    """The window of a tree with SGLang's field names: ``swa_tombstone``, ``swa_lock_ref``."""
    nodes = {
        node.handle: ComponentNodeView(
            not node.handle.swa_tombstone,
            node.handle.swa_lock_ref,
            uuid=node.handle.swa_uuid,
        )
        for node in view.nodes
    }
    return _ordered(
        ComponentView(tree.swa_evictable_size(), tree.swa_protected_size(), nodes), tree, "swa"
    )


def _ordered(view: ComponentView, tree: Any, kind: str) -> ComponentView:
    """With the two lists: the tree says them, or has SGLang's linked ones."""
    if hasattr(tree, "least_recent"):
        full, own = (tuple(tree.least_recent(name)) for name in ("full", kind))
        return replace(view, full_order=full, order=own)
    lists = (getattr(tree, "full_lru_list", None), getattr(tree, f"{kind}_lru_list", None))
    if not all(hasattr(one, "cache") and hasattr(one, "tail") for one in lists):
        return view
    full, own = (_linked(one) for one in lists)
    return replace(view, full_order=full, order=own)


def _linked(lru: Any) -> tuple[Any, ...]:
    """Least recent first: from the tail to the head, whose links are named by the list."""
    found: list[Any] = []
    node = getattr(lru.tail, lru.prv)
    while node is not lru.head and len(found) <= len(lru.cache):
        found.append(node)
        node = getattr(node, lru.prv)
    return tuple(found)
