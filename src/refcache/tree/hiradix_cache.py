"""``HiRadixCache``: the prefix tree over two tiers, device (HBM) and host (pinned DRAM).

A node's KV is on the device, on the host, or on both. Copies run on the controller's streams while
the tree goes on; what a running copy uses stays where it is until its acknowledgement:

===============  =======================  =========================================
operation        the source is kept by    the destination is kept by
===============  =======================  =========================================
write (backup)   a lock on the node       ``protect_host`` on the node
load back        ``protect_host``         a lock on the last loaded node
===============  =======================  =========================================

A match or an insert may split a node while a copy runs. The operation is therefore a list of nodes,
in path order: a split adds the upper half, and the acknowledgement releases every fragment, and the
lock on the last. Every copy takes and gives back the same, whatever the policy is (a write-back,
for which the eviction waits, as well).

A copy that cannot be started leaves nothing behind (:class:`~refcache.errors.CopyFailed`). A caller
who asked for it gets the error at once. An insert or an eviction has more to do than the write that
it brings about: it goes on as if there were no room, and ``check_hicache_events`` raises the error.

Invariants that shape the code: the device-resident nodes are closed under taking prefixes (T1); a
node that is not on the device is on the host (T2); under the write-through policies the nodes on
the host are closed as well (T3), since a node whose parent has no host copy is not written.

Models SGLang 0.5.10's ``HiRadixCache``, without its corruption bugs (load-back does not protect its
host slots, host leaves defined by device state, nodes queued that were never written, acks of loads
not agreed between ranks). What it does with storage below the host is
:mod:`refcache.tree.storage`, under SGLang's names: ``storage_names``. Left out: the metrics.
"""

import heapq
import threading
from contextlib import ExitStack
from typing import Any

import torch

from refcache.arguments import truth, whole_number, with_attributes
from refcache.controller import HiCacheController
from refcache.errors import CopyFailed, InvalidArgument, StaleMatch
from refcache.events import MEDIUM_CPU
from refcache.pool import HostKVCache, host_pool_for
from refcache.tree.consensus import consensus_of
from refcache.tree.insert_plan import Halves, InsertPlan
from refcache.tree.node import TreeNode
from refcache.tree.radix_cache import RadixCache
from refcache.tree.storage import TreeStorage
from refcache.tree.storage_names import StorageNames
from refcache.types import (
    CacheInitParams,
    EvictParams,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    MatchResult,
    ServerArgs,
)

LOAD_BACK_THRESHOLD = 10  # tokens; a smaller load costs more than computing them again
HITS_UNTIL_WRITTEN = {"write_through": 1, "write_through_selective": 2}


