"""``SWARadixCache``: the prefix tree of a model that mixes full and sliding-window layers.

A prefix is usable at a node's end if the window slots of its last ``sliding_window_size`` tokens
live, or all from the root. What lies further back may lose its window slots (a tombstone), and
keeps its KV of the full layers.

An insert says from where on the caller still has window slots (``swa_evicted_seqlen``: a running
request gives back those behind its window). It frees what it does not adopt; for each node that the
key passes, and that lies behind ``prev_prefix_len``::

    node        the caller's window slots        what happens
    live        any                              the caller's slots are freed
    tombstone   all there                        the node takes the caller's for its own
    tombstone   there from the middle on         it is cut there; the lower half takes them
    tombstone   gone                             the caller's slots are freed

The rest of the key becomes a live node, with a tombstone above it for what the caller gave back; if
nothing of the rest has window slots, it is not cached, since a leaf without them is of no use.

Models SGLang 0.5.10's ``SWARadixCache``. Stricter than that: a tombstone that somebody holds keeps
its slots, which the holder's row names; a rest without window slots is freed, and
``cache_unfinished_req`` says where they begin; a lock that finds no window, and an unlock with
another ``swa_uuid_for_lock``, are refused before anything changes; amounts evicted include what
leaves and tombstones took with them.
"""

from dataclasses import replace

import torch

from refcache.errors import InvalidArgument
from refcache.keys import RadixKey
from refcache.tree.components import HybridRadixCache, TreeComponent, WindowComponent, WindowPlan
from refcache.tree.insert_plan import Halves, InsertPlan
from refcache.tree.node import TreeNode
from refcache.types import (
    CacheInitParams,
    CacheReq,
    DecLockRefParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
)


