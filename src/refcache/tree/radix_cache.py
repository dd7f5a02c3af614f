"""``RadixCache``: which prefixes are on the device, shared between requests. One tier.

A radix tree over page-aligned keys. Requests lock the node they end at (and so the path to the
root); what is unlocked may be evicted, leaf by leaf, in the order of a strategy. Models SGLang
0.5.10's ``RadixCache``; left out: metrics, time to live.

Who owns the slots of a request's row (``ReqToTokenPool``)::

    0 .............. cache_protected_len ............... len(row)
    | owned by the tree, locked by the request | owned by the request |

``cache_unfinished_req`` moves the boundary; ``cache_finished_req`` gives every slot of the request
to the tree or back to the allocator, exactly once.
"""

import heapq
from contextlib import ExitStack
from typing import Any

import torch

from refcache.arguments import truth, whole_number, with_attributes
from refcache.errors import LockUnderflow
from refcache.keys import RadixKey
from refcache.tree.insert_plan import InsertPlan
from refcache.tree.node import TreeNode
from refcache.tree.radix_tree import RadixTree
from refcache.tree.strategies import eviction_strategy
from refcache.types import (
    CacheInitParams,
    CacheReq,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
)

REQUEST = (
    "req_pool_idx", "origin_input_ids", "output_ids", "fill_ids", "extra_key",
    "cache_protected_len", "last_node", "priority", "pop_committed_kv_cache",
)  # fmt: skip
"""What a request must have; the rest of :class:`~refcache.types.CacheReq` it may lack."""


