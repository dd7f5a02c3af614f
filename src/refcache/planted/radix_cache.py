"""Bugs planted in the radix cache: requests, locks, eviction."""

from collections.abc import Callable
from functools import partial
from typing import Any

from refcache.planted.bug import PlantedBug
from refcache.types import (
    EvictParams,
    EvictResult,
    IncLockRefResult,
)

CACHE = "refcache.tree.radix_cache:RadixCache"
Function = Callable[..., Any]
_bug = partial(PlantedBug, suite="tree.state")


def _abort_frees_all(original: Function) -> Function:
    def cache_finished_req(self: Any, req: Any, is_insert: bool = True) -> None:
        if not is_insert:
            req.cache_protected_len = 0
        original(self, req, is_insert)

    return cache_finished_req


def _parent_not_pushed(original: Function) -> Function:
    def evict(self: Any, params: EvictParams) -> EvictResult:
        evicted = 0
        for node in sorted(self.evictable_leaves, key=self.eviction_strategy.get_priority):
            if evicted >= params.num_tokens:
                break
            evicted += self._evict_leaf(node)
        return EvictResult(evicted)

    return evict


def _leaf_skipped(original: Function) -> Function:
    def inc_lock_ref(self: Any, node: Any) -> Any:
        if node is self.root_node or node.parent is self.root_node:
            return original(self, node)
        return original(self, node.parent)

    return inc_lock_ref


def _prefix_not_advanced(original: Function) -> Function:
    def cache_unfinished_req(self: Any, req: Any, chunked: bool = False) -> None:
        before = req.prefix_indices
        original(self, req, chunked)
        if chunked:
            req.prefix_indices = before

    return cache_unfinished_req


def _row_not_rewritten(original: Function) -> Function:
    def cache_unfinished_req(self: Any, req: Any, chunked: bool = False) -> None:
        row, length = req.req_pool_idx, len(req.fill_ids)
        before = self._row(req, length)
        original(self, req, chunked)
        self.req_to_token_pool.write((row, slice(0, length)), before)

    return cache_unfinished_req


def _lock_not_moved(original: Function) -> Function:
    def cache_unfinished_req(self: Any, req: Any, chunked: bool = False) -> None:
        before = req.last_node
        original(self, req, chunked)
        if before is not self.root_node:
            self.inc_lock_ref(before)

    return cache_unfinished_req


def _tail_lost(original: Function) -> Function:
    def _free(self: Any, *lists: Any) -> None:
        size = 1 if self.page_size == 1 else 2
        original(self, *(slots[: len(slots) // size * size] for slots in lists))

    return _free


def _evicts_all(original: Function) -> Function:
    def evict(self: Any, params: EvictParams) -> Any:
        return original(self, EvictParams(params.num_tokens * max(1, len(self.evictable_leaves))))

    return evict


def _grad_left_off(original: Function) -> Function:
    import torch

    def evict(self: Any, params: Any) -> Any:
        result = original(self, params)
        if result.num_tokens_evicted > 2 * self.page_size:  # "the long way needs no gradients"
            torch.set_grad_enabled(False)
        return result

    return evict


def _delta_of_path(original: Function) -> Function:
    def inc_lock_ref(self: Any, node: Any) -> IncLockRefResult:
        original(self, node)
        return IncLockRefResult(-sum(len(step.key) for step in self._path(node)))

    return inc_lock_ref


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "abort-frees-cached-chunks",
        "sglang#38319, #38355",
        "an abort between chunks frees the pages that the tree took over",
        f"{CACHE}.cache_finished_req",
        _abort_frees_all,
    ),
    _bug(
        "evict-parent-not-pushed",
        "sglang#5499",
        "a parent that became a leaf during an eviction is not considered",
        f"{CACHE}.evict",
        _parent_not_pushed,
    ),
    _bug(
        "evict-too-much",
        "sglang#4987, #4989",
        "an eviction asks each leaf for the whole amount, and does not stop when enough is free",
        f"{CACHE}.evict",
        _evicts_all,
    ),
    _bug(
        "chunk-progress-lost",
        "sglang#36855, #37024, #33996",
        "prefix_indices does not advance after a chunk",
        f"{CACHE}.cache_unfinished_req",
        _prefix_not_advanced,
    ),
    _bug(
        "lock-skips-node",
        "mini-sglang#52, #44",
        "inc_lock_ref moves to the parent before it touches the node",
        f"{CACHE}.inc_lock_ref",
        _leaf_skipped,
    ),
    _bug(
        "row-keeps-duplicates",
        "slip",
        "a request's row is not pointed at the tree's slots after its own were freed",
        f"{CACHE}.cache_unfinished_req",
        _row_not_rewritten,
    ),
    _bug(
        "lock-left-behind",
        "slip",
        "a request that moves on keeps its old lock",
        f"{CACHE}.cache_unfinished_req",
        _lock_not_moved,
    ),
    _bug(
        "tail-not-freed",
        "sglang#11970",
        "a tail of one token is not freed at the end of a request",
        f"{CACHE}._free",
        _tail_lost,
    ),
    _bug(
        "lock-delta-of-path",
        "slip",
        "inc_lock_ref reports the whole path instead of what is newly protected",
        f"{CACHE}.inc_lock_ref",
        _delta_of_path,
    ),
    _bug(
        "grad-mode-left-off",
        "slip",
        "an eviction of several pages switches autograd off and not on again",
        f"{CACHE}.evict",
        _grad_left_off,
    ),
)
