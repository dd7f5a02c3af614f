"""``MambaRadixCache``: the prefix tree of a model that mixes attention and recurrent layers.

A recurrent layer has one *state* after each token, of constant size, and only a few of them are
kept: a prefix is usable at a node's end if a state is there (:mod:`refcache.tree.components`). So a
match can be shorter than the KV that is cached; it says where a state would help
(``mamba_branching_seqlen``). A state is read and written by its owner's every forward, so it cannot
be shared: a match copies it for the request (``cow_mamba``), a request that goes on gives the tree
a copy of its own.

Where the states of a request come from, and when it has one to give, is its strategy:

=================  ======================================  ====================================
                   no buffer (page size 1)                 ``enable_mamba_extra_buffer``
=================  ======================================  ====================================
what is cached     all its tokens                          the first ``mamba_last_track_seqlen``
its state          the running one                         the ping-pong slot written last
not finished yet   the tree gets a copy                    the tree gets a copy
finished           the tree takes it                       the tree takes it
=================  ======================================  ====================================

Models SGLang 0.5.10's ``MambaRadixCache``. Stricter than that, where it asserts in the middle of a
change: without a state to be had, a match with ``cow_mamba`` is refused before it changes anything,
and ``cache_unfinished_req`` caches nothing; a request that waits has, after a match, the state of
what was matched or none; amounts evicted include what leaves took with them.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from refcache.arguments import INTEGERS
from refcache.errors import InvalidArgument, OutOfSlots
from refcache.keys import RadixKey
from refcache.tree.components import HybridRadixCache, StateComponent, TreeComponent
from refcache.tree.insert_plan import InsertPlan
from refcache.tree.node import TreeNode
from refcache.types import (
    CacheInitParams,
    CacheReq,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)

KERNEL_CHUNK_SIZE = 64  # tokens; linear-attention kernels have states at its multiples


class MambaRadixCache(HybridRadixCache):
    """See the module docstring; attributes as in :class:`HybridRadixCache`.

    Attributes:
        mamba_cache_chunk_size: prefills can leave a state at multiples of so many tokens.

    Raises:
        InvalidArgument: pages without ``enable_mamba_extra_buffer``; a chunk size below 1 or not in
            whole pages; as :class:`HybridRadixCache`.
    """

    def __init__(self, params: CacheInitParams) -> None:
        """``params.is_eagle`` is not read: keys are tokens, as in SGLang 0.5.10."""
        self.enable_mamba_extra_buffer = params.enable_mamba_extra_buffer
        if params.page_size != 1 and not self.enable_mamba_extra_buffer:
            raise InvalidArgument(
                f"page_size={params.page_size} without enable_mamba_extra_buffer: expected 1"
            )
        chunk = params.mamba_cache_chunk_size
        if chunk is None:
            chunk = max(KERNEL_CHUNK_SIZE, params.page_size)
        if chunk < 1 or chunk % params.page_size:
            raise InvalidArgument(
                f"mamba_cache_chunk_size={chunk}: expected whole pages of {params.page_size}"
            )
        self.mamba_cache_chunk_size = chunk
        super().__init__(replace(params, is_eagle=False))

    def _new_components(self) -> tuple[TreeComponent, ...]:
        self.states = StateComponent(getattr(self.req_to_token_pool, "mamba_pool", None))
        return (self.states,)

    def supports_mamba(self) -> bool:
        """Layers with a recurrent state."""
        return True

    def mamba_evictable_size(self) -> int:
        """States that nobody holds."""
        return self.states.evictable_size

    def mamba_protected_size(self) -> int:
        """States that somebody holds."""
        return self.states.protected_size

    def total_size(self) -> tuple[int, int]:  # type: ignore[override]  # SGLang's answer
        """Tokens in the tree, and states."""
        full, mamba = self._sizes()
        return full, mamba

    def all_mamba_values_flatten(self) -> torch.Tensor:
        """Every state slot the tree owns, int64."""
        values = [self.states.of(node).value for node in self.nodes()]
        owned = [value for value in values if value is not None]
        return torch.cat(owned) if owned else self._no_slots()

    def evict_full(self, full_num_tokens: int) -> int:
        """As :meth:`evict` of tokens; returns how many."""
        return self.evict(EvictParams(full_num_tokens)).num_tokens_evicted

    def evict_mamba(self, mamba_num: int) -> int:
        """As :meth:`evict` of states; returns how many."""
        return self.evict(EvictParams(0, mamba_num=mamba_num)).mamba_num_evicted

    def _evict_result(self, tokens: int, of_component: int) -> EvictResult:
        return EvictResult(tokens, mamba_num_evicted=of_component)

    # ---- match and insert ------------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix of ``params.key`` that ends at a state.

        With ``cow_mamba`` the state is copied for ``params.req``: into its slot
        ``mamba_pool_idx``, or a new one, for which another state may be evicted. When nothing was
        found, a request without a row gives back a slot that it has of an earlier match.

        Returns:
            As :class:`MatchResult`; ``mamba_branching_seqlen``: if more KV was found than is
            usable, its length in whole chunks (None if that is 0). A state there would let the next
            request like this start from it.

        Raises:
            InvalidArgument: ``cow_mamba`` without a request.
            OutOfSlots: no slot for the copy, and none to be had; nothing changed.
        """
        req: Any = params.req if params.cow_mamba else None
        if params.cow_mamba and req is None:
            raise InvalidArgument("match_prefix with cow_mamba: expected the request, req")
        key = params.key.page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return super().match_prefix(params)
        plan = self._plan_match(self.root_node, key)
        copied = req is not None and bool(plan.found)
        if copied and req.mamba_pool_idx is None and not self._to_be_had(plan.found[-1]):
            raise OutOfSlots(
                "match_prefix with cow_mamba: no state is free, and every other one is held; "
                "expected one to copy to"
            )
        slots, node = self._match(plan)
        if copied:
            self._copy_state(node, req)
        elif req is not None and req.mamba_pool_idx is not None and req.req_pool_idx is None:
            self.states.pool.free(req.mamba_pool_idx.reshape(1))
            req.mamba_pool_idx = None
        branching = None
        if len(plan.found) < len(plan.path):
            kv = sum(len(step.key) for step in plan.path)
            branching = kv // self.mamba_cache_chunk_size * self.mamba_cache_chunk_size or None
        return MatchResult(slots, node, node, mamba_branching_seqlen=branching)

    def _to_be_had(self, but: TreeNode | None = None) -> bool:
        """There is a free state, or one to evict, other than that of a node."""
        free: bool = self.states.pool.available_size() > 0
        return free or any(
            node is not but and self.states.of(node).lock_ref == 0 for node in self.states.lru
        )

    def _copy_state(self, node: TreeNode, req: Any) -> None:
        if req.mamba_pool_idx is None:
            if self.states.pool.available_size() < 1:
                self.inc_lock_ref(node)
                self.evict_mamba(1)
                self.dec_lock_ref(node)
            req.mamba_pool_idx = self.states.pool.alloc(1)[0]
        self.states.pool.copy_from(self.states.slot(node), req.mamba_pool_idx.reshape(1))

    def insert(self, params: InsertParams) -> InsertResult:
        """Cache ``params.key``, with the state after its last token.

        All slots of ``value`` behind ``prev_prefix_len`` are the tree's to keep or free.

        Args:
            params: ``mamba_value``: the state's slot, integers ``[1]``; the tree takes it over, or
                it stays the caller's (``mamba_exist``).

        Returns:
            ``prefix_len``: how many tokens of the key were in the tree before; ``mamba_exist``: a
            state was as well (or the key is empty).

        Raises:
            InvalidArgument: as :meth:`RadixTree.insert`; also no ``mamba_value``, one that the tree
                has at another node, or a ``prev_prefix_len`` that is negative or not in whole
                pages.
        """
        if self.disable:
            return InsertResult(prefix_len=0)
        self._check_given(params)
        plan = self._plan_insert(params)
        exist = self._has_state(plan)
        if not exist and int(self._state_of(params)) in self.states.owned:
            raise InvalidArgument(
                f"insert with mamba_value={params.mamba_value}: expected a state that no node of "
                "the tree has"
            )
        self._free(plan.given_up(plan.value, params.prev_prefix_len))
        return InsertResult(self._insert_helper(plan), exist)

    def _plan_insert(self, params: InsertParams) -> InsertPlan:
        self._state_of(params)
        return super()._plan_insert(params)

    def _state_of(self, params: InsertParams) -> torch.Tensor:
        """The slot that an insert brings."""
        state = params.mamba_value
        if state is None or state.shape != (1,) or state.dtype not in INTEGERS:
            given = None if state is None else f"{state.dtype} {tuple(state.shape)}"
            raise InvalidArgument(f"insert with mamba_value {given}: expected integers [1]")
        return state

    def _has_state(self, plan: InsertPlan) -> bool:
        """The end of the key has a state before the insert, or the key is empty."""
        return plan.leaf is None and (plan.last is None or self.states.holds(plan.last))

    def _insert_helper(self, plan: InsertPlan) -> int:
        exist = self._has_state(plan)
        known = super()._insert_helper(plan)
        if plan.last is not None:
            if not exist:
                state = self._state_of(plan.params)
                self.states.put(plan.last, state.to(torch.int64, copy=True))
            self._use([plan.last])
        return known

    # ---- requests --------------------------------------------------------------------------------

    def cache_unfinished_req(self, req: CacheReq, chunked: bool = False) -> None:
        """As :meth:`RadixCache.cache_unfinished_req`, with a copy of the request's state.

        Nothing is cached, and the request goes on with its own row, when it has no tracked state
        yet (extra buffer), or no state is to be had for the copy.

        Raises:
            InvalidArgument: a tracked length that is not in whole pages, or not within the row and
                behind what the tree owns of it.
        """
        slots = self._row(req, len(req.fill_ids))
        if self.disable or self._tracked(req, len(slots)) is None:
            req.prefix_indices = slots
            return
        key = self._cache_key(req, len(slots))
        if len(key) < req.cache_protected_len:
            raise InvalidArgument(
                f"mamba_last_track_seqlen={len(key)}: expected at least cache_protected_len="
                f"{req.cache_protected_len}"
            )
        plan = self._plan_row(req, key, slots, chunked)
        self._check_lock(req)
        if self.states.pool.available_size() < 1:
            self.evict_mamba(1)
            plan = self._plan_row(req, key, slots, chunked)
        source = plan.params.mamba_value
        with ExitStack() as undo:
            fork = self.states.pool.fork_from(source)
            if fork is None:
                req.prefix_indices = slots
                return
            undo.callback(self.states.pool.free, fork)
            plan.params = replace(plan.params, mamba_value=fork)
            exist = self._has_state(plan)
            self._cache_row(req, slots, plan)
            if not exist:
                undo.pop_all()
        req.mamba_last_track_seqlen = None  # type: ignore[attr-defined]

    def cache_finished_req(self, req: CacheReq, is_insert: bool = True) -> None:
        """As :meth:`RadixCache.cache_finished_req`; the request has no states afterwards.

        Raises:
            InvalidArgument: it has no running state; as :meth:`cache_unfinished_req`.
        """
        own = self._running(req)
        if self.enable_mamba_extra_buffer and not self.disable:
            own = self._snapshot(req)
        super().cache_finished_req(req, is_insert)
        taken = int(own) in self.states.owned
        rows: Any = self.req_to_token_pool
        if taken and not self.enable_mamba_extra_buffer:
            req.mamba_pool_idx = None  # type: ignore[attr-defined]
        else:
            rows.free_mamba_cache(req, self._last_written(req) if taken else None)

    def _cache_key(self, req: CacheReq, length: int) -> RadixKey:
        return super()._cache_key(req, self._tracked(req, length) or 0)

    def _row_params(
        self, req: CacheReq, key: RadixKey, value: torch.Tensor, chunked: bool
    ) -> InsertParams:
        params = super()._row_params(req, key, value, chunked)
        state = self._snapshot(req) if self.enable_mamba_extra_buffer else self._running(req)
        return replace(params, mamba_value=state)

    def _tracked(self, req: Any, length: int) -> int | None:
        """Of ``length`` tokens of a request, how many the state is of that it has to give."""
        if not self.enable_mamba_extra_buffer:
            return length
        tracked: int | None = req.mamba_last_track_seqlen
        if tracked is not None and (tracked % self.page_size or not 0 <= tracked <= length):
            raise InvalidArgument(
                f"mamba_last_track_seqlen={tracked}: expected whole pages of {self.page_size}, at "
                f"most {length}"
            )
        return tracked

    def _running(self, req: Any) -> torch.Tensor:
        """The slot ``[1]`` of the state that the request's forwards update."""
        if req.mamba_pool_idx is None:
            raise InvalidArgument("mamba_pool_idx=None: expected a request with a running state")
        slot: torch.Tensor = req.mamba_pool_idx.reshape(1)
        return slot

    def _snapshot(self, req: Any) -> torch.Tensor:
        """The slot ``[1]`` of the state at ``mamba_last_track_seqlen``."""
        if req.mamba_ping_pong_track_buffer is None:
            raise InvalidArgument("mamba_ping_pong_track_buffer=None: expected its slots")
        slot: torch.Tensor = req.mamba_ping_pong_track_buffer[self._last_written(req)].reshape(1)
        return slot

    def _last_written(self, req: Any) -> int | None:
        """Which ping-pong slot is not written next; None without them."""
        if not self.enable_mamba_extra_buffer:
            return None
        rows: Any = self.req_to_token_pool
        index: int = rows.get_mamba_ping_pong_other_idx(req.mamba_next_track_idx)
        return index
