"""What the unified tree of SGLang 0.5.23 shows of itself: plain data from its core's nodes.

Handles are node numbers, as the release's own callers have them. With the Rust core, whose nodes
are not to be seen, the nodes are those of the Python core beside it
(:mod:`refcache.peers.unified.cores`), which has given the same answers so far.
"""

from typing import Any

from refcache.keys import RadixKey
from refcache.oracle.view.host import HostNodeView, HostView, TransferView
from refcache.oracle.view.tree import TreeView, walk


def nodes_of(tree: Any) -> Any:
    """The Python core of a tree."""
    core = tree.tree_core
    return getattr(core, "shown", core)


def inspect_tree(tree: Any) -> TreeView:
    """The nodes of a unified tree, parents first."""
    core = nodes_of(tree)

    def fields(node: Any) -> dict[str, Any]:
        data, key = node.component_data[0], node.key
        return {
            "handle": node.id,
            "child_key": key.child_key(core.page_size) if len(key) else None,
            "key": RadixKey(list(key.raw_token_ids()), key.extra_key, key.is_bigram),
            "extra_key": key.extra_key,
            "device": data.value,
            "host": data.host_value,
            "lock_ref": data.lock_ref,
            "hashes": node.hash_value,
        }

    root = core.root_node
    nodes, leaves, strangers = walk(root, fields, core.evictable_device_leaves)
    return TreeView(
        nodes=nodes,
        root=root.id,
        evictable_size=tree.evictable_size(),
        protected_size=tree.protected_size(),
        evictable_leaves=leaves,
        strangers=tuple(f"node {n.id}" for n in strangers),
        root_key_len=len(root.key),
    )


def inspect_host(tree: Any) -> HostView:
    """The host tier. The release counts the users of host slots by a lock of the last node of a
    load only; ``host_ref`` therefore is the number of copies that cover a node. Whether slots in
    flight keep their owner is rule X1's business."""
    core = nodes_of(tree)
    transfers = [
        TransferView("write", op, tuple(entry.publish_node_ids), entry.lock_params is not None)
        for op, entry in tree.ongoing_write_through.items()
    ] + [
        TransferView("load", op, _loaded(core, entry.node_id), True)
        for op, entry in tree.ongoing_load_back.items()
    ]
    uses: dict[Any, int] = {}
    for transfer in transfers:
        for handle in transfer.handles:
            uses[handle] = uses.get(handle, 0) + 1
    host = tree.cache_controller.mem_pool_host.anchor_entry.host_pool
    host._merge_release_slots()
    nodes = [node for node in core._node_arena.values() if node is not core.root_node]
    return HostView(
        size=host.size,
        free=host.free_slots,
        transfers=tuple(transfers),
        leaves=frozenset(node.id for node in core.evictable_host_leaves),
        nodes={n.id: HostNodeView(uses.get(n.id, 0), n.hit_count) for n in nodes},
    )


def _loaded(core: Any, anchor: int) -> tuple[int, ...]:
    """The nodes that a load to ``anchor`` covers, in path order, as far as the release says."""
    handles, node = [anchor], core.node_by_id(anchor).parent
    while node is not core.root_node and node.load_back_pending_id == anchor:
        handles.append(node.id)
        node = node.parent
    return tuple(reversed(handles))
