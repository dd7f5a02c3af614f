"""Bugs planted in the tree over two tiers: its nodes, and what is loaded back."""

from collections.abc import Callable
from functools import partial
from typing import Any

from refcache.planted.bug import PlantedBug
from refcache.types import EvictParams

HIRADIX = "refcache.tree.hiradix_cache:HiRadixCache"
Function = Callable[..., Any]
_bug = partial(PlantedBug, suite="hicache.state")


def _unprotected(original: Function) -> Function:
    from refcache.controller import CacheOperation

    def _load(self: Any, host_slots: Any, node_id: int) -> Any:
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
    from refcache.tree import RadixCache

    def _load(self: Any, host_slots: Any, node_id: int) -> Any:
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
    def _split_node(self: Any, halves: Any) -> Any:
        upper = original(self, halves)
        for operations in (self.ongoing_write_through, self.ongoing_load_back):
            for nodes in operations.values():
                if upper in nodes:
                    nodes.remove(upper)
        return upper

    return _split_node


def _host_lock_halved(original: Function) -> Function:
    def _split_node(self: Any, halves: Any) -> Any:
        upper = original(self, halves)
        upper.host_ref_counter = 0
        return upper

    return _split_node


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


def _not_evictable(original: Function) -> Function:
    def _place(self: Any, node: Any, slots: Any) -> None:
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


def _hit_without_its_last_node(original: Function) -> Function:
    def _match_result(self: Any, slots: Any, node: Any) -> Any:
        found = original(self, slots, node)
        if node.evicted and node.parent.evicted:
            return found._replace(host_hit_length=found.host_hit_length - len(node.key))
        return found

    return _match_result


def _source_given_up(original: Function) -> Function:
    def load_back(self: Any, node: Any, mem_quota: int | None = None) -> Any:
        slots = original(self, node, mem_quota)
        if slots is not None and len(self.ongoing_load_back) > 1:
            self.cache_controller.evict_host(node.host_value)
            node.host_value = None
            self._update_leaf_status(node.parent)
        return slots

    return load_back


def _leaf_kept(original: Function) -> Function:
    def _place(self: Any, node: Any, slots: Any) -> None:
        listed = node in self.evictable_host_leaves
        original(self, node, slots)
        if listed:
            self.evictable_host_leaves.add(node)

    return _place


def _quota_grows(original: Function) -> Function:
    def load_back(self: Any, node: Any, mem_quota: int | None = None) -> Any:
        if mem_quota is not None:
            ancestor = self._device_ancestor(node)
            mem_quota -= 2 * self.inc_lock_ref(ancestor).delta
            self.dec_lock_ref(ancestor)
        return original(self, node, mem_quota)

    return load_back


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
        "host-hit-too-short",
        "slip",
        "a host hit over several nodes leaves out the last",
        f"{HIRADIX}._match_result",
        _hit_without_its_last_node,
    ),
    _bug(
        "load-gives-up-its-source",
        "sglang#31296, #31427",
        "while another load runs, the host slots of a load are freed before it has read them",
        f"{HIRADIX}.load_back",
        _source_given_up,
    ),
    _bug(
        "revived-stays-host-leaf",
        "sglang#39980",
        "a node that is back on the device stays listed as a host leaf",
        f"{HIRADIX}._place",
        _leaf_kept,
    ),
    _bug(
        "load-quota-grows-by-pins",
        "slip",
        "what a load newly pins is added to its quota, not taken from it",
        f"{HIRADIX}.load_back",
        _quota_grows,
    ),
)
