"""Bugs planted in the host tier: the tree over two tiers, the host pool, the controller, copies."""

from collections.abc import Callable
from typing import Any

import torch

from refcache.controller import CacheOperation
from refcache.oracle.planted.bug import PlantedBug
from refcache.tree import RadixCache
from refcache.types import EvictParams

HIRADIX = "refcache.tree.hiradix_cache:HiRadixCache"
CONTROLLER = "refcache.controller.hicache_controller:HiCacheController"
HOST = "refcache.pool.host:HostKVCache"
SLOTS = "refcache.pool.host_slots:HostSlots"
Function = Callable[..., Any]


def _unprotected(original: Function) -> Function:
    def _load(self: Any, host_slots: torch.Tensor, node_id: int) -> Any:
        users = {n: (n.host_ref_counter, n.parent) for n in self.nodes() if n.host_ref_counter}
        for node in users:
            node.host_ref_counter = 0
        allocator, controller = self.token_to_kv_pool_allocator, self.cache_controller
        slots = allocator.alloc(len(host_slots))
        if slots is None:
            self.evict(EvictParams(len(host_slots)))
            slots = allocator.alloc(len(host_slots))
        if slots is not None:
            controller.load_queue.append(CacheOperation(host_slots, slots, node_id))
        for node, (count, parent) in users.items():
            node.host_ref_counter, node.parent = count, parent
        return slots

    return _load


def _ancestor_unlocked(original: Function) -> Function:
    def _load(self: Any, host_slots: torch.Tensor, node_id: int) -> Any:
        ancestor = self._device_ancestor(next(n for n in self.nodes() if n.id == node_id))
        self.dec_lock_ref(ancestor)
        try:
            return original(self, host_slots, node_id)
        finally:
            RadixCache.inc_lock_ref(self, ancestor)

    return _load


def _leaf_with_children(original: Function) -> Function:
    def _update_leaf_status(self: Any, node: Any) -> None:
        original(self, node)
        if node.evicted and node.backuped:
            self.evictable_host_leaves.add(node)

    return _update_leaf_status


def _copy_forgotten(original: Function) -> Function:
    def _split_node(self: Any, child: Any, split_len: int) -> Any:
        upper = original(self, child, split_len)
        for operations in (self.ongoing_write_through, self.ongoing_load_back):
            for nodes in operations.values():
                if upper in nodes:
                    nodes.remove(upper)
        return upper

    return _split_node


def _host_lock_halved(original: Function) -> Function:
    def _split_node(self: Any, child: Any, split_len: int) -> Any:
        upper = original(self, child, split_len)
        upper.host_ref_counter = 0
        return upper

    return _split_node


def _only(check: str, while_running: str) -> Callable[[Function], Function]:
    def replacement(original: Function) -> Function:
        def check_hicache_events(self: Any) -> None:
            if getattr(self, while_running):
                getattr(self, check)()
            else:
                original(self)

        return check_hicache_events

    return replacement


def _evicts_all(original: Function) -> Function:
    return lambda self, num_tokens: original(self, 1 << 30)


