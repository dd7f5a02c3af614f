"""What a two-tier cache shows of its host tier: slots, copies in flight, leaves. Plain data.

Goes beside :class:`refcache.oracle.view.tree.TreeView`, whose nodes have their host slots.
:func:`inspect_hiradix` fills it in for caches with SGLang's field names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TransferView:
    """A copy that is queued or running: from submission to acknowledgement.

    Attributes:
        kind: "write" (device to host) or "load"; below the host "store", and "prefetch", which
            covers the nodes that it hangs from, if any.
        op: names it among the transfers of its kind.
        handles: the nodes it covers now, in path order (a split adds one).
        locks: it holds a lock on the last of them.
        tiers: whose slots of these nodes it uses.
    """

    kind: str
    op: Any
    handles: tuple[Any, ...]
    locks: bool
    tiers: tuple[str, ...] = ("host", "device")


@dataclass(frozen=True, slots=True)
class HostNodeView:
    """What a node says of itself beyond ``NodeView``."""

    host_ref: int
    hit_count: int


@dataclass(frozen=True, slots=True)
class HostView:
    """The host tier.

    Attributes:
        size, free: all slots; those that nobody owns, in the order in which they will go.
        leaves: handles.
        waiting: loads that were asked for and not started; None where a cache does not show them.
    """

    size: int
    free: "torch.Tensor"
    transfers: tuple[TransferView, ...]
    leaves: frozenset[Any]
    nodes: dict[Any, HostNodeView]
    waiting: int | None = None


def inspect_hiradix(tree: Any, free: "torch.Tensor") -> HostView:
    """View of a cache with the reference's field names; ``free``: the host pool's free slots."""
    copies = (("write", tree.ongoing_write_through), ("load", tree.ongoing_load_back))
    transfers = tuple(
        TransferView(kind, op, tuple(nodes), locks=True)
        for kind, ongoing in copies
        for op, nodes in ongoing.items()
    )
    below = tuple(
        TransferView(kind, op, tuple(n for n in nodes if n is not tree.root_node), False, ("host",))
        for kind, op, nodes in _below_the_host(tree)
    )
    nodes = {n: HostNodeView(n.host_ref_counter, n.hit_count) for n in tree.nodes()}
    return HostView(
        size=tree.token_to_kv_pool_host.size,
        free=free,
        transfers=transfers + below,
        leaves=frozenset(tree.evictable_host_leaves),
        nodes=nodes,
        waiting=len(tree.cache_controller.load_queue),
    )


def _below_the_host(tree: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Kind, name and nodes of what goes on between host and storage, for a tree that has storage.

    In releases of SGLang a write is one node, and a prefetch begins with its node.
    """
    for op, nodes in getattr(tree, "ongoing_backup", {}).items():
        yield "store", op, nodes if isinstance(nodes, list) else [nodes]
    for op, prefetch in getattr(tree, "ongoing_prefetch", {}).items():
        yield "prefetch", op, prefetch[0] if isinstance(prefetch[0], list) else [prefetch[0]]
