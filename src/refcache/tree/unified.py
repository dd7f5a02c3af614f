"""``UnifiedRadixCache``: the trees under the names of later releases of SGLang (0.5.23).

There one class stands for all trees; what its nodes have is given as ``tree_components``. Here it
is a face: a tree of 0.5.10's names, :attr:`UnifiedRadixCache.tree`, answers. What a caller sees:

* a node is known by its number (``NodeId``), and slots are asked for (``path_device_indices``);
* an insert frees what the tree has already, behind ``prev_prefix_len``, for plain models too;
* a lock gives a *receipt*, and an unlock wants it;
* a hit counts as a use of what the request goes on with (``hit_refreshes="used"``).

Left out so far: requests (``checkpoint``, ``release_kv_cache``), the host, windows and states
together, and leaves that have lost a component, which go with their tokens here.
"""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from refcache import types
from refcache.errors import ForeignNode, InvalidArgument
from refcache.keys import RadixKey
from refcache.tree.mamba_radix_cache import MambaRadixCache
from refcache.tree.node import TreeNode
from refcache.tree.radix_cache import RadixCache
from refcache.tree.swa_radix_cache import SWARadixCache
from refcache.types import DecLockRefResult, EvictParams, EvictResult, MatchPrefixParams

NodeId = int


class ComponentType(IntEnum):
    """What a node may have."""

    FULL = 0
    SWA = 1
    MAMBA = 2


TREES: dict[frozenset[ComponentType], type[RadixCache]] = {
    frozenset({ComponentType.FULL}): RadixCache,
    frozenset({ComponentType.FULL, ComponentType.SWA}): SWARadixCache,
    frozenset({ComponentType.FULL, ComponentType.MAMBA}): MambaRadixCache,
}
"""Which tree has which components."""


@dataclass
class CacheInitParams(types.CacheInitParams):
    """As 0.5.10's, with what the nodes have."""

    tree_components: tuple[ComponentType, ...] = (ComponentType.FULL,)


class MatchResult(NamedTuple):
    """Answer of ``match_prefix``.

    Attributes:
        device_prefix_len: tokens that can be used.
        last_device_node, last_host_node, best_match_node: where they end; one node without a host.
        mamba_branching_seqlen: see :class:`refcache.types.MatchResult`.
        full_kv_hit_length: tokens whose KV was found, usable or not.
    """

    device_prefix_len: int
    last_device_node: NodeId
    last_host_node: NodeId
    best_match_node: NodeId
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0
    mamba_branching_seqlen: int | None = None
    full_kv_hit_length: int = 0


@dataclass
class InsertParams:
    """Arguments of ``insert``; ``component_evicted_seqlens``: tokens without window slots."""

    key: RadixKey
    value: torch.Tensor
    mamba_value: torch.Tensor | None = None
    prev_prefix_len: int = 0
    component_evicted_seqlens: dict[ComponentType, int] = field(default_factory=dict)
    priority: int = 0

    def get_evicted_seqlen(self, component_type: ComponentType) -> int:
        """0 if nothing is said of the component."""
        return self.component_evicted_seqlens.get(component_type, 0)

    def set_evicted_seqlen(self, component_type: ComponentType, length: int) -> None:
        """Of the first ``length`` tokens its values are gone."""
        self.component_evicted_seqlens[component_type] = length


@dataclass
class InsertResult:
    """``prefix_len``: tokens there before; ``last_device_node``: where the key ends."""

    prefix_len: int
    last_device_node: NodeId | None = None
    mamba_exist: bool = False


@dataclass
class DecLockRefParams:
    """A receipt: of which node, and where the locks of a component end (None: at the root)."""

    node_id: NodeId | None = None
    component_lock_uuids: dict[ComponentType, int | None] = field(default_factory=dict)


@dataclass
class IncLockRefResult:
    """``delta``: tokens that are newly locked; the rest as in :class:`DecLockRefParams`."""

    delta: int | None = None
    node_id: NodeId | None = None
    component_lock_uuids: dict[ComponentType, int | None] = field(default_factory=dict)

    def to_dec_params(self) -> DecLockRefParams:
        """The receipt."""
        return DecLockRefParams(self.node_id, dict(self.component_lock_uuids))


@dataclass
class TreeLock:
    """A lock with its receipt."""

    node: NodeId
    receipt: DecLockRefParams


