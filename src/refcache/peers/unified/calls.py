"""The calls of the suites, which are those of 0.5.10, on the classes of SGLang 0.5.23.

Each function wraps one of the release's classes; what a class decides stays its own.
"""

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch


def insert_params(base: type) -> Any:
    """A bare insert frees no duplicates: its caller does."""

    def make(key: Any, value: Any, chunked: bool = False, priority: int = 0) -> Any:
        return base(key=key, value=value, prev_prefix_len=len(value), priority=priority)

    return make


def load_back_params(last_host_node: Any, host_hit_length: int, mem_quota: int | None) -> Any:
    """A load as the suites ask for it; :func:`translated` makes the release's of it."""
    return SimpleNamespace(node=last_host_node, hit=host_hit_length, quota=mem_quota)


def with_records(base: type, record: type) -> type:
    """Request rows that give each request its record of KV."""

    class Rows(base):  # type: ignore[misc]
        def alloc(self, reqs: list[Any]) -> Any:
            for req in reqs:
                req.kv = record()
            rows = super().alloc(reqs)
            for req in reqs:
                req.req_pool_idx = req.kv.req_pool_idx
            return rows

        def free(self, req: Any) -> None:
            """Again for a request whose row the release has taken back already: nothing."""
            if req.kv.holds_kv:
                super().free(req)

    return Rows


def with_segments(base: type) -> type:
    """The release's allocator: its ``free`` makes the segment free that :class:`Segments` asks."""

    class Allocator(base):  # type: ignore[misc]
        segment: int | None = None

        def free(self, free_index: torch.Tensor) -> None:
            start, self.segment = self.segment, None
            if start is None:
                super().free(free_index)
            else:
                super().free_segment(free_index, start_pos=start)

    Allocator.__qualname__ = Allocator.__name__ = base.__name__
    return Allocator


class Segments:
    """The allocator as the tree has it: frees of row segments go through ``free``, where the
    suites watch what is freed."""

    def __init__(self, watched: Any) -> None:
        self.watched = watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self.watched, name)

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        self.watched.inner.segment = start_pos
        self.watched.free(free_index)
        self.watched.inner.segment = None

    def free_segments(self, segments: Any) -> None:
        for free_index, start_pos in self.watched.inner._page_disjoint(segments):
            self.free_segment(free_index, start_pos=start_pos)


class PeerReq:
    """A request as this release's tree sees it, over a request of the suites."""

    session = session_id = cache_salt = kv_rotation_base = finished_len = None
    skip_radix_cache_insert = False
    swa_host_hit_length = mamba_host_hit_length = 0

    def __init__(self, req: Any, lock: Any, finished: bool, length: int) -> None:
        self.req, self.lock, self._finished = req, lock, finished
        self.kv, self.last_node = req.kv, req.last_node
        self.rid, self.extra_key, self.priority = req.rid, req.extra_key, req.priority
        self.origin_input_ids = array("q", req.origin_input_ids)
        self.full_untruncated_fill_ids = array("q", req.tokens[:length])
        self.kv.cache_protected_len = req.cache_protected_len
        self.kv.kv_committed_len = self.kv.kv_allocated_len = length

    def finished(self) -> bool:
        return self._finished

    def owned_kv_len(self) -> int:
        return len(self.full_untruncated_fill_ids)

    def refresh_fill_ids(self) -> None:
        """They are never behind here."""


def translated(base: type, params: Any, release: Any, record: type) -> type:
    """The release's tree with the calls of the suites, which are those of 0.5.10."""

    class Tree(base):  # type: ignore[misc]
        _loading = False

        def match_prefix(self, match: Any) -> Any:
            match.key.is_bigram = self.tree_core.is_eagle
            found = super().match_prefix(match)
            self._last_match = found
            return SimpleNamespace(
                device_indices=self.path_device_indices(found.last_device_node),
                last_device_node=found.last_device_node,
                last_host_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
            )

        def insert(self, insert: Any) -> Any:
            """``prefix_len`` counts what was on the device, as in 0.5.10: here the release counts
            nodes that were on the host only too, and takes their new slots all the same."""
            insert.key.is_bigram = self.tree_core.is_eagle
            on_device = self.tree_core.match_full_device_prefix(insert.key)[0]
            result = super().insert(insert)
            return replace(result, prefix_len=min(result.prefix_len, on_device))

        def inc_lock_ref(self, node: Any, *skipped: Any) -> Any:
            """Outside, ``delta`` is by how much the evictable tokens grew, as in 0.5.10; inside,
            how many tokens are newly locked, for the quota of a load."""
            result = super().inc_lock_ref(node, *skipped)
            return result if self._loading else replace(result, delta=-result.delta)

        def dec_lock_ref(self, node: Any, receipt: Any = None, skip_swa: bool = False) -> Any:
            """Without a receipt: that of a lock of this node (with one component, it says only
            which node)."""
            if receipt is None:
                receipt = params.DecLockRefParams(node_id=node)
            return super().dec_lock_ref(node, receipt, skip_swa)

        def _request(self, req: Any, finished: bool, length: int) -> PeerReq:
            receipt = params.DecLockRefParams(node_id=req.last_node)
            return PeerReq(req, params.TreeLock(req.last_node, receipt), finished, length)

        def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
            length = len(req.fill_ids)
            peer = self._request(req, False, length)
            self.checkpoint(peer, up_to=length)
            req.cache_protected_len, req.last_node = peer.kv.cache_protected_len, peer.last_node
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx, :length]
            req.prefix_indices = row.to(torch.int64)
            self.flush_pending_backups()

        def cache_finished_req(self, req: Any, is_insert: bool = True) -> None:
            peer = self._request(req, True, req.pop_committed_kv_cache())
            release(peer, self, checkpoint=is_insert)
            self.flush_pending_backups()

        def ready_to_load_host_cache(self) -> int:
            """What inserts have queued is submitted first: the release's scheduler does so at the
            end of each batch, before the next one's loads. A caller that finds no free slot for
            a load comes back when one is free, as the release's decoding does."""
            self.flush_pending_backups()
            controller = self.cache_controller
            while controller.load_queue and not self.has_free_load_back_slot():
                controller.ack_load_queue[0].finish_event.synchronize()
                self.check_hicache_events()
            return int(super().ready_to_load_host_cache())

        def init_load_back(self, load: Any) -> Any:
            last = self._last_match.last_device_node
            asked = params.InitLoadBackParams(
                best_match_node=load.node,
                host_hit_length=load.hit,
                mem_quota=load.quota,
                req=SimpleNamespace(
                    rid="",
                    kv=record(),
                    last_node=last,
                    swa_host_hit_length=0,
                    mamba_host_hit_length=0,
                ),
            )
            self._loading = True
            try:
                count, node = super().init_load_back(asked)
            finally:
                self._loading = False
            slots = self.path_device_indices(node)
            return slots[len(slots) - count :], node

        def total_size(self) -> int:
            return int(super().total_size()[0])

    Tree.__qualname__ = Tree.__name__ = base.__name__
    return Tree
