"""``TreeStorage``: what a two-tier tree does with storage below the host.

Every node that reaches the host is written to storage, page by page, under its page hashes. A
request whose prompt goes on where the tree ends asks storage for the rest (a *prefetch*), and is
not admitted while that goes on. What arrives becomes nodes on the host.

=========  ==========================================  ========================================
operation  host slots                                  keeps in the tree
=========  ==========================================  ========================================
write      the nodes', which ``protect_host`` keeps    those nodes, until the acknowledgement
prefetch   its own, until the tree takes what came,    the node that it hangs from (its *anchor*),
           and the release queue the rest              until the tree takes what came
=========  ==========================================  ========================================

A split of a node that an operation keeps adds the upper half to the operation, which releases both.

Ranks that serve the same requests make the same collective calls here, whatever their storage does:
one reduction a step for the lengths of the queues (:meth:`TreeStorage.drain`), one or two for each
prefetch that is asked about.

Models the storage half of SGLang 0.5.10's ``HiRadixCache``; differences are in ``docs/storage.md``.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from refcache.controller import HiCacheController, PrefetchOperation
from refcache.controller.storage_controller import drained
from refcache.errors import InvalidArgument
from refcache.events import MEDIUM_CPU
from refcache.keys import RadixKey
from refcache.storage.policy import StoragePolicy, check_stop_policy, parse_extra_config
from refcache.tree.kv_events import node_hashes
from refcache.tree.node import TreeNode

SECONDS_A_STEP = 0.01
"""What a step of the scheduler counts for where the tree has no clock that says seconds."""


class Prefetch(NamedTuple):
    """A prefetch that the tree has not taken over: where it hangs, what for, where to, by whom."""

    anchors: list[TreeNode]
    key: RadixKey
    host_indices: torch.Tensor
    operation: PrefetchOperation


@dataclass
class HostPlan:
    """What inserting prefetched pages will do.

    Attributes:
        adopted: nodes on the device alone that take host slots, with them.
        leaf: a new node for what the tree does not have; None when it has everything.
        duplicates: slots of pages that the tree had on the host.
    """

    path: list[TreeNode]
    halves: Any
    adopted: list[tuple[TreeNode, torch.Tensor]]
    leaf: TreeNode | None
    duplicates: list[torch.Tensor]


class TreeStorage:
    """See the module docstring.

    Args:
        tree: the :class:`HiRadixCache` that has this one.
        clock: seconds, for the stop policy "timeout"; by default steps are counted.

    Attributes:
        policy: what is worth a prefetch, and its time; ``prefetch_stop_policy``: one of
            ``PREFETCH_STOP_POLICIES``.
        ongoing_prefetch: by request. ``ongoing_backup``: by operation, the nodes in path order.
        loaded: by request, tokens that storage has brought, until they are asked for.
        completed, asked: tokens written to storage, and those that were submitted.
    """

    def __init__(self, tree: Any, clock: Callable[[], float] | None = None) -> None:
        self.tree = tree
        self.steps = 0
        self.clock = clock or (lambda: self.steps * SECONDS_A_STEP)
        self.policy = StoragePolicy()
        self.prefetch_stop_policy = "best_effort"
        self.ongoing_prefetch: dict[str, Prefetch] = {}
        self.ongoing_backup: dict[int, list[TreeNode]] = {}
        self.loaded: dict[str, int] = {}
        self.asked = self.completed = 0

    @property
    def controller(self) -> HiCacheController:
        controller: HiCacheController = self.tree.cache_controller
        return controller

    @property
    def enabled(self) -> bool:
        """A backend is attached."""
        return bool(self.controller.enable_storage)

    def reset(self) -> None:
        """Forget everything; the controller has ended it."""
        self.ongoing_prefetch.clear()
        self.ongoing_backup.clear()
        self.loaded.clear()

    def operations(self) -> Iterable[list[TreeNode]]:
        """The nodes of everything that goes on, to be kept right by splits."""
        yield from self.ongoing_backup.values()
        for prefetch in self.ongoing_prefetch.values():
            yield prefetch.anchors

    # ---- attach and detach -----------------------------------------------------------------------

    def attach(
        self,
        storage_backend: Any,
        extra_config: str | None,
        model_name: str | None,
        stop_policy: str | None,
    ) -> None:
        """Attach a backend; policies count from then on. Nothing changes when it fails.

        Raises:
            InvalidArgument: a text, a policy or a backend that does not fit.
            Exception: the backend's own.
        """
        policy, options = parse_extra_config(extra_config)
        chosen = check_stop_policy(stop_policy or self.prefetch_stop_policy)
        self.controller.attach_storage_backend(
            storage_backend, policy.prefetch_threshold, model_name, options
        )
        self.policy, self.prefetch_stop_policy = policy, chosen

    def detach(self) -> None:
        """Detach, and give back what every operation held.

        Raises:
            StorageBusy: a thread is still inside the backend; it is attached as before.
        """
        self.controller.detach_storage_backend()
        self._drain(None, None, None)
        for rid in list(self.ongoing_prefetch):
            self.abort(rid)
        self._drain(None, None, None)

    # ---- to storage ------------------------------------------------------------------------------

    def write(self, nodes: Iterable[TreeNode]) -> None:
        """Write nodes that have a host copy, each on its own, in path order."""
        for node in nodes if self.enabled else ():
            if node.host_value is None:
                raise InvalidArgument(f"write to storage of {node}: expected one on the host")
            hashes = node_hashes(node, self.tree.page_size)
            operation = self.controller.write_storage(
                node.host_value, node.key, hashes, self._prefix_keys(node.parent)
            )
            node.protect_host()
            self.ongoing_backup[operation] = [node]
            self.asked += len(node.key)

    def _prefix_keys(self, node: TreeNode | None) -> list[str] | None:
        if node is None or not self.policy.hicache_storage_pass_prefix_keys:
            return None
        node_hashes(node, self.tree.page_size)
        return node.get_prefix_hash_values(node)

    # ---- from storage ----------------------------------------------------------------------------

    def prefetch(
        self, rid: str, anchor: TreeNode, tokens: Sequence[int], extra_key: str | None
    ) -> None:
        """Ask for what follows ``anchor``; does nothing where that is not worth it, or no room.

        Raises:
            InvalidArgument: a prefetch of that name goes on; an anchor that is not on the host.
            ForeignNode: an anchor that is not in this tree.
        """
        tree, controller = self.tree, self.controller
        if anchor is not tree.root_node:
            tree._path(anchor)
            extra_key = anchor.key.extra_key
            if not anchor.backuped:
                raise InvalidArgument(f"prefetch below {anchor}: expected a node on the host")
        key = RadixKey(tokens, extra_key, tree.is_eagle).page_aligned(tree.page_size)
        if not self.enabled or len(key) < max(self.policy.prefetch_threshold, tree.page_size):
            return
        if rid in self.ongoing_prefetch:
            raise InvalidArgument(f"prefetch for {rid!r}: one goes on; expected another name")
        if controller.prefetch_rate_limited():
            return
        hashes = node_hashes(anchor, tree.page_size)
        prefix_keys = self._prefix_keys(anchor)
        anchor.protect_host()
        slots = tree.token_to_kv_pool_host.alloc(len(key))
        if slots is None:
            tree.evict_host(len(key))
            slots = tree.token_to_kv_pool_host.alloc(len(key))
        if slots is None:
            anchor.release_host()
            return
        last_hash = hashes[-1] if hashes else None
        operation = controller.storage.prefetch(
            rid, slots, key, last_hash, prefix_keys, self.clock()
        )
        self.ongoing_prefetch[rid] = Prefetch([anchor], key, slots, operation)
        controller.prefetch_tokens_occupied += len(key)

    def can_terminate(self, operation: PrefetchOperation) -> bool:
        """Whether the stop policy lets the request go on, the same on every rank."""
        if self.prefetch_stop_policy == "best_effort":
            return True
        ready = operation.is_finished()
        if self.prefetch_stop_policy == "timeout":
            ready = ready or self.is_prefetch_timeout(operation)
        all_ready, none_gone = self.tree.tp_group.all_reduce_min(
            [int(ready), int(not operation.is_terminated())]
        )
        return bool(all_ready) or not none_gone

    def is_prefetch_timeout(self, operation: PrefetchOperation) -> bool:
        """Whether it has taken longer than its pages may; before the hits are known, than none."""
        pages = (operation.hits or 0) // self.tree.page_size
        limit = self.policy.timeout(pages, self.tree.page_size)
        return self.clock() - operation.start_time > limit

    def check_progress(self, rid: str) -> bool:
        """May the request be scheduled? If so, what has come is in the tree."""
        going = self.ongoing_prefetch.get(rid)
        if going is None:
            return True
        if not self.can_terminate(going.operation):
            return False
        completed, hashes = self.controller.terminate_prefetch(going.operation)
        (common,) = self.tree.tp_group.all_reduce_min([completed])
        plan = self._plan(going.anchors[-1], going.key[:common], going.host_indices, hashes)
        self._insert(plan)
        for slots in plan.duplicates:
            self.tree.token_to_kv_pool_host.free(slots)
        self.controller.append_host_mem_release(going.host_indices[common:completed])
        self._forget(rid)
        self.loaded[rid] = common - sum(len(slots) for slots in plan.duplicates)
        return True

    def terminate(self, rid: str) -> None:
        """Wait no longer for this request's pages; what has come is taken at the next check."""
        if rid in self.ongoing_prefetch:
            self.ongoing_prefetch[rid].operation.mark_terminate()

    def abort(self, rid: str) -> None:
        """The request is gone: what has come for it is nobody's."""
        self.loaded.pop(rid, None)
        going = self.ongoing_prefetch.get(rid)
        if going is None:
            return
        completed, _ = self.controller.terminate_prefetch(going.operation)
        self.controller.append_host_mem_release(going.host_indices[:completed])
        self._forget(rid)

    def _forget(self, rid: str) -> None:
        going = self.ongoing_prefetch.pop(rid)
        for node in going.anchors:
            self._release(node)
        self.controller.prefetch_tokens_occupied -= len(going.key)

    def _release(self, node: TreeNode) -> None:
        node.release_host()
        self.tree._update_leaf_status(node)

    # ---- every step ------------------------------------------------------------------------------

    def drain(self) -> None:
        """Once a step: take what the threads have done, as much of it as every rank has."""
        self.steps += 1
        if not self.enabled:
            return
        storage, agree = self.controller.storage, self.tree.tp_group.all_reduce_min
        storage.admit_answered(agree)
        queues = (
            storage.prefetch_revoke_queue, storage.ack_backup_queue, storage.host_mem_release_queue
        )  # fmt: skip
        self._drain(*agree([queue.qsize() for queue in queues]))

    def _drain(self, revoked: int | None, written: int | None, released: int | None) -> None:
        storage = self.controller.storage
        for operation in drained(storage.prefetch_revoke_queue, revoked):
            going = self.ongoing_prefetch.get(operation.request_id)
            if going is not None and going.operation is operation:
                self._forget(operation.request_id)
        for operation in drained(storage.ack_backup_queue, written):
            self.completed += operation.completed_tokens
            for node in self.ongoing_backup.pop(operation.id):
                self._release(node)
        slots = drained(storage.host_mem_release_queue, released)
        if slots:
            self.tree.token_to_kv_pool_host.free(torch.cat(slots))

    # ---- pages become nodes ----------------------------------------------------------------------

    def _plan(
        self, anchor: TreeNode, key: RadixKey, slots: torch.Tensor, hashes: list[str]
    ) -> HostPlan:
        """Everything that inserting the pages of ``key`` below ``anchor`` needs."""
        tree, size = self.tree, self.tree.page_size
        path, common, rest = tree._walk(anchor, key)
        halves = tree._halve(path[-1], common) if path else None
        if halves is not None:
            path[-1] = halves.upper
        adopted, duplicates, start = [], [], 0
        for node in path:
            own = slots[start : start + len(node.key)].clone()
            if node.backuped:
                duplicates.append(own)
            else:
                adopted.append((node, own))
            start += len(node.key)
        leaf = None
        if len(rest):
            leaf = tree._new_node(rest)
            leaf.host_value = slots[start : start + len(rest)].clone()
            leaf.hash_value = hashes[start // size : (start + len(rest)) // size]
            leaf.parent = path[-1] if path else anchor
        tree.events.prepare([*path, *([leaf] if leaf else [])])
        return HostPlan(path, halves, adopted, leaf, duplicates)

    def _insert(self, plan: HostPlan) -> None:
        tree = self.tree
        if plan.halves is not None:
            tree._split_node(plan.halves)
        now = tree.clock()
        for node in plan.path:
            node.last_access_time = now
        for node, slots in plan.adopted:
            node.host_value = slots
            tree.events.stored(node, MEDIUM_CPU)
            tree._update_leaf_status(node)
            tree._update_leaf_status(tree._parent(node))
        if plan.leaf is not None:
            parent = tree._parent(plan.leaf)
            parent.children[plan.leaf.key.child_key(tree.page_size)] = plan.leaf
            tree.events.stored(plan.leaf, MEDIUM_CPU)
            tree._update_leaf_status(plan.leaf)
            tree._update_leaf_status(parent)
