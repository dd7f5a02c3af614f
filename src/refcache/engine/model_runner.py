"""``ModelRunner``: owns the device memory of one rank and runs the model on a batch.

``init_memory_pool`` turns bytes into tokens and tokens into pools::

    free memory --profile_max_num_token--> max_total_num_tokens --_init_pools--> req_to_token_pool,
    token_to_kv_pool, token_to_kv_pool_allocator

Models SGLang's ``ModelRunner`` with ``ModelRunnerKVCacheMixin``; left out: weights, the memory
saver region, custom memory pools, CUDA graphs, draft models, hybrid pools.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.engine.attention import AttentionBackend
from refcache.engine.content import ReadPlan, RowCheck, TagLedger
from refcache.engine.model import TagModel
from refcache.engine.model_config import ModelConfig, get_attention_tp_size
from refcache.engine.schedule_batch import ModelWorkerBatch
from refcache.errors import InvalidArgument, UnknownName
from refcache.pool import KVCache, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
from refcache.runtime import ImmediateRuntime, Runtime
from refcache.types import ServerArgs

MakeAllocator = Callable[["ModelRunner"], Any]
MakeModel = Callable[["ModelRunner"], "Model"]
GB = 1 << 30


class Model(Protocol):
    """What a runner runs. ``plan``: which KV rows its attention reads beside the new ones."""

    plan: ReadPlan

    def forward(self, batch: ModelWorkerBatch, backend: AttentionBackend) -> torch.Tensor:
        """Launch a forward on the current stream; the next tokens, int64 ``[batch]``."""
        ...


KV_CACHE_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def make_allocator(runner: "ModelRunner") -> Any:
    """refcache's allocator for the runner's page size."""
    page_size, size = runner.page_size, runner.max_total_num_tokens
    dtype, pool, runtime = runner.kv_cache_dtype, runner.token_to_kv_pool, runner.runtime
    if page_size == 1:
        return TokenToKVPoolAllocator(size, dtype, runner.device, pool, runtime=runtime)
    return PagedTokenToKVPoolAllocator(size, page_size, dtype, runner.device, pool, runtime=runtime)


def make_model(runner: "ModelRunner") -> Model:
    """The stand-in model, whose rows the runner's check compares."""
    rows = runner.req_to_token_pool
    ledger = TagLedger(rows.size, rows.max_context_len)
    pool, config = runner.token_to_kv_pool, runner.model_config
    return TagModel(config, ledger, runner.check, pool, runner.runtime)