class SWARadixCache(HybridRadixCache):
    """See the module docstring; attributes as in :class:`HybridRadixCache`.

    Raises:
        InvalidArgument: no ``sliding_window_size``, or one below 1; an allocator without window
            slots; as :class:`HybridRadixCache`.
    """

    def __init__(self, params: CacheInitParams) -> None:
        window = params.sliding_window_size
        if window is None or window < 1:
            raise InvalidArgument(f"sliding_window_size={window}: expected at least 1")
        if not hasattr(params.token_to_kv_pool_allocator, "free_swa"):
            kind = type(params.token_to_kv_pool_allocator).__name__
            raise InvalidArgument(f"allocator {kind}: expected a SWATokenToKVPoolAllocator")
        self.sliding_window_size = window
        super().__init__(params)

    def _new_components(self) -> tuple[TreeComponent, ...]:
        self.windows = WindowComponent(self.sliding_window_size, self.token_to_kv_pool_allocator)
        return (self.windows,)

    def supports_swa(self) -> bool:
        """Layers with a sliding window."""
        return True

    def swa_evictable_size(self) -> int:
        """Tokens whose window slots nobody holds."""
        return self.windows.evictable_size

    def swa_protected_size(self) -> int:
        """Tokens whose window slots somebody holds."""
        return self.windows.protected_size

    def total_size(self) -> tuple[int, int]:  # type: ignore[override]  # SGLang's answer
        """Tokens in the tree, and those of them with window slots."""
        full, swa = self._sizes()
        return full, swa

    # ---- insert ----------------------------------------------------------------------------------

    def insert(self, params: InsertParams) -> InsertResult:
        """Cache ``params.key``; see the module docstring for who owns the slots then.

        All slots of ``value`` behind ``prev_prefix_len`` are the tree's to keep or free.

        Returns:
            ``prefix_len``: how many tokens of the key were in the tree before.

        Raises:
            InvalidArgument: as :meth:`RadixTree.insert`; also a ``prev_prefix_len`` or
                ``swa_evicted_seqlen`` that is negative or not in whole pages.
        """
        if params.mamba_value is not None:
            raise InvalidArgument("insert of a mamba_value: expected None, it would be lost")
        if self.disable:
            return InsertResult(prefix_len=0)
        plan = self._plan_insert(params)
        self._free(plan.freed)
        return InsertResult(self._insert_helper(plan))

    def _plan_insert(self, params: InsertParams) -> WindowPlan:
        self._check_given(params)
        gone = params.swa_evicted_seqlen
        if gone < 0 or gone % self.page_size:
            raise InvalidArgument(
                f"insert with swa_evicted_seqlen={gone}: expected whole pages of {self.page_size}"
            )
        plan = super()._plan_insert(params)
        slots = plan.value
        path: list[TreeNode] = []
        own: list[torch.Tensor | None] = []
        freed: list[torch.Tensor] = [self._no_slots()]
        cut: Halves | None = None
        end = 0
        for node in plan.path:
            start, end = end, end + len(node.key)
            mine = min(max(start, params.prev_prefix_len), end)  # from here on the caller's
            adopted = end  # from here on the node takes them over
            if not self.windows.holds(node) and node.lock_ref == 0:
                adopted = min(max(mine, gone), end)
            taken = None
            if adopted < end:
                taken = slots[adopted:end].to(torch.int64, copy=True)
                if node.value is not None:
                    freed.append(node.value[adopted - start :])
                if adopted > start:
                    cut = self._halve(node, adopted - start)
            freed.append(slots[mine:adopted])
            if cut is not None and cut.child is node:
                path.append(cut.upper)
                own.append(None)
            path.append(node)
            own.append(taken)
        leaf, live = plan.leaf, None
        pieces = [
            (len(n.key), o is not None or self.windows.holds(n))
            for n, o in zip(path, own, strict=True)
        ]
        if leaf is not None and gone >= end + len(leaf.key):
            freed.append(slots[max(end, params.prev_prefix_len) :])
            leaf = None
            pieces.append((1, False))
        elif leaf is not None and gone > end:
            above, rest, priority = self._parent(leaf), leaf.key, plan.priority
            leaf = self._new_leaf(above, rest[: gone - end], slots[end:gone], priority)
            live = self._new_leaf(leaf, rest[gone - end :], slots[gone:], priority)
            pieces += [(len(leaf.key), False), (len(live.key), True)]
        elif leaf is not None:
            pieces.append((len(leaf.key), True))
        return WindowPlan(
            plan.params,
            plan.priority,
            plan.now,
            plan.halves,
            path,
            own,
            leaf,
            plan.value,
            cut=cut,
            live=live,
            freed=torch.cat(freed),
            usable=self.windows.covered(reversed(pieces)),
        )

    def _insert_helper(self, plan: InsertPlan) -> int:
        assert isinstance(plan, WindowPlan)
        half = None if plan.halves is None else plan.halves.upper
        adopted = {n: own for n, own in zip(plan.path, plan.own, strict=True) if own is not None}
        if plan.cut is not None and plan.cut.child is not half:
            self._split_node(plan.cut)
        for node, own in adopted.items():
            if node is not half:
                self._revive(node, own)
        known = super()._insert_helper(plan)
        if half is not None and half in adopted:
            if plan.cut is not None and plan.cut.child is half:
                self._split_node(plan.cut)
            self._revive(half, adopted[half])
        if plan.live is not None:
            self._add_child(plan.live, plan.params, known + len(plan.params.key))
        for new in (plan.leaf, plan.live):
            if new is not None:
                self._use([new])
        if plan.leaf is not None and plan.last is not None and plan.last.value is not None:
            self.windows.put(plan.last, plan.last.value)
        return known

    def _revive(self, node: TreeNode, slots: torch.Tensor) -> None:
        node.value = slots
        self.windows.put(node, slots)

    # ---- requests --------------------------------------------------------------------------------

    def cache_unfinished_req(self, req: CacheReq, chunked: bool = False) -> None:
        """As :meth:`RadixCache.cache_unfinished_req`, with ``req.swa_evicted_seqlen``.

        If the prefix is not usable at the end of the key (the request has given back window slots
        within a window of it), nothing is cached: the request goes on with its own row.
        """
        super().cache_unfinished_req(req, chunked)

    def _cache_row(self, req: CacheReq, slots: torch.Tensor, plan: InsertPlan) -> None:
        assert isinstance(plan, WindowPlan)
        if plan.usable:
            super()._cache_row(req, slots, plan)
        else:
            req.prefix_indices = slots

    def _row_params(
        self, req: CacheReq, key: RadixKey, value: torch.Tensor, chunked: bool
    ) -> InsertParams:
        params = super()._row_params(req, key, value, chunked)
        return replace(params, swa_evicted_seqlen=getattr(req, "swa_evicted_seqlen", 0))

    def _check_lock(self, req: CacheReq) -> None:
        self._to_unlock(req.last_node, _given(req))

    def _hold(self, req: CacheReq, node: TreeNode) -> IncLockRefResult:
        held = super()._hold(req, node)
        req.swa_uuid_for_lock = held.swa_uuid_for_lock  # type: ignore[attr-defined]
        return held

    def _let_go(self, req: CacheReq) -> None:
        self.dec_lock_ref(req.last_node, _given(req))

    def _evict_result(self, tokens: int, of_component: int) -> EvictResult:
        return EvictResult(tokens, swa_num_tokens_evicted=of_component)


def _given(req: CacheReq) -> DecLockRefParams:
    """What the lock of a request has returned."""
    return DecLockRefParams(getattr(req, "swa_uuid_for_lock", None))
