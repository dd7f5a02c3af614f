"""Bugs planted in the tree over two tiers: what is written, acknowledged and evicted."""

from collections.abc import Callable
from functools import partial
from typing import Any

from refcache.planted.bug import PlantedBug

HIRADIX = "refcache.tree.hiradix_cache:HiRadixCache"
Function = Callable[..., Any]
_bug = partial(PlantedBug, suite="hicache.state")


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


def _lock_kept(original: Function) -> Function:
    def _release(self: Any, nodes: Any) -> Any:
        if not self.ongoing_write_through:
            return original(self, nodes)
        for node in nodes:
            node.release_host()
        return nodes

    return _release


def _not_awaited(original: Function) -> Function:
    return lambda self, write_back=False: None if write_back else original(self)


def _announced_early(original: Function) -> Function:
    def write_backup(self: Any, node: Any, write_back: bool = False) -> int:
        written = int(original(self, node, write_back))
        if written:
            self.events.stored(node, "CPU_PINNED")
        return written

    return write_backup


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
    def _visited(self: Any, plan: Any) -> None:
        threshold = self.write_through_threshold
        self.write_through_threshold = threshold and 1
        try:
            original(self, plan)
        finally:
            self.write_through_threshold = threshold

    return _visited


def _second_too_early(original: Function) -> Function:
    def _finished_everywhere(self: Any, acks: Any) -> Any:
        done = original(self, acks)
        return 2 if done == 1 and len(acks) > 1 else done

    return _finished_everywhere


BUGS: tuple[PlantedBug, ...] = (
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
        "ack-keeps-lock",
        "slip",
        "a copy that is acknowledged while a write is left keeps its lock",
        f"{HIRADIX}._release",
        _lock_kept,
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
        f"{HIRADIX}._visited",
        _first_visit,
    ),
    _bug(
        "second-ack-early",
        "slip",
        "when the oldest of several copies is done, the next is taken for done too",
        f"{HIRADIX}._finished_everywhere",
        _second_too_early,
    ),
)
