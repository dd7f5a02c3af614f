"""Bugs planted in the radix tree: keys, matches, inserts, splits, events."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from refcache.keys import RadixKey
from refcache.planted.bug import PlantedBug
from refcache.types import (
    InsertResult,
    MatchPrefixParams,
)

TREE = "refcache.tree.radix_tree:RadixTree"
EVENTS = "refcache.tree.kv_events:EventLog"
Function = Callable[..., Any]
_bug = partial(PlantedBug, suite="tree.state")


def _split_counts(original: Function) -> Function:
    def _split_node(self: Any, halves: Any) -> Any:
        upper = original(self, halves)
        self.evictable_size_ += len(upper.key)
        return upper

    return _split_node


def _split_unlocked(original: Function) -> Function:
    def _split_node(self: Any, halves: Any) -> Any:
        upper = original(self, halves)
        upper.lock_ref = 0
        return upper

    return _split_node


def _split_locked_once(original: Function) -> Function:
    def _split_node(self: Any, halves: Any) -> Any:
        upper = original(self, halves)
        upper.lock_ref = min(upper.lock_ref, 1)
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
        key = RadixKey(params.key.raw_token_ids(), None, params.key.is_bigram)
        return original(self, MatchPrefixParams(key))

    return match_prefix


def _no_removal(original: Function) -> Function:
    def removed(self: Any, node: Any, *medium: str) -> None:
        if not node.hash_value or len(node.hash_value) < 2:
            original(self, node, *medium)

    return removed


def _hash_restarts(original: Function) -> Function:
    def _split_node(self: Any, halves: Any) -> Any:
        upper = original(self, halves)
        halves.child.hash_value = None if upper.hash_value is None else upper.hash_value[:1]
        return upper

    return _split_node


def _value_shared(original: Function) -> Function:
    def _new_leaf(self: Any, parent: Any, key: Any, value: Any, priority: int) -> Any:
        node = original(self, parent, key, value, priority)
        node.value = value
        return node

    return _new_leaf


def _prefix_len_in_nodes(original: Function) -> Function:
    def insert(self: Any, params: Any) -> InsertResult:
        known = original(self, params).prefix_len
        return InsertResult(min(known, max(0, len(params.key) - self.page_size)))

    return insert


def _parent_not_relisted(original: Function) -> Function:
    def _unlink(self: Any, node: Any) -> None:
        parent = node.parent
        original(self, node)
        if parent.lock_ref == 0 and len(parent.key) > self.page_size:
            self.evictable_leaves.discard(parent)

    return _unlink


def _owns_less(original: Function) -> Function:
    def match_prefix(self: Any, params: Any) -> Any:
        found = original(self, params)
        hit = len(found.device_indices)
        if hit <= self.page_size:
            return found
        return found._replace(cache_protected_len=hit - self.page_size)

    return match_prefix


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


def _other_tenants(original: Function) -> Function:
    def _match_prefix_helper(self: Any, node: Any, key: Any) -> Any:
        if key.extra_key is not None and key.child_key(self.page_size) not in node.children:
            for child in node.children.values():
                theirs = RadixKey(key.token_ids, child.key.extra_key, key.is_bigram)
                if child.key.extra_key is not None and child.key.match(theirs, self.page_size):
                    key = theirs
        return original(self, node, key)

    return _match_prefix_helper


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "bigram-key-not-converted",
        "sglang#19570, #17193",
        "EAGLE inserts under bigrams and looks up under tokens",
        f"{TREE}.match_prefix",
        _token_view,
    ),
    _bug(
        "match-ignores-namespace",
        "sglang#26747, #36382",
        "a lookup leaves the namespace out of the key",
        f"{TREE}.match_prefix",
        _no_namespace,
    ),
    _bug(
        "hash-ignores-namespace",
        "sglang#26747, #38577",
        "page hashes do not start from the namespace",
        "refcache.keys:namespace_seed",
        lambda original: lambda extra_key: b"",
    ),
    _bug(
        "split-counted-twice",
        "sglang#35270, mllm#656",
        "a split adds the upper half to evictable_size again",
        f"{TREE}._split_node",
        _split_counts,
    ),
    _bug(
        "remove-event-missing",
        "sglang#26387",
        "eviction of a node of several pages is not announced",
        f"{EVENTS}.removed",
        _no_removal,
    ),
    _bug(
        "hash-changes-at-split",
        "dynamo#14878, sglang#27072",
        "the lower half of a split gets the hashes of the upper one",
        f"{TREE}._split_node",
        _hash_restarts,
    ),
    _bug(
        "split-drops-lock",
        "slip",
        "the upper half of a split starts unlocked",
        f"{TREE}._split_node",
        _split_unlocked,
    ),
    _bug(
        "split-keeps-one-lock",
        "slip",
        "the upper half of a split is locked once, whatever the number of holders",
        f"{TREE}._split_node",
        _split_locked_once,
    ),
    _bug(
        "value-not-copied",
        "slip",
        "a node keeps a view of the tensor that was passed in",
        f"{TREE}._new_leaf",
        _value_shared,
    ),
    _bug(
        "insert-returns-less",
        "slip",
        "insert of a key that is cached whole does not count its last page",
        f"{TREE}.insert",
        _prefix_len_in_nodes,
    ),
    _bug(
        "parent-not-relisted",
        "slip",
        "a parent of several pages is not listed as a leaf when its last child goes",
        f"{TREE}._unlink",
        _parent_not_relisted,
    ),
    _bug(
        "match-owns-less",
        "slip",
        "a match says that the tree owns a page less of the slots than it does",
        f"{TREE}.match_prefix",
        _owns_less,
        suite="loop.state",
    ),
    _bug(
        "match-refreshes-nothing",
        "slip",
        "a match does not refresh the access time of its path",
        f"{TREE}._match_prefix_helper",
        _no_refresh,
        suite="tree.exact",
    ),
    _bug(
        "chunks-count-as-hits",
        "slip",
        "the chunks of one prompt count as hits of its own prefix",
        f"{TREE}._inc_hit_count",
        _chunks_counted,
        suite="tree.exact",
    ),
    _bug(
        "tenants-share",
        "slip",
        "a named namespace that has nothing cached finds what another named one has",
        f"{TREE}._match_prefix_helper",
        _other_tenants,
    ),
    _bug(
        "one-seed-for-names",
        "sglang#26747, #36382",
        "the page hashes of all named namespaces start from one seed",
        "refcache.keys:namespace_seed",
        lambda original: lambda extra_key: original(None if extra_key is None else "named"),
    ),
)