class UnifiedRadixCache:
    """See the module docstring.

    Sizes, events, ``sanity_check`` and what else has one name in both releases is the tree's own.

    Attributes:
        tree: who answers.
        tree_components: as given.

    Raises:
        InvalidArgument: components that no tree here has together; as the tree.
    """

    def __init__(self, params: CacheInitParams) -> None:
        self.tree_components = tuple(params.tree_components)
        kind = TREES.get(frozenset(self.tree_components))
        if kind is None:
            names = [component.name for component in self.tree_components]
            raise InvalidArgument(
                f"tree_components={names}: expected FULL, FULL and SWA, or FULL and MAMBA"
            )
        self.tree = kind(replace(params, hit_refreshes="used"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "tree":
            raise AttributeError(name)
        return getattr(self.tree, name)

    # ---- nodes -----------------------------------------------------------------------------------

    def root_node_handle(self, extra_key: str | None = None) -> NodeId:
        """The root's number, of every namespace."""
        return self.tree.root_node.id

    def resolve_node_handle(self, node_handle: NodeId) -> TreeNode:
        """The node of that number.

        Raises:
            ForeignNode: it is not (or no longer) in this tree.
        """
        for node in (self.tree.root_node, *self.tree.nodes()):
            if node.id == node_handle:
                return node
        raise ForeignNode(f"node {node_handle} is not in this tree")

    def path_device_indices(self, node: NodeId) -> torch.Tensor:
        """The slots int64 ``[n]`` from the root to the end of a node."""
        step: TreeNode | None = self.resolve_node_handle(node)
        slots: list[torch.Tensor] = []
        while step is not None:
            slots += [] if step.value is None else [step.value]
            step = step.parent
        return torch.cat(slots[::-1])

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        """The slots of a request's prefix: those of the path to ``req.last_node``."""
        return self.path_device_indices(req.last_node)[: req.prefix_len]

    # ---- calls -----------------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest prefix that can be used; raises as the tree."""
        found = self.tree.match_prefix(params)
        node = found.last_device_node.id
        return MatchResult(
            len(found.device_indices),
            node,
            node,
            node,
            mamba_branching_seqlen=found.mamba_branching_seqlen,
            full_kv_hit_length=sum(len(step.key) for step in self._nodes_of(params.key)),
        )

    def insert(self, params: InsertParams) -> InsertResult:
        """Cache a key; duplicates behind ``prev_prefix_len`` are freed. Raises as the tree."""
        asked = types.InsertParams(
            params.key,
            params.value,
            mamba_value=params.mamba_value,
            prev_prefix_len=params.prev_prefix_len,
            swa_evicted_seqlen=params.get_evicted_seqlen(ComponentType.SWA),
            priority=params.priority,
        )
        result = self.tree.insert(asked)
        if len(self.tree_components) == 1:  # the trees with components have done so
            self.tree._free(params.value[params.prev_prefix_len : result.prefix_len])
        path = self._nodes_of(params.key)
        last = path[-1] if path else self.tree.root_node
        return InsertResult(result.prefix_len, last.id, result.mamba_exist)

    def evict(self, params: EvictParams) -> EvictResult:
        """As the tree."""
        return self.tree.evict(params)

    def inc_lock_ref(self, node_id: NodeId) -> IncLockRefResult:
        """Lock a node; keep what this returns. Raises as the tree."""
        result = self.tree.inc_lock_ref(self.resolve_node_handle(node_id))
        uuids = {ComponentType.SWA: result.swa_uuid_for_lock}
        known = uuids if ComponentType.SWA in self.tree_components else {}
        return IncLockRefResult(-result.delta, node_id, known)

    def dec_lock_ref(self, node_id: NodeId, params: DecLockRefParams) -> DecLockRefResult:
        """Undo the lock that gave this receipt.

        Raises:
            InvalidArgument: a receipt of another node, or one that lacks a component.
            LockUnderflow, ForeignNode: as the tree.
        """
        if params.node_id != node_id:
            raise InvalidArgument(f"receipt of node {params.node_id}: expected of node {node_id}")
        swa = ComponentType.SWA in self.tree_components
        if swa and ComponentType.SWA not in params.component_lock_uuids:
            raise InvalidArgument("receipt without SWA: expected where its locks end")
        uuid = params.component_lock_uuids.get(ComponentType.SWA)
        node = self.resolve_node_handle(node_id)
        self.tree.dec_lock_ref(node, types.DecLockRefParams(uuid))
        return DecLockRefResult()

    def lock(self, node_id: NodeId) -> TreeLock:
        """As :meth:`inc_lock_ref`, with the receipt in one piece."""
        return TreeLock(node_id, self.inc_lock_ref(node_id).to_dec_params())

    def unlock(self, lock: TreeLock | None) -> None:
        """Undo :meth:`lock`."""
        if lock is not None:
            self.dec_lock_ref(lock.node, lock.receipt)

    def _nodes_of(self, key: RadixKey) -> list[TreeNode]:
        """The nodes that a key passes whole."""
        key, _ = self.tree.maybe_bigram_convert(key, None)
        path, common, _ = self.tree._walk(
            self.tree.root_node, key.page_aligned(self.tree.page_size)
        )
        return path if path and common == len(path[-1].key) else path[:-1]