class ModelRunnerKVCacheMixin:
    """Sizes and makes the pools."""

    server_args: ServerArgs
    model_config: ModelConfig
    runtime: Runtime
    page_size: int
    device: str
    start_layer: int
    num_effective_layers: int
    keep_kv: bool
    make_allocator: MakeAllocator

    def get_cell_size_per_token(self) -> int:
        """Bytes of KV of one token on this rank."""
        tp_size = get_attention_tp_size(self.server_args.tp_size)
        elements = self.model_config.row_elements(tp_size) * self.num_effective_layers
        return elements * self.kv_cache_dtype.itemsize

    def profile_max_num_token(self, pre_model_load_memory: float) -> int:
        """Tokens whose KV fits into the static share of the memory, in GB, free before loading.

        The stand-in model has no weights: what is free now is what was free before.
        """
        static = pre_model_load_memory * self.server_args.mem_fraction_static
        return int(static * GB) // self.get_cell_size_per_token()

    def init_memory_pool(self, pre_model_load_memory: float | None = None) -> None:
        """Set ``max_total_num_tokens`` and make the pools.

        Args:
            pre_model_load_memory: GB that were free before the model was loaded; may be None when
                ``max_total_tokens`` is given. The smaller of both bounds counts, in whole pages.

        Raises:
            InvalidArgument: neither is given, or less than one page fits.
        """
        bounds = []
        if pre_model_load_memory is not None:
            bounds.append(self.profile_max_num_token(pre_model_load_memory))
        if self.server_args.max_total_tokens is not None:
            bounds.append(self.server_args.max_total_tokens)
        if not bounds:
            raise InvalidArgument(
                "device memory: expected max_total_tokens, or the GB that are free"
            )
        self.max_total_num_tokens = min(bounds) // self.page_size * self.page_size
        if self.max_total_num_tokens < self.page_size:
            raise InvalidArgument(
                f"device memory for {min(bounds)} tokens: expected at least one page "
                f"({self.page_size})"
            )
        self._init_pools()

    def _init_pools(self) -> None:
        self.req_to_token_pool = ReqToTokenPool(
            self.server_args.max_running_requests,
            self.server_args.context_length,
            device=self.device,
            runtime=self.runtime,
        )
        self.token_to_kv_pool = self._make_kv_pool() if self.keep_kv else None
        self.token_to_kv_pool_allocator = self.make_allocator(self)  # type: ignore[arg-type]

    def _make_kv_pool(self) -> KVCache:
        config = self.model_config
        common: dict[str, Any] = {
            "page_size": self.page_size,
            "dtype": self.kv_cache_dtype,
            "layer_num": self.num_effective_layers,
            "device": self.device,
            "start_layer": self.start_layer,
            "runtime": self.runtime,
        }
        if config.is_mla:
            return MLATokenToKVPool(
                self.max_total_num_tokens,
                kv_lora_rank=config.kv_lora_rank,
                qk_rope_head_dim=config.qk_rope_head_dim,
                **common,
            )
        return MHATokenToKVPool(
            self.max_total_num_tokens,
            head_num=config.get_num_kv_heads(get_attention_tp_size(self.server_args.tp_size)),
            head_dim=config.head_dim,
            v_head_dim=config.v_head_dim,
            **common,
        )

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        name = self.server_args.kv_cache_dtype
        if name == "auto":
            return self.model_config.dtype
        if name not in KV_CACHE_DTYPES:
            raise UnknownName("kv_cache_dtype", name, ["auto", *KV_CACHE_DTYPES])
        return KV_CACHE_DTYPES[name]


class ModelRunner(ModelRunnerKVCacheMixin):
    """See the module docstring.

    Args:
        make_allocator: makes the slot allocator, given this runner with its pools made.
        make_model: makes the model, given this runner with its pools made.
        check: which KV rows a forward of the stand-in model reads and compares.
        keep_kv: False keeps no KV bytes: slots are accounted, nothing is read or checked.
        pre_model_load_memory: see ``init_memory_pool``.
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
        self.end_layer = model_config.num_hidden_layers
        self.num_effective_layers = self.end_layer - self.start_layer
        self.initialize(pre_model_load_memory)

    def initialize(self, pre_model_load_memory: float | None) -> None:
        """Make the pools, then the model and its attention backend over them."""
        self.init_memory_pool(pre_model_load_memory)
        self.model = self.make_model(self)
        self.attn_backend = AttentionBackend(
            self.req_to_token_pool, self.token_to_kv_pool, self.model.plan, self.runtime
        )

    def init_forward_metadata(self, batch: ModelWorkerBatch) -> None:
        """Read the page table, on the stream that writes request rows; before ``forward``."""
        if self.token_to_kv_pool is not None:
            self.attn_backend.init_forward_metadata(batch)

    def forward(self, batch: ModelWorkerBatch) -> torch.Tensor:
        """Run the model on the current stream; the next tokens, int64 ``[batch]``."""
        return self._forward_raw(batch)

    def _forward_raw(self, batch: ModelWorkerBatch) -> torch.Tensor:
        if batch.forward_mode.is_decode():
            return self.forward_decode(batch)
        return self.forward_extend(batch)

    def forward_extend(self, batch: ModelWorkerBatch) -> torch.Tensor:
        return self.model.forward(batch, self.attn_backend)

    def forward_decode(self, batch: ModelWorkerBatch) -> torch.Tensor:
        return self.model.forward(batch, self.attn_backend)
