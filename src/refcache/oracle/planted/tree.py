"""Bugs planted in the radix tree."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from refcache.keys import RadixKey
from refcache.oracle.planted.bug import PlantedBug
from refcache.types import (
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertResult,
    MatchPrefixParams,
)

TREE = "refcache.tree.radix_tree:RadixTree"
CACHE = "refcache.tree.radix_cache:RadixCache"
EVENTS = "refcache.tree.kv_events:EventLog"
Function = Callable[..., Any]


def _abort_frees_all(original: Function) -> Function:
    def cache_finished_req(self: Any, req: Any, is_insert: bool = True) -> None:
        if not is_insert:
            req.cache_protected_len = 0
        original(self, req, is_insert)

    return cache_finished_req


def _parent_not_pushed(original: Function) -> Function:
    def evict(self: Any, params: EvictParams) -> EvictResult:
        evicted = 0
        for node in sorted(self.evictable_leaves, key=self.eviction_strategy):
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


def _split_counts(original: Function) -> Function:
    def _split_node(self: Any, child: Any, split_len: int) -> Any:
        upper = original(self, child, split_len)
        self.evictable_size_ += split_len
        return upper

    return _split_node


def _split_unlocked(original: Function) -> Function:
    def _split_node(self: Any, child: Any, split_len: int) -> Any:
        upper = original(self, child, split_len)
        upper.lock_ref = 0
        return upper

    return _split_node


def _token_view(original: Function) -> Function:
    def match_prefix(self: Any, params: MatchPrefixParams) -> Any:
        eagle, self.is_eagle = self.is_eagle, False
        try:
            return original(self, params)
        finally:
            self.is_eagle = eagle

    return match_prefix


def _no_namespace(original: Function) -> Function:
    def match_prefix(self: Any, params: MatchPrefixParams) -> Any:
        key = RadixKey(params.key.token_ids, None, params.key.is_bigram)
        return original(self, MatchPrefixParams(key))

    return match_prefix


def _prefix_not_advanced(original: Function) -> Function:
    def cache_unfinished_req(self: Any, req: Any, chunked: bool = False) -> None:
        before = req.prefix_indices
        original(self, req, chunked)
        if chunked:
            req.prefix_indices = before

    return cache_unfinished_req


def _no_removal(original: Function) -> Function:
    def removed(self: Any, node: Any, *medium: str) -> None:
        if not node.hash_value or len(node.hash_value) < 2:
            original(self, node, *medium)

    return removed


def _hash_restarts(original: Function) -> Function:
    def _split_node(self: Any, child: Any, split_len: int) -> Any:
        upper = original(self, child, split_len)
        child.hash_value = None if upper.hash_value is None else upper.hash_value[:1]
        return upper

    return _split_node


def _value_shared(original: Function) -> Function:
    def _add_child(self: Any, parent: Any, key: Any, value: Any, *rest: Any) -> Any:
        node = original(self, parent, key, value, *rest)
        node.value = value
        return node

    return _add_child


def _prefix_len_in_nodes(original: Function) -> Function:
    def insert(self: Any, params: Any) -> InsertResult:
        known = original(self, params).prefix_len
        return InsertResult(min(known, max(0, len(params.key) - self.page_size)))

    return insert


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
    def _free(self: Any, slots: torch.Tensor) -> None:
        original(self, slots if self.page_size == 1 else slots[: len(slots) // 2 * 2])

    return _free


def _parent_not_relisted(original: Function) -> Function:
    def _unlink(self: Any, node: Any) -> None:
        parent = node.parent
        original(self, node)
        if parent.lock_ref == 0 and len(parent.key) > self.page_size:
            self.evictable_leaves.discard(parent)

    return _unlink


def _evicts_all(original: Function) -> Function:
    def evict(self: Any, params: EvictParams) -> Any:
        return original(self, EvictParams(params.num_tokens * max(1, len(self.evictable_leaves))))

    return evict


def _delta_of_path(original: Function) -> Function:
    def inc_lock_ref(self: Any, node: Any) -> IncLockRefResult:
        original(self, node)
        return IncLockRefResult(-sum(len(step.key) for step in self._path(node)))

    return inc_lock_ref


def _no_refresh(original: Function) -> Function:
    def _match_prefix_helper(self: Any, node: Any, key: Any) -> Any:
        before = {n: n.last_access_time for n in self.nodes()}
        found = original(self, node, key)
        for known, time in before.items():
            known.last_access_time = time
        return found

    return _match_prefix_helper


def _chunks_counted(original: Function) -> Function:
    def _inc_hit_count(self: Any, node: Any, params: Any, done: int) -> None:
        original(self, node, replace(params, chunked=False), done)

    return _inc_hit_count


BUGS = (
    PlantedBug(
        "abort-frees-cached-chunks",
        "sglang#38319, #38355",
        "an abort between chunks frees the pages that the tree took over",
        f"{CACHE}.cache_finished_req",
        _abort_frees_all,
        "tree.state",
    ),
    PlantedBug(
        "evict-parent-not-pushed",
        "sglang#5499",
        "a parent that became a leaf during an eviction is not considered",
        f"{CACHE}.evict",
        _parent_not_pushed,
        "tree.state",
    ),
    PlantedBug(
        "evict-too-much",
        "sglang#4987, #4989",
        "an eviction asks each leaf for the whole amount, and does not stop when enough is free",
        f"{CACHE}.evict",
        _evicts_all,
        "tree.state",
    ),
    PlantedBug(
        "chunk-progress-lost",
        "sglang#36855, #37024, #33996",
        "prefix_indices does not advance after a chunk",
        f"{CACHE}.cache_unfinished_req",
        _prefix_not_advanced,
        "tree.state",
    ),
    PlantedBug(
        "bigram-key-not-converted",
        "sglang#19570, #17193",
        "EAGLE inserts under bigrams and looks up under tokens",
        f"{TREE}.match_prefix",
        _token_view,
        "tree.state",
    ),
    PlantedBug(
        "match-ignores-namespace",
        "sglang#26747, #36382",
        "a lookup leaves the namespace out of the key",
        f"{TREE}.match_prefix",
        _no_namespace,
        "tree.state",
    ),
    PlantedBug(
        "hash-ignores-namespace",
        "sglang#26747, #38577",
        "page hashes do not start from the namespace",
        "refcache.keys:namespace_seed",
        lambda original: lambda extra_key: b"",
        "tree.state",
    ),
    PlantedBug(
        "split-counted-twice",
        "sglang#35270, mllm#656",
        "a split adds the upper half to evictable_size again",
        f"{TREE}._split_node",
        _split_counts,
        "tree.state",
    ),
    PlantedBug(
        "lock-skips-node",
        "mini-sglang#52, #44",
        "inc_lock_ref moves to the parent before it touches the node",
        f"{CACHE}.inc_lock_ref",
        _leaf_skipped,
        "tree.state",
    ),
    PlantedBug(
        "remove-event-missing",
        "sglang#26387",
        "eviction of a node of several pages is not announced",
        f"{EVENTS}.removed",
        _no_removal,
        "tree.state",
    ),
    PlantedBug(
        "hash-changes-at-split",
        "dynamo#14878, sglang#27072",
        "the lower half of a split gets the hashes of the upper one",
        f"{TREE}._split_node",
        _hash_restarts,
        "tree.state",
    ),
    PlantedBug(
        "split-drops-lock",
        "slip",
        "the upper half of a split starts unlocked",
        f"{TREE}._split_node",
        _split_unlocked,
        "tree.state",
    ),
    PlantedBug(
        "value-not-copied",
        "slip",
        "a node keeps a view of the tensor that was passed in",
        f"{TREE}._add_child",
        _value_shared,
        "tree.state",
    ),
    PlantedBug(
        "insert-returns-less",
        "slip",
        "insert of a key that is cached whole does not count its last page",
        f"{TREE}.insert",
        _prefix_len_in_nodes,
        "tree.state",
    ),
    PlantedBug(
        "row-keeps-duplicates",
        "slip",
        "a request's row is not pointed at the tree's slots after its own were freed",
        f"{CACHE}.cache_unfinished_req",
        _row_not_rewritten,
        "tree.state",
    ),
    PlantedBug(
        "lock-left-behind",
        "slip",
        "a request that moves on keeps its old lock",
        f"{CACHE}.cache_unfinished_req",
        _lock_not_moved,
        "tree.state",
    ),
    PlantedBug(
        "tail-not-freed",
        "sglang#11970",
        "a tail of one token is not freed at the end of a request",
        f"{CACHE}._free",
        _tail_lost,
        "tree.state",
    ),
    PlantedBug(
        "parent-not-relisted",
        "slip",
        "a parent of several pages is not listed as a leaf when its last child goes",
        f"{TREE}._unlink",
        _parent_not_relisted,
        "tree.state",
    ),
    PlantedBug(
        "lock-delta-of-path",
        "slip",
        "inc_lock_ref reports the whole path instead of what is newly protected",
        f"{CACHE}.inc_lock_ref",
        _delta_of_path,
        "tree.state",
    ),
    PlantedBug(
        "match-refreshes-nothing",
        "slip",
        "a match does not refresh the access time of its path",
        f"{TREE}._match_prefix_helper",
        _no_refresh,
        "tree.exact",
    ),
    PlantedBug(
        "chunks-count-as-hits",
        "slip",
        "the chunks of one prompt count as hits of its own prefix",
        f"{TREE}._inc_hit_count",
        _chunks_counted,
        "tree.exact",
    ),
)
