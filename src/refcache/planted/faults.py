"""Bugs planted in what a call leaves behind when something inside it fails."""

from collections.abc import Callable
from functools import partial
from typing import Any

from refcache.planted.bug import PlantedBug

CONTROLLER = "refcache.controller.hicache_controller:HiCacheController"
HIRADIX = "refcache.tree.hiradix_cache:HiRadixCache"
TREE = "refcache.tree.radix_tree:RadixTree"
Function = Callable[..., Any]
_bug = partial(PlantedBug, suite="hicache.faults")


def _slots_lost(original: Function) -> Function:
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        pool = self.mem_pool_host
        free, pool.free = pool.free, len
        try:
            return original(self, *args, **kwargs)
        finally:
            pool.free = free

    return write


def _load_forgotten(original: Function) -> Function:
    def _give_up_loads(self: Any) -> Any:
        self.cache_controller.load_queue.clear()
        return {}

    return _give_up_loads


def _protection_kept(original: Function) -> Function:
    def load_back(self: Any, node: Any, mem_quota: int | None = None) -> Any:
        try:
            return original(self, node, mem_quota)
        except Exception:
            if node.backuped:
                node.protect_host()
            raise

    return load_back


def _counted_first(original: Function) -> Function:
    def _plan_insert(self: Any, params: Any) -> Any:
        self.evictable_size_ += self.page_size
        plan = original(self, params)
        self.evictable_size_ -= self.page_size
        return plan

    return _plan_insert


def _taken_first(original: Function) -> Function:
    def _take(self: Any, num_pages: int, slots: Function) -> Any:
        try:
            return original(self, num_pages, slots)
        except Exception:
            self.free_pages = self.free_pages[num_pages:]
            raise

    return _take


def _told_again(original: Function) -> Function:
    def check_hicache_events(self: Any) -> None:
        waiting = self.failed_copies[:1]
        try:
            original(self)
        except Exception:
            self.failed_copies[:0] = waiting
            raise

    return check_hicache_events


def _batch_kept(original: Function) -> Function:
    return lambda scheduler, failure: None


def _freed_in_parts(original: Function) -> Function:
    def _free(self: Any, *lists: Any) -> None:
        for slots in lists:
            original(self, slots)

    return _free


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "finish-frees-in-parts",
        "slip",
        "a finished request's duplicates stay freed when its tail cannot be",
        "refcache.tree.radix_cache:RadixCache._free",
        _freed_in_parts,
    ),
    _bug(
        "failed-write-keeps-slots",
        "slip",
        "a write that cannot be launched leaves its host slots with nobody",
        f"{CONTROLLER}.write",
        _slots_lost,
    ),
    _bug(
        "failed-load-matches",
        "slip",
        "the nodes of a load that cannot be launched stay on the device as if they were loaded",
        f"{HIRADIX}._give_up_loads",
        _load_forgotten,
    ),
    _bug(
        "failed-load-keeps-protection",
        "slip",
        "a load that raises before it is queued leaves its host slots protected for ever",
        f"{HIRADIX}.load_back",
        _protection_kept,
    ),
    _bug(
        "insert-counts-first",
        "slip",
        "an insert counts its tokens before it has everything it needs",
        f"{TREE}._plan_insert",
        _counted_first,
    ),
    _bug(
        "pages-taken-first",
        "slip",
        "an allocation takes its pages before it has computed the slots",
        "refcache.allocator.base:BaseTokenToKVPoolAllocator._take",
        _taken_first,
    ),
    _bug(
        "failure-told-again",
        "slip",
        "the failure of a write is raised at every poll from then on",
        f"{HIRADIX}.check_hicache_events",
        _told_again,
    ),
    _bug(
        "step-keeps-its-batch",
        "slip",
        "an iteration that raises leaves the slots, rows and locks of its batch",
        "refcache.engine.scheduling.recovery:compute_again",
        _batch_kept,
    ),
)