class HiRadixCache(RadixCache, StorageNames):
    """See the module docstring.

    Attributes:
        token_to_kv_pool_host: the host pool; ``cache_controller``: who copies.
        load_back_threshold: a load of fewer tokens is refused.
        write_through_threshold: hits until a node is written; None under ``write_back``.
        ongoing_write_through, ongoing_load_back: node id to the fragments of a running copy, in
            path order; the last one is the node that the operation began with.
        evictable_host_leaves: on the host only, unlocked, without a child on the host.
        storage: what goes on in storage, and the policies for it.
        failed_copies: errors of writes that ``check_hicache_events`` has to raise yet.

    Raises:
        HostPoolTooSmall: a host pool that is not larger than the device pool.
        UnknownName, InvalidArgument: as :class:`RadixCache`.
    """

    def __init__(self, params: CacheInitParams, server_args: ServerArgs) -> None:
        """``params.tp_cache_group``: see :func:`refcache.tree.consensus.consensus_of`."""
        self.kv_cache = device_pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.token_to_kv_pool_host: HostKVCache = host_pool_for(device_pool, server_args)
        self.load_cache_event = threading.Event()
        self.cache_controller = HiCacheController(
            params.token_to_kv_pool_allocator,
            self.token_to_kv_pool_host,
            params.page_size,
            params.tp_cache_group,
            load_cache_event=self.load_cache_event,
            write_policy=server_args.hicache_write_policy,
            io_backend=server_args.hicache_io_backend,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            runtime=params.runtime,
        )
        self.tp_group = consensus_of(params.tp_cache_group)
        self.tp_world_size = self.cache_controller.tp_world_size
        self.pp_rank, self.pp_size = params.pp_rank, params.pp_size
        self.enable_storage_metrics = False
        self.storage = TreeStorage(self, params.clock)
        self._set_write_policy(server_args.hicache_write_policy)
        self.load_back_threshold = LOAD_BACK_THRESHOLD
        self.ongoing_write_through: dict[int, list[TreeNode]] = {}
        self.ongoing_load_back: dict[int, list[TreeNode]] = {}
        self.evictable_host_leaves: set[TreeNode] = set()
        self.failed_copies: list[Exception] = []
        super().__init__(params)
        if server_args.hicache_storage_backend is not None:
            self.storage.attach(
                server_args.hicache_storage_backend,
                server_args.hicache_storage_backend_extra_config,
                server_args.served_model_name,
                server_args.hicache_storage_prefetch_policy,
            )
        else:
            self.storage.prefetch_stop_policy = server_args.hicache_storage_prefetch_policy

    def _set_write_policy(self, name: str) -> None:
        self.write_policy = self.cache_controller.write_policy = name
        self.write_through_threshold = HITS_UNTIL_WRITTEN.get(name)

    def reset(self) -> None:
        """Wait for every copy, then forget everything; the host pool is empty afterwards."""
        root = self._new_root()
        root.host_value = self._no_slots()
        self.cache_controller.wait_for_copies()
        self.token_to_kv_pool_host.clear()
        self.cache_controller.forget()
        self.ongoing_write_through.clear()
        self.ongoing_load_back.clear()
        self.evictable_host_leaves.clear()
        self.failed_copies.clear()
        self.storage.reset()
        self._plant(root)

    # ---- device to host --------------------------------------------------------------------------

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        """Queue a copy of ``node`` to the host; host leaves go to make room.

        The node stays locked, and its host slots protected, until the acknowledgement.

        Returns:
            The tokens that are being written; 0 when there is no room, or when the parent has no
            host copy and this is not a write-back (the copy could not be reached).

        Raises:
            ForeignNode: the node is not in this tree, or its root.
            InvalidArgument: it is not on the device, or has a host copy.
            CopyFailed: the copy could not be started; nothing changed, but host leaves may be gone.
        """
        parent = self._parent(node)
        self._path(node)
        if node.value is None or node.backuped:
            raise InvalidArgument(f"write_backup of {node}: expected one on the device only")
        if not write_back and not parent.backuped:
            return 0
        self.events.prepare([node])
        host_slots = self.cache_controller.write(node.value, node_id=node.id)
        if host_slots is None:
            self.evict_host(len(node.value))
            host_slots = self.cache_controller.write(node.value, node_id=node.id)
        if host_slots is None:
            return 0
        node.host_value = host_slots
        node.protect_host()
        self.inc_lock_ref(node)
        self.ongoing_write_through[node.id] = [node]
        self._update_leaf_status(parent)
        return len(host_slots)

    def writing_check(self, write_back: bool = False) -> None:
        """Acknowledge the writes that every rank has finished; ``write_back`` waits for all.

        An acknowledged node is released and its pages are announced on the host.
        """
        acks = self.cache_controller.ack_write_queue
        if truth("write_back", write_back):
            for ack in acks:
                ack.finish_event.synchronize()
            done = len(acks)
        else:
            done = self._finished_everywhere(acks)
        for ack in acks[:done]:
            for node_id in ack.node_ids:
                nodes = self._release(self.ongoing_write_through.pop(node_id))
                for node in nodes:
                    self.events.stored(node, MEDIUM_CPU)
                self.storage.write(nodes)
        del acks[:done]

    def _release(self, nodes: list[TreeNode]) -> list[TreeNode]:
        """Give back what a copy of these nodes took."""
        for node in nodes:
            node.release_host()
        self.dec_lock_ref(nodes[-1])
        return nodes

    def flush_write_through_acks(self) -> None:
        """Acknowledge finished writes in a phase without prefills (decode only)."""
        self.writing_check()

    def _inc_hit_count(self, node: TreeNode, params: InsertParams, done: int) -> None:
        if self.write_through_threshold is not None:  # under write_back nothing is counted
            super()._inc_hit_count(node, params, done)

    def _pass(
        self, node: TreeNode, own: torch.Tensor | None, params: InsertParams, done: int
    ) -> int:
        """Over an evicted node, the insert brings it back to the device; that is no visit."""
        if own is None:
            return super()._pass(node, own, params, done)
        self._place(node, own)
        return 0

    def _visited(self, plan: InsertPlan) -> None:
        """Write what has been visited often enough, from the root down."""
        if self.write_through_threshold is None:
            return
        visited = [n for n, own in zip(plan.path, plan.own, strict=True) if own is None]
        for node in visited + ([plan.leaf] if plan.leaf is not None else []):
            if not node.backuped and node.hit_count >= self.write_through_threshold:
                self._try_backup(node)

    def _try_backup(self, node: TreeNode, write_back: bool = False) -> None:
        """``write_backup`` inside a call that goes on without it; see the module docstring."""
        try:
            self.write_backup(node, write_back)
        except Exception as error:
            self.failed_copies.append(error)

    # ---- eviction --------------------------------------------------------------------------------

    def _evict_leaf(self, node: TreeNode) -> int:
        """Free a leaf's device slots; it stays if it has, or can get, a host copy.

        A leaf without one and without room for one is dropped, unless nodes below it are on the
        host only: they would be lost, so it is not evicted.
        """
        if not node.backuped and self.write_policy == "write_back":
            self._try_backup(node, write_back=True)
            self.writing_check(write_back=True)
        if node.value is not None and node.backuped:
            self.events.prepare([node])
            self.cache_controller.evict_device(node.value)
            self._off_device(node)
            return len(node.key)
        return 0 if node.children else super()._evict_leaf(node)

    def _off_device(self, node: TreeNode) -> None:
        """A node with a host copy, not locked, has given up its device slots."""
        self.events.removed(node)
        self.evictable_size_ -= len(node.key)
        node.value = None
        self._update_leaf_status(node)
        self._update_leaf_status(self._parent(node))

    def evict_host(self, num_tokens: int) -> int:
        """Drop host-only leaves until ``num_tokens`` host slots are free, or none is left.

        Returns how many were freed. A node whose host slots an operation uses is passed over. A
        call that raises has dropped whole leaves, or nothing.
        """
        whole_number("num_tokens", num_tokens, None)
        heap = [self._heap_entry(node) for node in self.evictable_host_leaves]
        heapq.heapify(heap)
        freed = 0
        while freed < num_tokens and heap:
            node = heapq.heappop(heap)[2]
            if node.host_ref_counter > 0:
                continue
            parent = node.parent
            freed += self._drop_host_leaf(node)
            if parent in self.evictable_host_leaves:
                heapq.heappush(heap, self._heap_entry(parent))
        return freed

    def _drop_host_leaf(self, node: TreeNode) -> int:
        self.events.prepare([node])
        if node.host_value is not None:
            self.cache_controller.evict_host(node.host_value)
        self.events.removed(node, MEDIUM_CPU)
        self._unlink(node)
        return len(node.key)

    def _update_leaf_status(self, node: TreeNode) -> None:
        super()._update_leaf_status(node)
        if (
            node.evicted
            and node.backuped
            and node.lock_ref == 0
            and not any(child.backuped for child in node.children.values())
        ):
            self.evictable_host_leaves.add(node)
        else:
            self.evictable_host_leaves.discard(node)

    def _unlink(self, node: TreeNode) -> None:
        self.evictable_host_leaves.discard(node)
        super()._unlink(node)

    # ---- host to device --------------------------------------------------------------------------

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        """Load the host hit of a request, if it is worth it and there is room.

        Returns:
            The device slots of the loaded tokens (int64, their bytes arrive with the batch's
            load), and the last node on the device: the host node, or its device ancestor.

        Raises:
            StaleMatch: the node is gone, or another length of its path is on the host only than
                the match said. Nothing changed; match again.
        """
        with_attributes("init_load_back", params, "last_host_node", "host_hit_length", "mem_quota")
        if params.mem_quota is not None:
            whole_number("mem_quota", params.mem_quota, None)
        whole_number("host_hit_length", params.host_hit_length)
        node: TreeNode = params.last_host_node
        hit = self._host_hit(node)
        if hit != params.host_hit_length:
            raise StaleMatch(
                f"init_load_back at {node}: {hit} tokens are on the host only, the match said "
                f"{params.host_hit_length}; expected a match of now"
            )
        if node.evicted:
            slots = self.load_back(node, params.mem_quota)
            if slots is not None:
                return slots, node
            node = self._device_ancestor(node)
        return self._no_slots(), node

    def load_back(self, node: TreeNode, mem_quota: int | None = None) -> torch.Tensor | None:
        """Queue a load of the evicted path that ends at ``node``.

        Device slots are allocated (evicting if needed) and belong to the nodes at once; nothing
        moves until ``ready_to_load_host_cache``. The nodes stay locked, and their host slots
        protected, until the acknowledgement.

        Args:
            mem_quota: device tokens the load may take, less what it newly pins; None: no bound.

        Returns:
            int64 device slots in path order, or None (nothing changed, but for evictions) when the
            load is smaller than ``load_back_threshold``, over the quota, or finds no room; also for
            a node on the device. A call that raises has changed nothing, but for evictions.

        Raises:
            StaleMatch: the node is not in this tree, or no longer.
        """
        self._host_hit(node)
        if mem_quota is not None:
            whole_number("mem_quota", mem_quota, None)
        ancestor = self._device_ancestor(node)
        nodes = [step for step in reversed(self._path(node)) if step.evicted]
        host_slots = [n.host_value for n in nodes if n.host_value is not None]
        size = sum(len(slots) for slots in host_slots)
        if not nodes or size < self.load_back_threshold:
            return None
        self.events.prepare(nodes)
        queued = len(self.cache_controller.load_queue)
        with ExitStack() as held:
            pinned = -self.inc_lock_ref(ancestor).delta
            held.callback(self.dec_lock_ref, ancestor)
            for n in nodes:
                n.protect_host()
                held.callback(n.release_host)
            if mem_quota is not None and size > mem_quota - pinned:
                return None
            slots = self._load(torch.cat(host_slots), node.id)
            if slots is None:
                return None
            held.callback(self.cache_controller.cancel_loading, queued)
            own = [piece.clone() for piece in torch.split(slots, [len(n.key) for n in nodes])]
            held.pop_all()
        for n, piece in zip(nodes, own, strict=True):
            self._place(n, piece)
        self.dec_lock_ref(ancestor)
        self.inc_lock_ref(node)
        self.ongoing_load_back[node.id] = nodes
        return slots

    def _load(self, host_slots: torch.Tensor, node_id: int) -> torch.Tensor | None:
        slots = self.cache_controller.load(host_slots, node_id=node_id)
        if slots is None:
            self.evict(EvictParams(num_tokens=len(host_slots)))
            slots = self.cache_controller.load(host_slots, node_id=node_id)
        return slots

    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads as one; returns the consumer index for the batch (-1: none).

        Raises:
            CopyFailed: the load could not be started. Its nodes are on the host only, as before
                ``init_load_back``, and nothing of it stays. Who has locked one of them holds its
                device ancestor now (``error.moved``); compute the tokens instead.
        """
        try:
            return self.cache_controller.start_loading()
        except Exception as error:
            moved = self._give_up_loads()
            if isinstance(error, CopyFailed):
                error.moved = moved
            raise

    def _give_up_loads(self) -> dict[TreeNode, TreeNode]:
        """Undo every queued load; returns what took the place of the nodes that were locked."""
        ids = [node_id for op in self.cache_controller.load_queue for node_id in op.node_ids]
        loading = {node for node_id in ids for node in self.ongoing_load_back[node_id]}
        below = [child for node in loading for child in node.children.values()]
        if any(not child.evicted and child not in loading for child in below):
            self.writing_check(write_back=True)  # what was inserted there goes as well
        moved: dict[TreeNode, TreeNode] = {}
        for node_id in reversed(ids):  # a later one may hang from an earlier one
            nodes = self._release(self.ongoing_load_back.pop(node_id))
            self._give_up(nodes[0], self._parent(nodes[0]), loading, moved)
        self.cache_controller.cancel_loading()
        for node, ancestor in moved.items():
            moved[node] = moved.get(ancestor, ancestor)
        return moved

    def _give_up(
        self,
        node: TreeNode,
        ancestor: TreeNode,
        loading: set[TreeNode],
        moved: dict[TreeNode, TreeNode],
    ) -> None:
        """Take a node that was never loaded off the device, with everything below it."""
        for child in [child for child in node.children.values() if not child.evicted]:
            self._give_up(child, ancestor, loading, moved)
        if node.lock_ref > 0:  # each holder has locked the ancestor as well
            moved[node] = ancestor
            self.protected_size_ -= len(node.key)
            self.evictable_size_ += len(node.key)
            node.lock_ref = 0
        if node.backuped:
            if node not in loading and node.value is not None:
                self.cache_controller.evict_device(node.value)
            self._off_device(node)
            return
        for host_only in reversed(self.nodes(node)):
            self._drop_host_leaf(host_only)
        super()._evict_leaf(node)

    def loading_check(self) -> None:
        """Acknowledge the loads that every rank has finished."""
        acks = self.cache_controller.ack_load_queue
        done = self._finished_everywhere(acks)
        for ack in acks[:done]:
            for node_id in ack.node_ids:
                self._release(self.ongoing_load_back.pop(node_id))
        del acks[:done]

    def check_hicache_events(self) -> None:
        """What the scheduler calls once a step, prefill or decode: acknowledge writes and loads.

        Raises:
            CopyFailed: a write that an insert or an eviction asked for could not be started. Each
                is raised once, oldest first, when the acknowledgements are done.
        """
        self.writing_check()
        self.loading_check()
        self.storage.drain()
        if self.failed_copies:
            raise self.failed_copies.pop(0)

    # ---- helpers ---------------------------------------------------------------------------------

    def get_height(self, node: TreeNode) -> int:
        """How many nodes lie from the root's child to ``node``, both counted; 0 for the root."""
        return len(self._path(node))

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """As :meth:`RadixCache.inc_lock_ref`.

        Raises:
            InvalidArgument: the node is not on the device.
        """
        if isinstance(node, TreeNode) and node.evicted:
            raise InvalidArgument(f"inc_lock_ref of {node}: it is not on the device")
        return super().inc_lock_ref(node)

    def _match_result(self, slots: torch.Tensor, node: TreeNode) -> MatchResult:
        last_device_node = self._device_ancestor(node)
        while not node.backuped:
            node = self._parent(node)
        return MatchResult(slots, last_device_node, node, host_hit_length=self._host_hit(node))

    def prefix_length(self, node: TreeNode) -> int:
        """How many tokens lie from the root to the end of ``node``."""
        return sum(len(step.key) for step in self._path(node))

    def _host_hit(self, node: TreeNode) -> int:
        """How many tokens of the path that ends at ``node`` are on the host only."""
        return sum(len(step.key) for step in self._path(node) if step.evicted)

    def _split_node(self, halves: Halves) -> TreeNode:
        upper = super()._split_node(halves)
        copies = (*self.ongoing_write_through.values(), *self.ongoing_load_back.values())
        for nodes in (*copies, *self.storage.operations()):
            if halves.child in nodes:
                nodes.insert(nodes.index(halves.child), upper)
        return upper

    def _place(self, node: TreeNode, slots: torch.Tensor) -> None:
        """An evicted node is on the device again, at these slots, which it owns."""
        node.value = slots
        self.evictable_size_ += len(node.key)
        self.events.stored(node)
        self._update_leaf_status(node)
        self._update_leaf_status(self._parent(node))

    def _device_ancestor(self, node: TreeNode) -> TreeNode:
        """The node itself, or the first ancestor that is on the device."""
        while node.evicted:
            node = self._parent(node)
        return node

    def _finished_everywhere(self, acks: list[Any]) -> int:
        """How many of the oldest copies are done on every rank (one all-reduce, always)."""
        done = 0
        while done < len(acks) and acks[done].finish_event.query():
            done += 1
        return self.tp_group.all_reduce_min([done])[0]
