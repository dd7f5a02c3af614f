"""A second implementation of the same interface, as naive as can be: sets and a dictionary.

The allocator is a set of free pages; the tree is a dictionary from page prefix to page. They share
no code with the reference and decide differently wherever the contract leaves a choice: the highest
free page comes first, eviction goes page by page, and nothing is ever split. A suite that is silent
on both does not mistake the reference's habits for rules.

Left out: eviction policies other than least recently used, and speed.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Any, NamedTuple

import torch

from refcache.errors import ForeignNode, InvalidArgument, LockUnderflow
from refcache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from refcache.keys import RadixKey, hash_str_to_int64, page_hashes
from refcache.oracle.target.base import Target
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.naive_allocator import NaiveAllocator
from refcache.oracle.target.offload.naive import NaiveOffload
from refcache.oracle.target.sequences.naive import NaiveSequences
from refcache.oracle.view.tree import NodeView, TreeView
from refcache.types import (
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)


class Prefix(NamedTuple):
    """A handle: the elements of a prefix, in their namespace, in one tree. The root has none."""

    tree: int
    extra_key: str | None
    elements: tuple[Hashable, ...]


_TREES = count()


class NaiveTree:
    """A dictionary from each cached page's prefix to its page, and a count of locks a prefix."""

    def __init__(self, config: CacheConfig, allocator: Any, rows: Any) -> None:
        self.req_to_token_pool, self.token_to_kv_pool_allocator = rows, allocator
        self.page_size, self.is_eagle, self.disable = config.page_size, config.is_eagle, False
        self._id = next(_TREES)
        self.root_node = Prefix(self._id, None, ())
        self._emits = config.enable_kv_cache_events
        self._events: list[KVCacheEvent] = []
        self.reset()

    def reset(self) -> None:
        self.pages: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.locks: Counter[Prefix] = Counter()
        self._now = 0
        if self._emits:
            self._events.append(AllBlocksCleared())

    def prefixes(self, handle: Prefix) -> Iterable[Prefix]:
        """The pages of a prefix, from the root on."""
        size = self.page_size
        for end in range(size, len(handle.elements) + 1, size):
            yield handle._replace(elements=handle.elements[:end])

    def _whole(self, key: RadixKey) -> Prefix:
        elements = tuple(RadixKey(key.raw_token_ids(), key.extra_key, self.is_eagle))
        whole = len(elements) // self.page_size * self.page_size
        return Prefix(self._id, key.extra_key, elements[:whole])

    def _length(self, key: RadixKey) -> int:
        return len(RadixKey(key.raw_token_ids(), key.extra_key, self.is_eagle))

    def _slots(self, page: int) -> list[int]:
        return list(range(page * self.page_size, (page + 1) * self.page_size))

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        self._now += 1
        slots: list[int] = []
        last = self.root_node
        for prefix in self.prefixes(self._whole(params.key)):
            if prefix not in self.pages:
                break
            self.used[prefix] = self._now
            slots += self._slots(self.pages[prefix])
            last = prefix
        return MatchResult(torch.tensor(slots, dtype=torch.int64), last, last)

    def insert(self, params: InsertParams) -> InsertResult:
        handle, elements = self._whole(params.key), self._length(params.key)
        value = params.value
        if value is None or len(value) != elements or elements != len(handle.elements):
            raise InvalidArgument(f"insert of {elements} elements with value {value}")
        self._now += 1
        slots = value.tolist()
        known = 0
        for prefix in self.prefixes(handle):
            end = len(prefix.elements)
            page = slots[end - self.page_size] // self.page_size
            if prefix in self.pages:
                known = end
            elif page in self.pages.values():
                raise InvalidArgument(f"insert of page {page}, which holds another prefix")
            else:
                self.pages[prefix] = page
                self._emit(prefix, stored=True)
            self.used[prefix] = self._now
        return InsertResult(known)

    def evict(self, params: EvictParams) -> EvictResult:
        freed = 0
        while freed < params.num_tokens:
            parents = {self._parent(p) for p in self.pages}
            locked = self._locked()
            victims = [p for p in self.pages if p not in parents and p not in locked]
            if not victims:
                break
            victim = min(victims, key=lambda p: self.used[p])
            self.token_to_kv_pool_allocator.free(torch.tensor(self._slots(self.pages[victim])))
            self._emit(victim, stored=False)
            del self.pages[victim], self.used[victim]
            freed += self.page_size
        return EvictResult(freed)

    def _parent(self, prefix: Prefix) -> Prefix:
        return prefix._replace(elements=prefix.elements[: -self.page_size])

    def _locked(self) -> set[Prefix]:
        return {p for held in self.locks for p in self.prefixes(held)}

    def _check(self, handle: Prefix) -> None:
        if handle != self.root_node and handle not in self.pages:
            raise ForeignNode(f"{handle} is not cached")

    def inc_lock_ref(self, handle: Prefix) -> IncLockRefResult:
        self._check(handle)
        before = self.protected_size()
        if handle != self.root_node:
            self.locks[handle] += 1
        return IncLockRefResult(before - self.protected_size())

    def dec_lock_ref(self, handle: Prefix, params: Any = None) -> DecLockRefResult:
        self._check(handle)
        before = self.protected_size()
        if handle != self.root_node:
            if not self.locks[handle]:
                raise LockUnderflow(f"{handle} is not locked")
            self.locks[handle] -= 1
            self.locks += Counter()  # drops the zeros
        return DecLockRefResult(before - self.protected_size())

    def protected_size(self) -> int:
        return len(self._locked()) * self.page_size

    def evictable_size(self) -> int:
        return self.total_size() - self.protected_size()

    def total_size(self) -> int:
        return len(self.pages) * self.page_size

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        key, slots = self._of(req, len(req.fill_ids))
        known = self._insert_whole(key, slots)
        self.token_to_kv_pool_allocator.free(slots[req.cache_protected_len : known])
        found = self.match_prefix(MatchPrefixParams(key))
        ours, handle = found.device_indices, found.last_device_node
        start, end = req.cache_protected_len, len(ours)
        self.req_to_token_pool.write((req.req_pool_idx, slice(start, end)), ours[start:])
        self.dec_lock_ref(req.last_node)
        self.inc_lock_ref(handle)
        req.prefix_indices = torch.cat([ours, slots[end:]])
        req.cache_protected_len, req.last_node = end, handle

    def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
        key, slots = self._of(req, req.pop_committed_kv_cache())
        whole = len(self._whole(key).elements)
        known = self._insert_whole(key, slots) if is_insert else whole
        duplicates = slots[req.cache_protected_len : known]
        self.token_to_kv_pool_allocator.free(torch.cat([duplicates, slots[whole:]]))
        self.dec_lock_ref(req.last_node)

    def _insert_whole(self, key: RadixKey, slots: torch.Tensor) -> int:
        whole = len(self._whole(key).elements)
        tokens = key.raw_token_ids()[: whole + self.is_eagle]
        return self.insert(InsertParams(RadixKey(tokens, key.extra_key), slots[:whole])).prefix_len

    def _of(self, req: Any, length: int) -> tuple[RadixKey, torch.Tensor]:
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, :length]
        return RadixKey(tokens, req.extra_key), row.to(torch.int64)

    def _emit(self, prefix: Prefix, stored: bool) -> None:
        """The KV event of one page, with the hash of its whole prefix."""
        if not self._emits:
            return
        keys = RadixKey(prefix.elements, prefix.extra_key, self.is_eagle)  # type: ignore[arg-type]
        hashes = [hash_str_to_int64(text) for text in page_hashes(keys, self.page_size)]
        if not stored:
            self._events.append(BlockRemoved([hashes[-1]]))
            return
        tokens = list(prefix.elements[-self.page_size :])
        parent = hashes[-2] if len(hashes) > 1 else None
        self._events.append(BlockStored([hashes[-1]], parent, tokens, self.page_size))

    def take_events(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events


class NaiveTarget(Target):
    """Target ``naive``."""

    name = "naive"
    capabilities = frozenset(
        {
            "allocator",
            "tree",
            "inspect",
            "events",
            "minimal_evict",
            "refuses_misuse",
            "offload",
            "sequences",
        }
    )

    def allocator(self, config: CacheConfig) -> NaiveAllocator:
        return NaiveAllocator(config.size, config.page_size)

    def free_lists(self, allocator: NaiveAllocator) -> list[list[int]]:
        return allocator.lists()

    def tree(self, config: CacheConfig, allocator: Any, req_to_token_pool: Any) -> NaiveTree:
        return NaiveTree(config, allocator, req_to_token_pool)

    def offload(self, config: CacheConfig) -> NaiveOffload:
        return NaiveOffload(config)

    def sequences(self, config: CacheConfig) -> NaiveSequences:
        return NaiveSequences(config)

    def inspect(self, tree: NaiveTree) -> TreeView:
        """One node a page; its lock count is how many locked prefixes pass through it."""
        order = sorted(tree.pages, key=lambda p: len(p.elements))
        place = {prefix: index for index, prefix in enumerate(order)}
        below = Counter(
            p for h, n in tree.locks.items() for p in tree.prefixes(h) for _ in range(n)
        )
        parents = {tree._parent(p) for p in order}
        nodes = tuple(
            NodeView(
                handle=prefix,
                parent=place.get(tree._parent(prefix), -1),
                parent_agrees=True,
                filed_under=prefix,
                child_key=prefix,
                key=prefix.elements[-tree.page_size :],
                extra_key=prefix.extra_key,
                device=torch.tensor(tree._slots(tree.pages[prefix])),
                lock_ref=below[prefix],
                access=tree.used[prefix],
            )
            for prefix in order
        )
        leaves = {place[p] for p in order if p not in parents and not below[p]}
        return TreeView(
            nodes, tree.root_node, tree.evictable_size(), tree.protected_size(), frozenset(leaves)
        )