def _evicts_nothing(original: Function) -> Function:
    return lambda self, num_tokens: original(self, num_tokens // 2)


def _no_fence(original: Function) -> Function:
    return lambda self, stream: None if stream is self.load_stream else original(self, stream)


def _start_not_awaited(original: Function) -> Function:
    def start_writing(self: Any) -> None:
        start = self.write_stream.wait_event
        self.write_stream.wait_event = lambda event: None
        try:
            original(self)
        finally:
            self.write_stream.wait_event = start

    return start_writing


def _last_layer_skipped(original: Function) -> Function:
    def _copy_function(self: Any, name: str, io_backend: str) -> Function:
        copy: Function = original(self, name, io_backend)

        def load_per_layer(*arguments: Any) -> None:
            if arguments[4] < self.layer_num - 1:  # layer_id
                copy(*arguments)

        return load_per_layer if name == "load_per_layer" else copy

    return _copy_function


def _side_reversed(original: Function) -> Function:
    def merge_ops(ops: Any) -> Any:
        merged = original(ops)
        if len(ops) > 1:
            merged.device_indices = merged.device_indices.flip(0)
        return merged

    return merge_ops


def _first_plane_only(original: Function) -> Function:
    def backup_all_layer(host: Any, device: Any, *rest: Any) -> None:
        planes = len(host)
        original(host[:1], device[: len(device) // planes], *rest)

    return backup_all_layer


def _last_page_lost(original: Function) -> Function:
    def backup_all_layer(
        host: Any, device: Any, host_slots: Any, device_slots: Any, size: int, layout: str
    ) -> None:
        keep = len(host_slots) - size if len(host_slots) > 2 * size else len(host_slots)
        original(host, device, host_slots[:keep], device_slots[:keep], size, layout)

    return backup_all_layer


def _no_threshold(original: Function) -> Function:
    def load_back(self: Any, node: Any, mem_quota: int | None = None) -> Any:
        threshold, self.load_back_threshold = self.load_back_threshold, 0
        try:
            return original(self, node, mem_quota)
        finally:
            self.load_back_threshold = threshold

    return load_back


def _no_quota(original: Function) -> Function:
    return lambda self, node, mem_quota=None: original(self, node, None)


def _lock_kept(original: Function) -> Function:
    def writing_check(self: Any, write_back: bool = False) -> None:
        policy = self.write_policy
        if len(self.ongoing_write_through) > 1:
            self.write_policy = "write_back"
        try:
            original(self, write_back)
        finally:
            self.write_policy = policy

    return writing_check


def _not_evictable(original: Function) -> Function:
    def _place(self: Any, node: Any, slots: torch.Tensor) -> None:
        original(self, node, slots)
        if len(self.ongoing_load_back) == 0:
            self.evictable_size_ -= len(node.key)

    return _place


def _host_counted(original: Function) -> Function:
    def _pass(self: Any, node: Any, value: Any, params: Any, done: int) -> int:
        original(self, node, value, params, done)
        return len(node.key)

    return _pass


def _leaf_first(original: Function) -> Function:
    return lambda self, host_slots, node_id: original(self, host_slots.flip(0), node_id)


def _not_awaited(original: Function) -> Function:
    return lambda self, write_back=False: None if write_back else original(self)


def _announced_early(original: Function) -> Function:
    def write_backup(self: Any, node: Any, write_back: bool = False) -> int:
        written = int(original(self, node, write_back))
        if written:
            self.events.stored(node, "CPU_PINNED")
        return written

    return write_backup


def _copies_left(original: Function) -> Function:
    def reset(self: Any) -> None:
        for queue in (self.ack_write_queue, self.ack_load_queue, self.load_queue):
            queue.clear()
        self.layer_done_counter.reset()

    return reset


def _page_not_freed(original: Function) -> Function:
    def evict_host(self: Any, host_indices: torch.Tensor, backup_only: bool = True) -> int:
        keep = self.page_size if len(host_indices) > self.page_size else 0
        original(self, host_indices[: len(host_indices) - keep], backup_only)
        return len(host_indices)

    return evict_host


def _page_handed_out_again(original: Function) -> Function:
    def alloc(self: Any, need_size: int) -> Any:
        slots = original(self, need_size)
        if slots is not None and need_size > self.page_size:
            self.free_slots = torch.cat([self.free_slots, slots[-self.page_size :]])
        return slots

    return alloc


def _page_freed_twice(original: Function) -> Function:
    def free(self: Any, indices: torch.Tensor) -> int:
        count = int(original(self, indices))
        if count > self.page_size:
            self.free_slots = torch.cat([self.free_slots, indices[-self.page_size :]])
        return count

    return free


def _slots_kept(original: Function) -> Function:
    def _evict_leaf(self: Any, node: Any) -> int:
        evict_device = self.cache_controller.evict_device
        if not node.backuped and self.write_policy == "write_back":
            self.cache_controller.evict_device = len
        try:
            return int(original(self, node))
        finally:
            self.cache_controller.evict_device = evict_device

    return _evict_leaf


def _queued_unwritten(original: Function) -> Function:
    def _evict_leaf(self: Any, node: Any) -> int:
        if self.write_policy != "write_back" or node.backuped:
            return int(original(self, node))
        if not self.write_backup(node, write_back=True):
            self.cache_controller.evict_device(node.value)
            self.evictable_size_ -= len(node.key)
            node.value = None
            self._update_leaf_status(node)
            return len(node.key)
        self.writing_check(write_back=True)
        return int(original(self, node))

    return _evict_leaf


def _children_ignored(original: Function) -> Function:
    def _evict_leaf(self: Any, node: Any) -> int:
        children, node.children = node.children, {}
        try:
            return int(original(self, node))
        finally:
            node.children = children

    return _evict_leaf


def _first_visit(original: Function) -> Function:
    def _inc_hit_count(self: Any, node: Any, params: Any, done: int) -> None:
        threshold = self.write_through_threshold
        self.write_through_threshold = threshold and 1
        try:
            original(self, node, params, done)
        finally:
            self.write_through_threshold = threshold

    return _inc_hit_count


def _hit_without_its_last_node(original: Function) -> Function:
    def _match_result(self: Any, slots: Any, node: Any) -> Any:
        found = original(self, slots, node)
        if node.evicted and node.parent.evicted:
            return found._replace(host_hit_length=found.host_hit_length - len(node.key))
        return found

    return _match_result


def _leaf_kept(original: Function) -> Function:
    def _place(self: Any, node: Any, slots: torch.Tensor) -> None:
        listed = node in self.evictable_host_leaves
        original(self, node, slots)
        if listed:
            self.evictable_host_leaves.add(node)

    return _place


def _bug(name: str, report: str, summary: str, where: str, replacement: Any) -> PlantedBug:
    return PlantedBug(name, report, summary, where, replacement, "hicache.state")


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "load-back-unprotected",
        "sglang#27631, #31427",
        "the eviction that makes room for a load may drop the host copies to be loaded",
        f"{HIRADIX}._load",
        _unprotected,
    ),
    _bug(
        "load-leaves-ancestor",
        "TensorRT-LLM#8813, #17926",
        "the eviction that makes room for a load may take the node that the load hangs from",
        f"{HIRADIX}._load",
        _ancestor_unlocked,
    ),
    _bug(
        "host-leaf-with-children",
        "sglang#23537",
        "a node on the host only is listed as a host leaf although a child is on the host",
        f"{HIRADIX}._update_leaf_status",
        _leaf_with_children,
    ),
    _bug(
        "split-forgets-the-copy",
        "sglang#16946, #27072",
        "a split while a copy runs leaves the upper half out of the acknowledgement",
        f"{HIRADIX}._split_node",
        _copy_forgotten,
    ),
    _bug(
        "split-drops-host-lock",
        "sglang#38480, #38835",
        "the upper half of a split loses the protection of its host slots",
        f"{HIRADIX}._split_node",
        _host_lock_halved,
    ),
    _bug(
        "write-acks-not-polled",
        "sglang#20049",
        "while a load runs, writes are not acknowledged",
        f"{HIRADIX}.check_hicache_events",
        _only("loading_check", "ongoing_load_back"),
    ),
    _bug(
        "load-acks-not-polled",
        "sglang#20049",
        "while a write runs, loads are not acknowledged",
        f"{HIRADIX}.check_hicache_events",
        _only("writing_check", "ongoing_write_through"),
    ),
    _bug(
        "evict-host-too-much",
        "sglang#4987, #4989",
        "the host eviction never sees that enough is free",
        f"{HIRADIX}.evict_host",
        _evicts_all,
    ),
    _bug(
        "evict-host-too-little",
        "slip",
        "the host eviction stops half-way although host leaves are left",
        f"{HIRADIX}.evict_host",
        _evicts_nothing,
    ),
    _bug(
        "load-not-fenced",
        "sglang#36738",
        "a load does not wait for the forward that may still write its device slots",
        f"{CONTROLLER}._wait_for_forward",
        _no_fence,
    ),
    _bug(
        "write-start-not-awaited",
        "sglang#20611",
        "a write does not wait for what its caller's stream was doing",
        f"{CONTROLLER}.start_writing",
        _start_not_awaited,
    ),
    _bug(
        "getters-do-not-wait",
        "sglang#22811",
        "reading a layer's buffer does not wait for the load of that layer",
        "refcache.pool.device:KVCache._wait",
        lambda original: lambda self, layer_id: None,
    ),
    _bug(
        "last-layer-not-loaded",
        "sglang#37870, #31745",
        "the last layer's event fires, its rows are not copied",
        f"{HOST}._copy_function",
        _last_layer_skipped,
    ),
    _bug(
        "merge-reverses-a-side",
        "sglang#28544",
        "merging two loads reverses the device slots",
        "refcache.controller.operation:CacheOperation.merge_ops",
        _side_reversed,
    ),
    _bug(
        "second-plane-not-copied",
        "sglang#17085, #39893",
        "only the first of a pool's planes is backed up",
        "refcache.reference:backup_all_layer",
        _first_plane_only,
    ),
    _bug(
        "last-page-not-copied",
        "sglang#30736",
        "a backup of three pages and more leaves out the last",
        "refcache.reference:backup_all_layer",
        _last_page_lost,
    ),
    _bug(
        "load-threshold-ignored",
        "slip",
        "a load below load_back_threshold is made",
        f"{HIRADIX}.load_back",
        _no_threshold,
    ),
    _bug(
        "load-quota-ignored",
        "slip",
        "a load over its quota is made",
        f"{HIRADIX}.load_back",
        _no_quota,
    ),
    _bug(
        "ack-keeps-lock",
        "slip",
        "of several writes acknowledged together, none gives up its lock",
        f"{HIRADIX}.writing_check",
        _lock_kept,
    ),
    _bug(
        "revived-not-evictable",
        "sglang#35270",
        "an insert over an evicted node does not count its tokens as evictable",
        f"{HIRADIX}._place",
        _not_evictable,
    ),
    _bug(
        "revived-counted-as-cached",
        "slip",
        "insert counts tokens that were on the host only, so the caller frees what the tree took",
        f"{HIRADIX}._pass",
        _host_counted,
    ),
    _bug(
        "load-from-the-end",
        "slip",
        "the slots of a load are paired from the end of the path",
        f"{HIRADIX}._load",
        _leaf_first,
    ),
    _bug(
        "write-back-not-awaited",
        "vllm#48596, #46951",
        "an eviction frees device slots before their copy to the host is done",
        f"{HIRADIX}.writing_check",
        _not_awaited,
    ),
    _bug(
        "host-store-announced-early",
        "sglang#26387",
        "the host's store event is sent when the copy is queued",
        f"{HIRADIX}.write_backup",
        _announced_early,
    ),
    _bug(
        "reset-leaves-copies",
        "sglang#26009",
        "reset does not wait for running copies",
        f"{CONTROLLER}.reset",
        _copies_left,
    ),
    _bug(
        "host-page-leaked",
        "sglang#9601, #15439",
        "evicting several host pages frees all but the last",
        f"{CONTROLLER}.evict_host",
        _page_not_freed,
    ),
    _bug(
        "host-page-owned-twice",
        "sglang#13483, #29310",
        "a host page stays in the free list after it was handed out",
        f"{SLOTS}.alloc",
        _page_handed_out_again,
    ),
    _bug(
        "host-page-freed-twice",
        "sglang#13483, #13501, #27010",
        "freeing several host pages puts the last into the free list twice",
        f"{SLOTS}.free",
        _page_freed_twice,
    ),
    _bug(
        "write-back-keeps-slots",
        "sglang#5499",
        "an eviction that has written a node back does not free its device slots",
        f"{HIRADIX}._evict_leaf",
        _slots_kept,
    ),
    _bug(
        "write-back-without-room",
        "sglang#27108, #16909",
        "a node is evicted as if written back although the host had no room for it",
        f"{HIRADIX}._evict_leaf",
        _queued_unwritten,
    ),
    _bug(
        "parent-of-host-nodes-dropped",
        "sglang#22592, #30106",
        "a node without room on the host is dropped although nodes below are on the host only",
        f"{HIRADIX}._evict_leaf",
        _children_ignored,
    ),
    _bug(
        "selective-writes-at-once",
        "sglang#30689",
        "write_through_selective writes at the first visit",
        f"{HIRADIX}._inc_hit_count",
        _first_visit,
    ),
    _bug(
        "host-hit-too-short",
        "slip",
        "a host hit over several nodes leaves out the last",
        f"{HIRADIX}._match_result",
        _hit_without_its_last_node,
    ),
    _bug(
        "revived-stays-host-leaf",
        "sglang#39980",
        "a node that is back on the device stays listed as a host leaf",
        f"{HIRADIX}._place",
        _leaf_kept,
    ),
)
