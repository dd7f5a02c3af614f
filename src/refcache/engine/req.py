"""``Req``: one request on its way through the scheduler, and why it ended.

The tokens of a request, and who owns the device slots of its row ``req_pool_idx``::

    origin_input_ids + output_ids
    |---------------------------- fill_ids --------------------------|
    |---- prefix_indices (no computing) ----|--- extend_input_len ---|
    |-- cache_protected_len: the tree's --|---- this request's own --|
    |------------------ kv_committed_len: KV exists or is in flight -|

``prefix_indices`` and the protected part differ when a chunk ended inside a page: that page's head
is computed, but only whole pages go to the tree.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from refcache.engine.io_struct import REFUSED_REQUEST, SamplingParams
from refcache.errors import DoubleFree, InvalidArgument, refuse_unmodelled
from refcache.keys import TOKEN, RadixKey, compose_extra_key, token_array
from refcache.types import MatchPrefixParams

EMPTY = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class BaseFinishReason:
    """Why a request ended; ``to_json``: the same for a client."""

    is_error: ClassVar[bool] = False

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class FINISH_LENGTH(BaseFinishReason):  # noqa: N801
    """It has as many outputs as it may have."""

    length: int

    def to_json(self) -> dict[str, Any]:
        return {"type": "length", "length": self.length}


@dataclass(frozen=True)
class FINISH_MATCHED_TOKEN(BaseFinishReason):  # noqa: N801
    """An output was one of its stop tokens."""

    matched: int

    def to_json(self) -> dict[str, Any]:
        return {"type": "stop", "matched": self.matched}


@dataclass(frozen=True)
class FINISH_ABORT(BaseFinishReason):  # noqa: N801
    """It was aborted or refused; without a ``message`` it says "Aborted"."""

    is_error: ClassVar[bool] = True
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", self.message or "Aborted")

    def to_json(self) -> dict[str, Any]:
        return {"type": "abort", **vars(self)}


@dataclass
class ReqTimeStats:
    """``wait_queue_entry_time``: when it came into the queue, in steps of the loop."""

    wait_queue_entry_time: float = 0.0


REFUSED = REFUSED_REQUEST | {
    "dllm_config": None, "origin_input_ids_unpadded": None, "session": None, "disagg_mode": None,
    "disagg_prefill_dp_rank": None, "routed_dp_rank": None, "metrics_collector": None,
    "dimensions": None,
}  # fmt: skip


class Req:
    """See the module docstring. Implements :class:`refcache.types.CacheReq`.

    Args:
        rid: its name.
        origin_input_text: kept; text is not modelled.
        origin_input_ids: the prompt.
        sampling_params: when it stops.
        extra_key: its namespace; ``lora_id`` is a part of it.
        priority: for the schedule and the eviction policy.
        routing_key: for the schedule policy of that name.
        eos_token_ids: stop tokens of the model, besides those of ``sampling_params``.
        stream, vocab_size, http_worker_ipc: kept; nothing here reads them.
        unmodelled: an argument of :data:`REFUSED`, with its neutral value.

    Attributes:
        mamba_pool_idx, mamba_ping_pong_track_buffer, mamba_next_track_idx: its states, see
            :class:`~refcache.pool.HybridReqToTokenPool`; ``mamba_last_track_seqlen``: the tokens
            that its newest snapshot is of, if the tree does not have that one yet.
        swa_evicted_seqlen: so many of its first tokens have no window slots of its own any more;
            ``swa_uuid_for_lock``: what its lock returned.
        decode_batch_idx: decode steps so far; ``extend_start``: where its last prefill began.
        time_stats: when it came into the queue.
        storage_hit_length: tokens that storage brought to the host for it.
        cached_tokens: prompt tokens that the cache had at the first admission (None before).
        is_chunked: chunks launched, but not the last one, whose result is not processed yet.
        load_failed: the load of its host hit could not be started, so it is computed.
        retraction_count: how often it lost its memory and went back to the queue.
        to_finish: set from outside (an abort); becomes ``finished_reason`` at the next result.
    """

    cached_tokens: int | None = None

    def __init__(
        self,
        rid: str,
        origin_input_text: str | None,
        origin_input_ids: Sequence[int],
        sampling_params: SamplingParams,
        *,
        stream: bool = False,
        lora_id: str | None = None,
        eos_token_ids: Iterable[int] | None = None,
        vocab_size: int | None = None,
        priority: int | None = None,
        extra_key: str | None = None,
        routing_key: str | None = None,
        http_worker_ipc: str | None = None,
        time_stats: ReqTimeStats | None = None,
        **unmodelled: Any,
    ) -> None:
        for name in unmodelled.keys() - REFUSED.keys():
            raise InvalidArgument(f"{name}={unmodelled[name]!r} of Req: expected no such argument")
        refuse_unmodelled(f"request {rid!r}", unmodelled, REFUSED)
        self.rid = rid
        self.origin_input_text = origin_input_text
        self.origin_input_ids = token_array(origin_input_ids)
        self.sampling_params = sampling_params
        stops = frozenset(eos_token_ids or ()) | frozenset(sampling_params.stop_token_ids or ())
        self.eos_token_ids = eos_token_ids
        self.stop_token_ids = frozenset() if sampling_params.ignore_eos else stops
        self.extra_key = extra_key if lora_id is None else compose_extra_key(lora_id, extra_key)
        self.lora_id = lora_id
        self.routing_key = routing_key
        self.priority = priority
        self.stream = stream
        self.vocab_size = vocab_size
        self.http_worker_ipc = http_worker_ipc
        self.time_stats = time_stats or ReqTimeStats()
        self.output_ids: array[int] = array(TOKEN)
        self.retraction_count = -1
        self.finished_reason: BaseFinishReason | None = None
        self.to_finish: BaseFinishReason | None = None
        self.req_pool_idx: int | None = None
        self.reset_for_retract()
        self.is_retracted = False

    def reset_for_retract(self) -> None:
        """Forget everything about the KV, which the caller has released."""
        self.retraction_count += 1
        self.is_retracted = True
        self.is_chunked = 0
        self.fill_ids: array[int] = array(TOKEN)
        self.prefix_indices = EMPTY
        self.extend_input_len = 0
        self.last_node: Any = None
        self.last_host_node: Any = None
        self.host_hit_length = 0
        self.storage_hit_length = 0
        self.load_failed = False
        self.mamba_branching_seqlen: int | None = None
        self.mamba_pool_idx: torch.Tensor | None = None
        self.mamba_ping_pong_track_buffer: torch.Tensor | None = None
        self.mamba_next_track_idx: int | None = None
        self.mamba_last_track_seqlen: int | None = None
        self.swa_evicted_seqlen = 0
        self.swa_uuid_for_lock: int | None = None
        self.decode_batch_idx = 0
        self.extend_start: int | None = None
        self.cache_protected_len = 0
        self.cache_counted_len = 0
        self.kv_committed_len = 0
        self.kv_allocated_len = 0
        self.kv_committed_freed = False
        self.kv_overallocated_freed = False

    @property
    def seqlen(self) -> int:
        return len(self.origin_input_ids) + len(self.output_ids)

    def set_extend_input_len(self, extend_input_len: int) -> None:
        """How many tokens the next forward computes."""
        self.extend_input_len = extend_input_len

    def init_next_round_input(self, tree_cache: Any = None, cow_mamba: bool | None = None) -> None:
        """Set up the next prefill: all tokens so far; with ``tree_cache``, look the prefix up.

        ``cow_mamba``: told to the tree; by default whether it has a recurrent state.

        All but the last token are looked up: at least one must be computed, or there is no output.
        """
        self.fill_ids = self.origin_input_ids + self.output_ids
        if tree_cache is not None:
            key = RadixKey(self.fill_ids[: max(len(self.fill_ids) - 1, 0)], self.extra_key)
            supports_mamba = getattr(tree_cache, "supports_mamba", bool)  # bool() is False
            cow_mamba = supports_mamba() if cow_mamba is None else cow_mamba
            match = tree_cache.match_prefix(
                MatchPrefixParams(key=key, req=self, cow_mamba=cow_mamba)
            )
            self.prefix_indices = match.device_indices
            self.last_node = match.last_device_node
            self.last_host_node = match.last_host_node
            self.host_hit_length = 0 if self.load_failed else match.host_hit_length
            self.mamba_branching_seqlen = getattr(match, "mamba_branching_seqlen", None)
            protected = getattr(match, "cache_protected_len", None)  # a tree may own less of them
            self.cache_protected_len = len(self.prefix_indices) if protected is None else protected
        self.set_extend_input_len(len(self.fill_ids) - len(self.prefix_indices))

    def pop_committed_kv_cache(self) -> int:
        """How many tokens have KV; asked once, by whoever takes or frees it.

        Raises:
            DoubleFree: asked again.
        """
        if self.kv_committed_freed:
            raise DoubleFree(
                f"KV of request {self.rid}: {self.kv_committed_len} tokens freed twice"
            )
        self.kv_committed_freed = True
        return self.kv_committed_len

    def pop_overallocated_kv_cache(self) -> tuple[int, int]:
        """The columns of the row that have a slot but no KV, as ``(start, end)``; asked once.

        Raises:
            DoubleFree: asked again.
        """
        if self.kv_overallocated_freed:
            raise DoubleFree(f"over-allocated KV of request {self.rid} freed twice")
        self.kv_overallocated_freed = True
        return self.kv_committed_len, self.kv_allocated_len

    def finished(self) -> bool:
        return self.finished_reason is not None

    def check_finished(self) -> bool:
        """Decide after a new output whether it was the last."""
        if self.to_finish is not None:
            self.finished_reason, self.to_finish = self.to_finish, None
        elif len(self.output_ids) >= self.sampling_params.max_new_tokens:
            self.finished_reason = FINISH_LENGTH(self.sampling_params.max_new_tokens)
        elif self.output_ids[-1] in self.stop_token_ids:
            self.finished_reason = FINISH_MATCHED_TOKEN(self.output_ids[-1])
        return self.finished_reason is not None

    def __repr__(self) -> str:
        return (
            f"Req({self.rid}, prompt {len(self.origin_input_ids)}, outputs {len(self.output_ids)}, "
            f"row {self.req_pool_idx}, {self.finished_reason})"
        )