class RadixCache(RadixTree):
    """See the module docstring; attributes as in :class:`RadixTree`.

    Raises:
        UnknownName: an eviction or hit policy that does not exist.
        InvalidArgument: page size below 1, or a time to live.
    """

    def __init__(self, params: CacheInitParams) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.disable_finished_insert = params.disable_finished_insert
        self.eviction_policy = params.eviction_policy.lower()
        self.eviction_strategy = eviction_strategy(params.eviction_policy)
        super().__init__(params)

    @classmethod
    def create_simulated(
        cls,
        disable: bool = False,
        mock_allocator: Any = None,
        page_size: int = 1,
        enable_kv_cache_events: bool = False,
    ) -> "RadixCache":
        """A tree without a request pool; without an allocator it cannot evict.

        >>> cache = RadixCache.create_simulated(page_size=2)
        >>> cache.insert(InsertParams(RadixKey([1, 2, 3, 4]), torch.tensor([2, 3, 6, 7])))
        InsertResult(prefix_len=0, mamba_exist=False)
        >>> from refcache.types import MatchPrefixParams
        >>> cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 9, 9, 9]))).device_indices.tolist()
        [2, 3]
        >>> cache.pretty_print()
        root
          node 2: 2 tokens [1, 2], lock 0, hits 1, device [2, 3]
            node 1: 2 tokens [3, 4], lock 0, hits 1, device [6, 7]
        4 tokens
        """
        return cls(
            CacheInitParams(
                disable=disable,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=mock_allocator,
                page_size=page_size,
                enable_kv_cache_events=enable_kv_cache_events,
            )
        )

    # ---- evict and lock ------------------------------------------------------------------------

    def evict(self, params: EvictParams) -> EvictResult:
        """Free whole unlocked leaves until ``num_tokens`` are free, or no leaf is left.

        Returns how many tokens the allocator got. A call that raises has evicted whole leaves, or
        nothing.

        Raises:
            InvalidArgument: ``num_tokens`` that is no integer.
        """
        with_attributes("evict", params, "num_tokens")
        whole_number("num_tokens", params.num_tokens, None)
        heap = [self._heap_entry(node) for node in self.evictable_leaves]
        heapq.heapify(heap)
        evicted = 0
        while evicted < params.num_tokens and heap:
            node = heapq.heappop(heap)[2]
            freed, parent = self._evict_upwards(node)
            evicted += freed
            if parent in self.evictable_leaves:
                heapq.heappush(heap, self._heap_entry(parent))
        return EvictResult(num_tokens_evicted=evicted)

    def _evict_upwards(self, leaf: TreeNode) -> tuple[int, TreeNode | None]:
        """Evict a leaf; returns how many tokens, and the node above that may be a leaf now."""
        parent = leaf.parent
        return self._evict_leaf(leaf), parent

    def _evict_leaf(self, node: TreeNode) -> int:
        """Free a leaf's device slots and drop it; returns how many."""
        self.events.prepare([node])
        self.token_to_kv_pool_allocator.free(node.value)
        self.events.removed(node)
        self.evictable_size_ -= len(node.key)
        self._unlink(node)
        return len(node.key)

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Lock a node and its path to the root against eviction.

        Raises:
            ForeignNode: the node is not (or no longer) in this tree.
        """
        if self.disable:
            return IncLockRefResult()
        delta = 0
        for step in self._path(node):
            if step.lock_ref == 0:
                self.evictable_size_ -= len(step.key)
                self.protected_size_ += len(step.key)
                delta -= len(step.key)
            step.lock_ref += 1
            self._update_leaf_status(step)
        return IncLockRefResult(delta)

    def dec_lock_ref(
        self, node: TreeNode, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """Undo one ``inc_lock_ref`` of the same node.

        Raises:
            ForeignNode: the node is not (or no longer) in this tree.
            LockUnderflow: a node of the path is not locked.
        """
        if self.disable:
            return DecLockRefResult()
        path = self._locked_path(node)
        delta = 0
        for step in path:
            if step.lock_ref == 1:
                self.evictable_size_ += len(step.key)
                self.protected_size_ -= len(step.key)
                delta += len(step.key)
            step.lock_ref -= 1
            self._update_leaf_status(step)
        return DecLockRefResult(delta)

    def _locked_path(self, node: TreeNode) -> list[TreeNode]:
        path = self._path(node)
        if any(step.lock_ref < 1 for step in path):
            raise LockUnderflow(f"dec_lock_ref of {node}: it is not locked")
        return path

    # ---- requests ------------------------------------------------------------------------------

    def cache_unfinished_req(self, req: CacheReq, chunked: bool = False) -> None:
        """Cache the KV of ``req.fill_ids``; the request goes on from there.

        Inserts the whole pages, frees the request's duplicates of what was cached already, points
        its row at the tree's slots, and moves its lock. Sets ``prefix_indices``, ``last_node``,
        ``cache_protected_len``.
        """
        self._check_request(req)
        slots = self._row(req, len(req.fill_ids))
        if self.disable:
            req.prefix_indices = slots
            return
        key = self._cache_key(req, len(req.fill_ids))
        self._cache_row(req, slots, self._plan_row(req, key, slots, chunked))

    def _cache_row(self, req: CacheReq, slots: torch.Tensor, plan: InsertPlan) -> None:
        """Insert the first part of a row, which the request shares with the tree from then on."""
        kept, start = len(plan.params.key), req.cache_protected_len
        prefix_indices = torch.cat([*plan.slots(), slots[kept:]])
        cells = (req.req_pool_idx, slice(start, kept))
        own, duplicates = slots[start:kept], plan.given_up(slots, start)
        self._check_lock(req)
        with ExitStack() as undo:
            self.req_to_token_pool.write(cells, prefix_indices[start:kept])
            undo.callback(self.req_to_token_pool.write, cells, own)
            self._free(duplicates)
            undo.pop_all()
        self._insert_helper(plan)
        self._hold(req, plan.last or self.root_node)
        req.cache_protected_len = kept
        req.prefix_indices = prefix_indices
        if not plan.params.chunked:
            req.cache_counted_len = kept

    def cache_finished_req(self, req: CacheReq, is_insert: bool = True) -> None:
        """Give every slot with KV of a finished request to the tree, or back to the allocator.

        With ``is_insert`` the whole pages are cached; without (an abort, a retraction) they are
        freed, except what the tree owned before. Releases the request's lock. The row itself, and
        slots allocated beyond the committed KV, are the caller's to free.
        """
        self._check_request(req)
        truth("is_insert", is_insert)
        asked = getattr(req, "kv_committed_freed", True)  # who cannot tell is asked first
        committed = req.pop_committed_kv_cache() if asked else req.kv_committed_len
        slots = self._row(req, committed)
        if self.disable:
            self._free(slots)
            if not asked:
                req.pop_committed_kv_cache()
            return
        key, start = self._cache_key(req, committed), req.cache_protected_len
        plan = None
        given_up = slots[start : len(key)]
        if is_insert and not self.disable_finished_insert:
            plan = self._plan_row(req, key, slots, chunked=False)
            given_up = plan.given_up(slots, start)
        self._check_lock(req)
        tail = slots[max(len(key), start) :]
        self._free(given_up, tail)  # apart, as in SGLang: the tail's page is used next
        if not asked:
            req.pop_committed_kv_cache()
        if plan is not None:
            self._insert_helper(plan)
        self._let_go(req)

    def _check_request(self, req: CacheReq) -> None:
        with_attributes("a request", req, *REQUEST)
        whole_number("cache_protected_len", req.cache_protected_len)

    def _row(self, req: CacheReq, length: int) -> torch.Tensor:
        slots: torch.Tensor = self.req_to_token_pool.read(req.req_pool_idx, slice(0, length))
        return slots

    def _cache_key(self, req: CacheReq, length: int) -> RadixKey:
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        return RadixKey(tokens, req.extra_key, self.is_eagle).page_aligned(self.page_size)

    def _plan_row(
        self, req: CacheReq, key: RadixKey, slots: torch.Tensor, chunked: bool
    ) -> InsertPlan:
        return self._plan_insert(self._row_params(req, key, slots[: len(key)], chunked))

    def _row_params(
        self, req: CacheReq, key: RadixKey, value: torch.Tensor, chunked: bool
    ) -> InsertParams:
        return InsertParams(
            key=key,
            value=value,
            prev_prefix_len=req.cache_protected_len,
            chunked=chunked,
            priority=req.priority,
            counted_len=getattr(req, "cache_counted_len", 0),
        )

    def _check_lock(self, req: CacheReq) -> None:
        """Refuse a request that does not hold what it says."""
        self._locked_path(req.last_node)

    def _hold(self, req: CacheReq, node: TreeNode) -> IncLockRefResult:
        """The request holds ``node`` from now on, and what it held before no more."""
        held = self.inc_lock_ref(node)
        self._let_go(req)
        req.last_node = node
        return held

    def _let_go(self, req: CacheReq) -> None:
        self.dec_lock_ref(req.last_node)

    # ---- a host tier would answer these; one tier has nothing to do ------------------------------

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        """No host tier: nothing is loaded."""
        with_attributes("init_load_back", params, "last_host_node")
        return self._no_slots(), params.last_host_node

    def ready_to_load_host_cache(self) -> int:
        """No host tier: no load, so no consumer index."""
        return -1

    def check_hicache_events(self) -> None:
        """No host tier: no copies to acknowledge."""

    def flush_write_through_acks(self) -> None:
        """No host tier: no copies to acknowledge."""

    def _free(self, *lists: torch.Tensor) -> None:
        """Free one list after another: all of them, or (where that can be had) none.

        An allocator without ``free_each`` is asked list by list, and taken back to where it was if
        it refuses one of them; one without ``backup_state`` either keeps what it has taken.
        """
        allocator, given = self.token_to_kv_pool_allocator, [slots for slots in lists if len(slots)]
        if len(given) > 1 and hasattr(allocator, "free_each"):
            allocator.free_each(given)
            return
        with ExitStack() as undo:
            if len(given) > 1 and hasattr(allocator, "backup_state"):
                undo.callback(allocator.restore_state, allocator.backup_state())
            for slots in given:
                allocator.free(slots)
            undo.pop_all()

    def _heap_entry(self, node: TreeNode) -> tuple[Any, int, TreeNode]:
        return (self.eviction_strategy.get_priority(node), node.id, node)
