"""``HybridReqToTokenPool``: a row of token slots for each running request, and its states.

A request of a model with recurrent layers owns, beside its row,

* the *running* state ``mamba_pool_idx``, which every forward of it reads and writes;
* with ``enable_mamba_extra_buffer``, the *ping-pong* slots ``mamba_ping_pong_track_buffer``: a
  forward leaves a snapshot of the state at a tracked position in the slot
  ``mamba_next_track_idx``, while the other one may still be read (one slot without overlap).

The forward finds both by row: ``req_index_to_mamba_index_mapping`` and
``req_index_to_mamba_ping_pong_track_buffer_mapping`` have an entry a row.

Models SGLang's class of this name. Stricter than 0.5.10: there the mappings are as long as the pool
of states, states that run short are an assertion with rows and slots already taken, and a request
whose states were freed still points at its ping-pong slots.
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.errors import DoubleFree, InvalidArgument
from refcache.pool.kv_cache import LayerTransferCounter
from refcache.pool.mamba import BaseLinearStateParams, MambaPool
from refcache.pool.req_to_token import ReqToTokenPool
from refcache.runtime import Region, Runtime


class HybridReqToTokenPool(ReqToTokenPool):
    """See the module docstring.

    Args:
        size, max_context_len: rows, and tokens of a row.
        mamba_size: states that can be handed out.
        cache_params, mamba_layer_ids: see :class:`~refcache.pool.mamba.MambaPool`; the ids are the
            model's, of the layers held here.
        enable_overlap_schedule: ping-pong slots are two, else one.
        start_layer: the model's first layer held here; a wait for a layer counts from it.

    Attributes:
        mamba_pool: the states.
        mamba_map: the model's layer id -> its index in ``mamba_pool``.
        req_index_to_mamba_index_mapping: int32 ``[size]``, the running state of each row.
        req_index_to_mamba_ping_pong_track_buffer_mapping: int32 ``[size, 1 or 2]``, with
            ``enable_mamba_extra_buffer`` only.

    Raises:
        InvalidArgument: an extent below 1, or layers that are not in ascending order.
    """

    def __init__(
        self,
        *,
        size: int,
        mamba_size: int,
        mamba_spec_state_size: int,
        max_context_len: int,
        device: str,
        enable_memory_saver: bool,
        cache_params: BaseLinearStateParams,
        mamba_layer_ids: Sequence[int],
        enable_mamba_extra_buffer: bool,
        speculative_num_draft_tokens: int | None = None,
        enable_overlap_schedule: bool = True,
        start_layer: int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        ids = list(mamba_layer_ids)
        self.start_layer = start_layer or 0
        if ids != sorted(set(ids)) or (ids and ids[0] < self.start_layer):
            raise InvalidArgument(
                f"mamba_layer_ids={ids}: expected ascending ids from {self.start_layer} on"
            )
        self.mamba_pool = MambaPool(
            size=mamba_size,
            spec_state_size=mamba_spec_state_size,
            cache_params=cache_params,
            mamba_layer_ids=ids,
            device=device,
            enable_memory_saver=enable_memory_saver,
            speculative_num_draft_tokens=speculative_num_draft_tokens,
            runtime=runtime,
        )
        self.mamba_map = {layer_id: i for i, layer_id in enumerate(ids)}
        self.enable_mamba_extra_buffer = enable_mamba_extra_buffer
        self.mamba_ping_pong_track_buffer_size = 2 if enable_overlap_schedule else 1
        self.layer_transfer_counter: LayerTransferCounter | None = None
        self.req_index_to_mamba_index_mapping = torch.zeros(size, dtype=torch.int32, device=device)
        if enable_mamba_extra_buffer:
            self.req_index_to_mamba_ping_pong_track_buffer_mapping = torch.zeros(
                (size, self.mamba_ping_pong_track_buffer_size), dtype=torch.int32, device=device
            )
        super().__init__(size, max_context_len, device, enable_memory_saver, runtime)

    def register_layer_transfer_counter(
        self, layer_transfer_counter: LayerTransferCounter | None
    ) -> None:
        """From now on :meth:`mamba2_layer_cache` waits on it for its layer."""
        self.layer_transfer_counter = layer_transfer_counter

    def clear(self) -> None:
        """Make every row and every state free."""
        super().clear()
        self.mamba_pool.clear()
        self.req_index_to_mamba_index_mapping.zero_()
        if self.enable_mamba_extra_buffer:
            self.req_index_to_mamba_ping_pong_track_buffer_mapping.zero_()

    def states_short_of(self, reqs: Sequence[Any]) -> int:
        """How many states :meth:`alloc` of these requests would take."""
        running = sum(req.mamba_pool_idx is None for req in reqs)
        if not self.enable_mamba_extra_buffer:
            return running
        tracked = sum(req.mamba_ping_pong_track_buffer is None for req in reqs)
        return running + tracked * self.mamba_ping_pong_track_buffer_size

    def alloc(self, reqs: Sequence[Any]) -> list[int] | None:
        """A row for each request as in the base class, and the states that it does not have yet.

        A request that has a running state (a match copied one for it, or it is a chunk) keeps it.
        Sets ``req.mamba_pool_idx`` (int64 scalar) and, with the extra buffer,
        ``req.mamba_ping_pong_track_buffer`` (int64 ``[1 or 2]``) and ``req.mamba_next_track_idx``.

        Returns:
            The row of each request, or None (and nothing changed) when too few rows or states are
            free.
        """
        if self.states_short_of(reqs) > self.mamba_pool.available_size():
            return None
        rows = super().alloc(reqs)
        if rows is None:
            return None
        new = self.mamba_pool.alloc(self.states_short_of(reqs))
        assert new is not None
        for req in reqs:
            if req.mamba_pool_idx is None:
                req.mamba_pool_idx, new = new[0], new[1:]
            if self.enable_mamba_extra_buffer and req.mamba_ping_pong_track_buffer is None:
                count = self.mamba_ping_pong_track_buffer_size
                req.mamba_ping_pong_track_buffer, new = new[:count], new[count:]
                req.mamba_next_track_idx = 0
        if reqs:
            self._map(self.req_index_to_mamba_index_mapping, rows, [r.mamba_pool_idx for r in reqs])
        if reqs and self.enable_mamba_extra_buffer:
            tracked = [req.mamba_ping_pong_track_buffer for req in reqs]
            self._map(self.req_index_to_mamba_ping_pong_track_buffer_mapping, rows, tracked)
        return rows

    def _map(self, mapping: torch.Tensor, rows: list[int], slots: list[torch.Tensor]) -> None:
        """Write the entries of some rows, as one launch on the current stream."""
        index, values = torch.tensor(rows, device=self.device), torch.stack(slots)

        def run() -> None:
            mapping[index] = values.to(torch.int32)

        self.runtime.launch("map states", run, writes=[Region(mapping, 0, 0, index)])

    def get_mamba_indices(self, req_indices: torch.Tensor) -> torch.Tensor:
        """The running states int32 ``[n]`` of these rows."""
        return self.req_index_to_mamba_index_mapping[req_indices]

    def mamba2_layer_cache(self, layer_id: int) -> MambaPool.State:
        """The states of a layer of the model, after waiting for the layer.

        Raises:
            InvalidArgument: no layer with a state, or not held here.
        """
        if layer_id not in self.mamba_map:
            raise InvalidArgument(f"layer {layer_id}: expected one of {list(self.mamba_map)}")
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)
        return self.mamba_pool.mamba2_layer_cache(self.mamba_map[layer_id])

    def get_speculative_mamba2_params_all_layers(self) -> MambaPool.SpeculativeState:
        """See :meth:`MambaPool.get_speculative_mamba2_params_all_layers`."""
        return self.mamba_pool.get_speculative_mamba2_params_all_layers()

    def get_mamba_ping_pong_other_idx(self, mamba_next_track_idx: int) -> int:
        """The ping-pong slot that is not written next: where the last snapshot is."""
        two = self.mamba_ping_pong_track_buffer_size == 2
        return 1 - mamba_next_track_idx if two else mamba_next_track_idx

    def free_mamba_cache(
        self, req: Any, mamba_ping_pong_track_buffer_to_keep: int | None = None
    ) -> None:
        """Give the states of a request back: the running one, then its ping-pong slots.

        ``mamba_ping_pong_track_buffer_to_keep``: this one has another owner now. The request has no
        states afterwards; its row stays.

        Raises:
            DoubleFree: it has no running state.
            InvalidArgument: to keep a slot that it does not have.
        """
        keep = mamba_ping_pong_track_buffer_to_keep
        if req.mamba_pool_idx is None:
            raise DoubleFree("free of a request's states: it has none of this pool")
        slots = [req.mamba_pool_idx.reshape(1)]
        tracked = req.mamba_ping_pong_track_buffer if self.enable_mamba_extra_buffer else None
        if keep is not None and (tracked is None or keep not in range(len(tracked))):
            count = 0 if tracked is None else len(tracked)
            raise InvalidArgument(f"keep ping-pong slot {keep}: the request has {count} of them")
        if tracked is not None:
            slots += [slot for i, slot in enumerate(tracked.split(1)) if i != keep]
        self.mamba_pool.free(torch.cat(slots))
        req.mamba_pool_idx = None
        if self.enable_mamba_extra_buffer:
            req.mamba_ping_pong_track_buffer, req.mamba_next_track_idx = None, None
