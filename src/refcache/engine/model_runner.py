"""``ModelRunner``: owns the device memory of one rank and runs the model on a batch.

How the pools are sized is in :mod:`refcache.engine.model_runner_kv_cache_mixin`. Models SGLang's
``ModelRunner``; left out: weights, CUDA graphs, draft models.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from refcache.allocator import (
    PagedTokenToKVPoolAllocator,
    SWATokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from refcache.engine.model_config import ModelConfig
from refcache.engine.model_runner_kv_cache_mixin import (
    MakeAllocator,
    MemoryPoolConfig,
    ModelRunnerKVCacheMixin,
    get_available_gpu_memory,
)
from refcache.engine.models.attention import AttentionBackend
from refcache.engine.models.content import ReadPlan, RowCheck, TagLedger
from refcache.engine.models.model import TagModel
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.runtime import Event, ImmediateRuntime, Runtime
from refcache.types import ServerArgs

__all__ = ["MakeAllocator", "MakeModel", "MemoryPoolConfig", "Model", "ModelRunner"]

MakeModel = Callable[["ModelRunner"], "Model"]
NextTokens: TypeAlias = torch.Tensor | Callable[[], torch.Tensor]


class Model(Protocol):
    """What a runner runs. ``plan``: which KV rows its attention reads beside the new ones."""

    plan: ReadPlan

    def forward(self, batch: ModelWorkerBatch, backend: AttentionBackend) -> NextTokens:
        """Launch a forward on the current stream; the next tokens, int64 ``[batch]``.

        A model that can pick them only when the host has seen the tokens before (as a grammar must)
        gives a function that launches the sampling.
        """
        ...


def make_allocator(runner: "ModelRunner") -> Any:
    """refcache's allocator for the runner's page size, of two pools with windows."""
    page_size, size = runner.page_size, runner.max_total_num_tokens
    dtype, pool, runtime = runner.kv_cache_dtype, runner.token_to_kv_pool, runner.runtime
    if runner.model_config.is_hybrid_swa:
        return SWATokenToKVPoolAllocator(
            size, runner.swa_max_total_num_tokens, page_size, dtype, runner.device, pool,
            runtime=runtime,
        )  # fmt: skip
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, runner.device, pool, runtime=runtime)
    return PagedTokenToKVPoolAllocator(size, page_size, dtype, runner.device, pool, runtime=runtime)


def make_model(runner: "ModelRunner") -> Model:
    """The stand-in model, whose rows the runner's check compares."""
    rows = runner.req_to_token_pool
    ledger = TagLedger(rows.size, rows.max_context_len)
    pool, config = runner.token_to_kv_pool, runner.model_config
    return TagModel(config, ledger, runner.check, pool, runner.runtime, rows)


class ModelRunner(ModelRunnerKVCacheMixin):
    """See the module docstring.

    Args:
        make_allocator: makes the slot allocator, given this runner with its pools made.
        make_model: makes the model, given this runner with its pools made.
        check: which KV rows a forward of the stand-in model reads and compares.
        keep_kv: False keeps no KV bytes: slots are accounted, nothing is read or checked.
        pre_model_load_memory: see ``init_memory_pool``; None: what is free on ``device`` now, where
            there is one.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        *,
        runtime: Runtime | None = None,
        make_allocator: MakeAllocator = make_allocator,
        make_model: MakeModel = make_model,
        check: RowCheck | None = None,
        keep_kv: bool = True,
        pre_model_load_memory: float | None = None,
    ) -> None:
        self.server_args = server_args
        self.model_config = model_config
        self.runtime = runtime or ImmediateRuntime()
        self.make_allocator = make_allocator
        self.make_model = make_model
        self.check = check or RowCheck()
        self.keep_kv = keep_kv
        self.page_size = server_args.page_size
        self.device = server_args.device
        self.start_layer = 0
        self.end_layer = model_config.num_hidden_layers  # the first layer that is not held here
        self.num_effective_layers = self.end_layer - self.start_layer
        if pre_model_load_memory is None:
            pre_model_load_memory = get_available_gpu_memory(self.device)
        self.initialize(pre_model_load_memory)

    def initialize(self, pre_model_load_memory: float | None) -> None:
        """Make the pools, then the model and its attention backend over them."""
        self.init_memory_pool(pre_model_load_memory)
        self.model = self.make_model(self)
        self.attn_backend = AttentionBackend(
            self.req_to_token_pool, self.token_to_kv_pool, self.model.plan, self.runtime
        )

    def init_forward_metadata(self, batch: ModelWorkerBatch) -> None:
        """Read the page table on the current stream: the first thing that a forward does."""
        if self.token_to_kv_pool is not None:
            self.attn_backend.init_forward_metadata(batch)

    @property
    def rows_read(self) -> Event | None:
        """Behind the reading of the last forward's page table; None: nothing read rows."""
        metadata = self.attn_backend.forward_metadata
        return None if metadata is None else metadata.rows_read

    def forward(self, forward_batch: ModelWorkerBatch) -> NextTokens:
        """Run the model on the current stream; see :meth:`Model.forward`."""
        return self._forward_raw(forward_batch)

    def _forward_raw(self, forward_batch: ModelWorkerBatch) -> NextTokens:
        if forward_batch.forward_mode.is_decode():
            return self.forward_decode(forward_batch)
        return self.forward_extend(forward_batch)

    def forward_extend(self, forward_batch: ModelWorkerBatch) -> NextTokens:
        self.init_forward_metadata(forward_batch)
        return self.model.forward(forward_batch, self.attn_backend)

    def forward_decode(self, forward_batch: ModelWorkerBatch) -> NextTokens:
        self.init_forward_metadata(forward_batch)
        return self.model.forward(forward_batch, self.attn_backend)
