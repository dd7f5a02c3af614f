"""Rules about nodes: structure (S), tiers (T), locks (L), sizes and leaves (A).

See :mod:`refcache.oracle.rules.check`.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from functools import partial

from refcache.oracle.rules.catalog import stated
from refcache.oracle.view.state import Check, State
from refcache.oracle.view.tree import NodeView

TREE_CHECKS: dict[str, Check] = {}
invariant = partial(stated, TREE_CHECKS)


@invariant(
    "S1",
    "each child is filed in its parent under its own first page, parent pointers agree, and "
    "the root has no key",
)
def _filed_where_they_belong(state: State) -> Iterator[str]:
    if state.view.root_key_len:
        yield f"the root has a key of {state.view.root_key_len} elements"
    for index, node in enumerate(state.view.nodes):
        if node.filed_under != node.child_key:
            yield f"{state.name(index)} is filed under {node.filed_under}, not {node.child_key}"
        if not node.parent_agrees:
            yield f"{state.name(index)} is listed by {state.name(node.parent)}, not its parent"


@invariant("S2", "a node's key is not empty and fills whole pages")
def _keys_fill_pages(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        if not len(node.key) or len(node.key) % state.page_size:
            yield (
                f"{state.name(index)} has a key of {len(node.key)} elements, "
                f"page size {state.page_size}"
            )


@invariant("S3", "a node has one slot for each element of its key")
def _one_slot_an_element(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        for tier, value in (("device", node.device), ("host", node.host)):
            if value is not None and len(value) != len(node.key):
                yield (
                    f"{state.name(index)} has {len(value)} {tier} slots for {len(node.key)} "
                    "elements"
                )


@invariant("S4", "a node owns its slots: overwriting a tensor that was passed in changes nothing")
def _slots_own_their_storage(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        value = node.device
        if value is not None and value.untyped_storage().nbytes() > value.nbytes:
            yield f"the slots of {state.name(index)} are a view of a larger tensor"


@invariant("S5", "siblings differ in their first page, and namespaces share nothing below the root")
def _siblings_differ(state: State) -> Iterator[str]:
    seen: dict[tuple[int, str | None, Hashable], int] = {}
    for index, node in enumerate(state.view.nodes):
        first = (node.parent, node.extra_key, node.first_page(state.page_size))
        if first in seen:
            yield f"{state.name(index)} and {state.name(seen[first])} start with the same page"
        seen[first] = index
        if node.parent >= 0 and state.view.nodes[node.parent].extra_key != node.extra_key:
            yield f"{state.name(index)} hangs below another namespace, {state.name(node.parent)}"


@invariant("T1", "a node on the device has its parent on the device")
def _device_is_prefix_closed(state: State) -> Iterator[str]:
    nodes = state.view.nodes
    for index, node in enumerate(nodes):
        if node.device is not None and node.parent >= 0 and nodes[node.parent].device is None:
            yield f"{state.name(index)} is on the device, its parent is not"


@invariant("T2", "a node is on the device, on the host, or on both")
def _every_node_is_somewhere(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        if node.device is None and node.host is None:
            yield f"{state.name(index)} has neither device nor host slots"


@invariant("L5", "every node that somebody holds is reachable from the root")
def _holders_are_reachable(state: State) -> Iterator[str]:
    for handle in state.holders:
        if handle != state.view.root and handle not in state.place:
            yield f"{handle!r} is held, but is no node of the tree"


@invariant("L1", "a node's lock count is the number of holders at or below it")
def _locks_count_holders(state: State) -> Iterator[str]:
    nodes = state.view.nodes
    held = Counter(state.place[h] for h in state.holders if h in state.place)
    below = [held[index] for index in range(len(nodes))]
    for index in reversed(range(len(nodes))):
        if nodes[index].parent >= 0:
            below[nodes[index].parent] += below[index]
    for index, node in enumerate(nodes):
        if node.lock_ref != below[index]:
            yield (
                f"{state.name(index)} has lock count {node.lock_ref}, but {below[index]} holders "
                "at or below it"
            )


@invariant("L2", "a locked node stays on the device, and no lock count is negative")
def _locked_stays_on_device(state: State) -> Iterator[str]:
    for index, node in enumerate(state.view.nodes):
        if node.lock_ref < 0 or (node.lock_ref > 0 and node.device is None):
            where = "on the device" if node.device is not None else "not on the device"
            yield f"{state.name(index)} has lock count {node.lock_ref} and is {where}"


@invariant("A1", "evictable_size is the number of tokens in unlocked nodes on the device")
def _evictable_size_adds_up(state: State) -> Iterator[str]:
    yield from _size(state, "evictable_size", state.view.evictable_size, locked=False)


@invariant("A2", "protected_size is the number of tokens in locked nodes on the device")
def _protected_size_adds_up(state: State) -> Iterator[str]:
    yield from _size(state, "protected_size", state.view.protected_size, locked=True)


def _size(state: State, name: str, seen: int, locked: bool) -> Iterator[str]:
    on_device = [n for n in state.view.nodes if n.device is not None]
    expected = sum(len(n.key) for n in on_device if (n.lock_ref > 0) == locked)
    if seen != expected:
        yield f"{name}() = {seen}, but the nodes hold {expected} such tokens"


@invariant(
    "A3",
    "the evictable leaves are the unlocked nodes on the device without a child on the device",
)
def _leaf_set_is_exact(state: State) -> Iterator[str]:
    if state.view.evictable_leaves is None:
        return
    for stranger in state.view.strangers:
        yield f"{stranger} is listed as an evictable leaf, but is no node of the tree"
    nodes = state.view.nodes
    parents = {node.parent for node in nodes if node.device is not None}
    for index, node in enumerate(nodes):
        expected = _unlocked(node) and index not in parents
        if (index in state.view.evictable_leaves) != expected:
            yield f"{state.name(index)} is {'not ' * expected}listed as an evictable leaf"


def _unlocked(node: NodeView) -> bool:
    return node.device is not None and node.lock_ref == 0
