"""``ScheduleBatch``: the requests that run together, as the scheduler sees them.

A batch is made for a prefill (``init_new``, ``prepare_for_extend``), then becomes or joins the
running batch, which decodes one token a request a step (``prepare_for_decode``). The forward gets a
``ModelWorkerBatch``: the same tensors, of this step. Nothing is changed in place, because the
forward of the last step may still be reading, and a list of requests is never changed either.

Shapes: ``input_ids``, ``out_cache_loc`` int64 ``[tokens]``; ``seq_lens``, ``req_pool_indices``
int64 ``[batch]``, lengths including the tokens of this step. Models SGLang's class of that name;
left out: log probabilities, grammars, speculation, several modalities, mixed chunks.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from refcache.engine.alloc import (
    alloc_for_decode,
    alloc_for_extend,
    evict_from_tree_cache,
    release_kv_cache,
)
from refcache.engine.hybrid import (
    evict_window,
    supports_mamba,
    supports_swa,
    track_decode,
    track_prefill,
)
from refcache.engine.model_config import ModelConfig
from refcache.engine.req import Req
from refcache.errors import InvalidArgument
from refcache.runtime import ImmediateRuntime, Runtime
from refcache.tags import as_tensor
from refcache.types import ServerArgs, SpeculativeAlgorithm

RETRACT_DECODE_STEPS = 20  # steps of room that a retraction tries to make for those that stay


class ForwardMode(Enum):
    """Several tokens a request, or one."""

    EXTEND = auto()
    DECODE = auto()

    def is_extend(self) -> bool:
        return self is ForwardMode.EXTEND

    def is_prefill(self) -> bool:
        return self.is_extend()

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_decode_or_idle(self) -> bool:
        """Decoding; a batch without requests is never run here."""
        return self.is_decode()


@dataclass
class ModelWorkerBatch:
    """What one forward needs.

    ``reqs`` is for what never changes of a request: its name and namespace. ``cached_prefix_ids``:
    for each request of an extend, the tokens whose KV the cache gave it at admission; None in a
    later chunk. Of a model with states: ``mamba_indices`` int64 ``[batch]``, the running states,
    and ``mamba_track``, for each request the snapshot that this forward leaves, (tokens, slot).
    """

    forward_mode: ForwardMode
    input_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    out_cache_loc: torch.Tensor
    extend_prefix_lens: list[int]
    extend_seq_lens: list[int]
    cached_prefix_ids: "list[array[int] | None]"
    reqs: list[Req]
    hicache_consumer_index: int = -1
    mamba_indices: torch.Tensor | None = None
    mamba_track: "Sequence[tuple[int, int] | None]" = ()

    @property
    def rows(self) -> list[int]:
        """``req_pool_indices`` on the host."""
        rows: list[int] = self.req_pool_indices.tolist()
        return rows

    @property
    def rids(self) -> list[str]:
        return [r.rid for r in self.reqs]

    @property
    def extra_keys(self) -> list[str | None]:
        return [r.extra_key for r in self.reqs]


class ScheduleBatch:
    """See the module docstring. ``batch_is_full``: no request is added before one leaves."""

    forward_mode: ForwardMode
    input_ids: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    out_cache_loc: torch.Tensor

    def __init__(
        self,
        reqs: list[Req],
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
        tree_cache: Any = None,
        model_config: ModelConfig | None = None,
        enable_overlap: bool = False,
        spec_algorithm: SpeculativeAlgorithm | None = None,
        chunked_req: Req | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """:meth:`init_new` makes batches that run; one without pools only holds requests."""
        self.reqs = reqs
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.tree_cache = tree_cache
        self.model_config = model_config
        self.enable_overlap = enable_overlap
        self.spec_algorithm = spec_algorithm
        self.chunked_req = chunked_req
        pool = req_to_token_pool
        self.runtime: Runtime = runtime or (ImmediateRuntime() if pool is None else pool.runtime)
        self.return_logprob = False
        self.device = "cpu" if pool is None else pool.device
        self.batch_is_full = False
        self.output_ids: torch.Tensor | None = None
        self.prefix_lens: list[int] = []
        self.extend_lens: list[int] = []
        self.cached_prefix_ids: list[array[int] | None] = []
        self.extend_num_tokens = 0
        self.hicache_consumer_index = -1
        self.mamba_track_interval = 1
        self.mamba_track: list[tuple[int, int] | None] = []

    @classmethod
    def init_new(
        cls,
        reqs: list[Req],
        req_to_token_pool: Any,
        token_to_kv_pool_allocator: Any,
        tree_cache: Any,
        model_config: ModelConfig,
        enable_overlap: bool,
        spec_algorithm: SpeculativeAlgorithm,
        chunked_req: Req | None = None,
        runtime: Runtime | None = None,
    ) -> "ScheduleBatch":
        """A batch of these requests; ``chunked_req`` is the one whose prompt does not end in it.

        ``model_config``, ``enable_overlap`` and ``spec_algorithm`` are kept with it; ``runtime`` is
        the machine, by default that of the request rows.
        """
        return cls(
            reqs,
            req_to_token_pool,
            token_to_kv_pool_allocator,
            tree_cache,
            model_config,
            enable_overlap,
            spec_algorithm,
            chunked_req,
            runtime,
        )

    def batch_size(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    def copy(self) -> "ScheduleBatch":
        """What the processing of this step's result needs: the requests as they are now."""
        same = ScheduleBatch(
            self.reqs[:],
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.tree_cache,
            self.model_config,
            self.enable_overlap,
            self.spec_algorithm,
            self.chunked_req,
            self.runtime,
        )
        same.forward_mode = self.forward_mode
        same.mamba_track_interval = self.mamba_track_interval
        return same

    # ---- prepare -------------------------------------------------------------------------------

    def prepare_for_extend(self) -> None:
        """Allocate rows and slots for ``extend_input_len`` tokens of each request.

        Raises:
            OutOfSlots: the adder's budget was wrong; the batch is unusable.
        """
        self.forward_mode = ForwardMode.EXTEND
        self.maybe_evict_swa()
        self.prefix_lens = [len(r.prefix_indices) for r in self.reqs]
        self.extend_lens = [r.extend_input_len for r in self.reqs]
        self.extend_num_tokens = sum(self.extend_lens)
        self.seq_lens_cpu = torch.tensor([len(r.fill_ids) for r in self.reqs])
        self.seq_lens = self.seq_lens_cpu.to(self.device)
        self.out_cache_loc, self.req_pool_indices, _ = alloc_for_extend(self)
        self.cached_prefix_ids = [
            None if r.kv_committed_len else r.fill_ids[:n]
            for r, n in zip(self.reqs, self.prefix_lens, strict=True)
        ]
        new = [r.fill_ids[n:] for r, n in zip(self.reqs, self.prefix_lens, strict=True)]
        host_ids = torch.cat([as_tensor(ids) for ids in new])
        self.input_ids = torch.empty_like(host_ids, device=self.device)
        self.runtime.h2d(self.input_ids, host_ids)
        for req in self.reqs:
            req.kv_committed_len = req.kv_allocated_len = len(req.fill_ids)
            req.is_retracted = False
        if supports_mamba(self.tree_cache):
            self.mamba_track = [
                track_prefill(self.tree_cache, r, n)
                for r, n in zip(self.reqs, self.prefix_lens, strict=True)
            ]

    def prepare_for_decode(self) -> None:
        """Allocate one slot a request for its last output, which becomes the input.

        Raises:
            OutOfSlots: ``check_decode_mem`` was not asked, or the tree misreports.
            InvalidArgument: the batch has not run since it was prepared.
        """
        self.input_ids, self.output_ids = self._has_run(), None
        self.forward_mode = ForwardMode.DECODE
        self.hicache_consumer_index = -1
        self.maybe_evict_swa()
        self.out_cache_loc = alloc_for_decode(self)
        self.seq_lens_cpu = self.seq_lens_cpu + 1
        self.seq_lens = self.seq_lens_cpu.to(self.device)
        for req in self.reqs:
            req.kv_committed_len = req.kv_allocated_len = req.kv_committed_len + 1
            req.decode_batch_idx += 1
        if supports_mamba(self.tree_cache):
            self.mamba_track = [
                track_decode(req, n, self.mamba_track_interval)
                for req, n in zip(self.reqs, self.seq_lens_cpu.tolist(), strict=True)
            ]

    def get_model_worker_batch(
        self, seq_lens_cpu_cache: torch.Tensor | None = None
    ) -> ModelWorkerBatch:
        """What the forward gets; ``seq_lens_cpu_cache``: its lengths on the host, if known."""
        lengths = self.seq_lens_cpu if seq_lens_cpu_cache is None else seq_lens_cpu_cache
        extend = self.forward_mode.is_extend()
        return ModelWorkerBatch(
            forward_mode=self.forward_mode,
            input_ids=self.input_ids,
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            seq_lens_cpu=lengths,
            out_cache_loc=self.out_cache_loc,
            extend_prefix_lens=self.prefix_lens if extend else [],
            extend_seq_lens=self.extend_lens if extend else [],
            cached_prefix_ids=self.cached_prefix_ids if extend else [],
            reqs=self.reqs,
            hicache_consumer_index=self.hicache_consumer_index,
            mamba_indices=self._running_states(),
            mamba_track=self.mamba_track,
        )

    def _running_states(self) -> torch.Tensor | None:
        states = [req.mamba_pool_idx for req in self.reqs if req.mamba_pool_idx is not None]
        return torch.stack(states) if states else None

    def maybe_evict_swa(self) -> None:
        """Give back the window slots that fell out of the requests' windows.

        Of a decode each ``sliding_window_size`` steps. Of a prefill only without a tree, since the
        tree has what the chunks before left; with overlap, the last one may still be running, and
        needs the window behind where it began.
        """
        tree = self.tree_cache
        if not supports_swa(tree):
            return
        if self.forward_mode.is_decode():
            for req, length in zip(self.reqs, self.seq_lens_cpu.tolist(), strict=True):
                if req.decode_batch_idx % tree.sliding_window_size == 1 % tree.sliding_window_size:
                    evict_window(tree, req, length - 1)
            return
        for req in self.reqs:
            began, req.extend_start = req.extend_start, len(req.prefix_indices)
            if tree.disable and req.req_pool_idx is not None:
                still_read = began if self.enable_overlap else req.extend_start
                evict_window(tree, req, still_read or 0)

    # ---- join and leave ------------------------------------------------------------------------

    def filter_batch(
        self,
        chunked_req_to_exclude: Req | Sequence[Req] | None = None,
        keep_indices: list[int] | None = None,
    ) -> None:
        """Keep the requests of ``keep_indices``; by default those that are not finished."""
        excluded = chunked_req_to_exclude or ()
        excluded = [excluded] if isinstance(excluded, Req) else excluded
        if keep_indices is None:
            keep_indices = [
                i
                for i, r in enumerate(self.reqs)
                if r.finished_reason is None and r not in excluded
            ]
        if len(keep_indices) == len(self.reqs):
            return
        self.reqs = [self.reqs[i] for i in keep_indices]
        if not self.reqs:
            return
        keep = torch.frombuffer(array("q", keep_indices), dtype=torch.int64)  # faster than tensor()
        self.seq_lens_cpu = self.seq_lens_cpu[keep]
        keep = keep.to(self.device)
        self.req_pool_indices = self.req_pool_indices[keep]
        self.seq_lens = self.seq_lens[keep]
        if self.output_ids is not None:
            self.output_ids = self.output_ids[keep]

    def merge_batch(self, other: "ScheduleBatch") -> None:
        """Add the requests of ``other``; both have run and not been prepared again.

        Raises:
            InvalidArgument: one of them has not.
        """
        output_ids = torch.cat([self._has_run(), other._has_run()])
        self.reqs = self.reqs + other.reqs
        self.req_pool_indices = torch.cat([self.req_pool_indices, other.req_pool_indices])
        self.seq_lens = torch.cat([self.seq_lens, other.seq_lens])
        self.seq_lens_cpu = torch.cat([self.seq_lens_cpu, other.seq_lens_cpu])
        self.output_ids = output_ids

    def _has_run(self) -> torch.Tensor:
        """The outputs of the last step."""
        if self.output_ids is None:
            raise InvalidArgument("a batch that has not run: expected its outputs")
        return self.output_ids

    # ---- memory for the next decode ------------------------------------------------------------

    def new_tokens_required_next_decode(self, selected_indices: list[int] | None = None) -> int:
        """Tokens, in whole pages, that the next decode step allocates for these requests."""
        page_size = self.token_to_kv_pool_allocator.page_size
        lengths = self.seq_lens_cpu
        if selected_indices is not None:
            lengths = lengths[selected_indices]
        return int((lengths % page_size == 0).count_nonzero()) * int(page_size)

    def check_decode_mem(self, selected_indices: list[int] | None = None) -> bool:
        """Whether the next decode step fits, after evicting what it needs."""
        num_tokens = self.new_tokens_required_next_decode(selected_indices)
        evict_from_tree_cache(self.tree_cache, num_tokens)
        available: int = self.token_to_kv_pool_allocator.available_size()
        return available >= num_tokens

    def retract_decode(
        self, server_args: ServerArgs | None = None
    ) -> tuple[list[Req], float, list[Req]]:
        """Give up requests until the next decode step fits: at least one, fewest outputs first.

        A retracted request loses its KV, keeps its outputs, and is prefilled again later. The last
        request too is given up if it does not fit; SGLang 0.5.10 aborts it instead.

        Returns:
            The retracted requests, a better estimate of ``new_token_ratio``, and the requests to
            abort: none.
        """
        order = sorted(
            range(len(self.reqs)),
            key=lambda i: (len(self.reqs[i].output_ids), -len(self.reqs[i].origin_input_ids)),
            reverse=True,
        )
        retracted: list[Req] = []
        while order and (
            (len(order) > 1 and not retracted) or not self.check_decode_mem(selected_indices=order)
        ):
            idx = order.pop()
            self.release_req(idx, len(order), server_args)
            retracted.append(self.reqs[idx])
        self.filter_batch(keep_indices=order)
        decoded = sum(len(r.output_ids) for r in self.reqs)
        wanted = sum(r.sampling_params.max_new_tokens for r in self.reqs)
        ratio = (decoded + RETRACT_DECODE_STEPS * len(self.reqs)) / (wanted + 1)
        return retracted, min(1.0, ratio), []

    def release_req(
        self, idx: int, remaing_req_count: int, server_args: ServerArgs | None = None
    ) -> None:
        """Take everything from a request; make room for the steps of those that remain.

        ``server_args``: nothing reads it, as KV is not offloaded here; the names are SGLang's.
        """
        req = self.reqs[idx]
        release_kv_cache(req, self.tree_cache, is_insert=False)
        evict_from_tree_cache(self.tree_cache, remaing_req_count * RETRACT_DECODE_STEPS)
        req.reset_for_retract()
