"""From device memory to pools: bytes to tokens, tokens to a pool class.

::

    free memory --profile_max_num_token--> tokens --_resolve_memory_pool_config--> MemoryPoolConfig
    --_init_pools--> req_to_token_pool, token_to_kv_pool, token_to_kv_pool_allocator

Models SGLang's ``ModelRunnerKVCacheMixin``; left out: weights (the stand-in model has none), draft
models. A hybrid model's pools are sized by arguments (``max_mamba_cache_size``,
``swa_full_tokens_ratio``), not by the memory that is free.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from refcache.engine.model_config import ModelConfig, get_attention_tp_size
from refcache.errors import InvalidArgument, UnknownName
from refcache.pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    KVCache,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
    SWAKVPool,
)
from refcache.runtime import Runtime
from refcache.types import ServerArgs, SpeculativeAlgorithm

MakeAllocator = Callable[[Any], Any]
"""Makes the allocator of a ``ModelRunner``, which it is given."""
GB = 1 << 30

KV_CACHE_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class MemoryPoolConfig:
    """What was found out about memory, as the pools need it.

    Attributes:
        max_total_num_tokens: tokens of the device pool, in whole pages.
        max_running_requests: rows of ``ReqToTokenPool``.
        mem_fraction_static: the share of the memory that was asked for; kept for error messages.
    """

    max_total_num_tokens: int
    max_running_requests: int
    mem_fraction_static: float | None = None


def get_available_gpu_memory(device: str) -> float | None:
    """GB that are free on ``device``; None where there is no device to ask (a CPU)."""
    if not device.startswith("cuda"):
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free / GB


def states_of_a_request(args: ServerArgs) -> int:
    """Its running state and, with the extra buffer, the slots of its snapshots."""
    if not args.enable_mamba_extra_buffer:
        return 1
    return 2 if args.disable_overlap_schedule else 3


class ModelRunnerKVCacheMixin:
    """Sizes and makes the pools."""

    server_args: ServerArgs
    model_config: ModelConfig
    runtime: Runtime
    page_size: int
    device: str
    start_layer: int
    end_layer: int
    num_effective_layers: int
    keep_kv: bool
    make_allocator: MakeAllocator

    def get_cell_size_per_token(self) -> int:
        """Bytes of one token on this rank: KV, and what the pool keeps besides."""
        tp_size = get_attention_tp_size(self.server_args)
        size = self.model_config.row_elements(tp_size) * self.kv_cache_dtype.itemsize
        for spec in self.model_config.extra_planes:
            dtype = spec.dtype or self.kv_cache_dtype
            size += -(-spec.head_num * spec.head_dim * dtype.itemsize // spec.slots_per_row)
        return size * self.num_effective_layers

    def profile_max_num_token(self, pre_model_load_memory: float) -> int:
        """Tokens whose KV fits into what is free now, less the share that is kept free.

        That share, ``1 - mem_fraction_static``, is of ``pre_model_load_memory``, the GB that were
        free before the model was loaded. Without a device to ask, that much is free now.
        """
        free = get_available_gpu_memory(self.device)
        if free is None:
            free = pre_model_load_memory
        rest = free - pre_model_load_memory * (1 - self.server_args.mem_fraction_static)
        return int(rest * GB) // self.get_cell_size_per_token()

    def _resolve_memory_pool_config(self, pre_model_load_memory: float | None) -> MemoryPoolConfig:
        """See :meth:`init_memory_pool`."""
        bounds = []
        limit = self.server_args.max_total_tokens
        if pre_model_load_memory is not None:
            bounds.append(self.profile_max_num_token(pre_model_load_memory))
        if limit is not None:
            bounds.append(limit)
        if not bounds:
            raise InvalidArgument(
                "device memory: expected max_total_tokens, or the GB that are free"
            )
        tokens = min(bounds) // self.page_size * self.page_size
        if tokens < self.page_size:
            raise InvalidArgument(
                f"device memory for {min(bounds)} tokens: expected at least one page "
                f"({self.page_size}); mem_fraction_static={self.server_args.mem_fraction_static}"
            )
        args = self.server_args
        return MemoryPoolConfig(tokens, args.max_running_requests, args.mem_fraction_static)

    def init_memory_pool(self, pre_model_load_memory: float | None = None) -> None:
        """Find out how many tokens fit, and make the pools.

        Args:
            pre_model_load_memory: GB that were free before the model was loaded; may be None when
                ``max_total_tokens`` is given. The smaller of both bounds counts, in whole pages.

        Raises:
            InvalidArgument: neither is given, or less than one page fits.
        """
        self._init_pools(self._resolve_memory_pool_config(pre_model_load_memory))

    def _init_pools(self, config: MemoryPoolConfig) -> None:
        """Make the three pools of ``config``."""
        self.max_total_num_tokens = config.max_total_num_tokens
        self.max_running_requests = config.max_running_requests
        page, ratio = self.page_size, self.server_args.swa_full_tokens_ratio
        self.swa_max_total_num_tokens = int(self.max_total_num_tokens * ratio) // page * page
        self.req_to_token_pool = self._make_rows(config.max_running_requests)
        self.token_to_kv_pool = self._make_kv_pool() if self.keep_kv else None
        self.token_to_kv_pool_allocator = self.make_allocator(self)

    def _make_rows(self, size: int) -> ReqToTokenPool:
        config, args = self.model_config, self.server_args
        common: dict[str, Any] = {
            "size": size,
            "max_context_len": args.context_length,
            "device": self.device,
            "enable_memory_saver": args.enable_memory_saver,
            "runtime": self.runtime,
        }
        if config.mamba2_cache_params is None:
            return ReqToTokenPool(**common)
        overlap = not args.disable_overlap_schedule
        own = states_of_a_request(args)
        states = args.max_mamba_cache_size or size * (own + 2)
        if states < own + 1:
            raise InvalidArgument(
                f"max_mamba_cache_size={states}: expected at least {own + 1}, those of a request "
                "and the one that it starts from"
            )
        return HybridReqToTokenPool(
            **common,
            mamba_size=states,
            mamba_spec_state_size=size,
            cache_params=config.mamba2_cache_params,
            mamba_layer_ids=config.mamba_layer_ids,
            enable_mamba_extra_buffer=args.enable_mamba_extra_buffer,
            enable_overlap_schedule=overlap,
            start_layer=self.start_layer,
        )

    def _make_kv_pool(self) -> Any:
        """A :class:`~refcache.pool.KVCache`, or the routed pool of a hybrid model."""
        if self.model_config.is_hybrid_ssm or self.model_config.is_hybrid_swa:
            return self._make_routed_pool()
        return self._make_plain_pool()

    def _make_routed_pool(self) -> HybridLinearKVPool | SWAKVPool:
        config, args = self.model_config, self.server_args
        common: dict[str, Any] = {
            "size": self.max_total_num_tokens,
            "dtype": self.kv_cache_dtype,
            "page_size": self.page_size,
            "head_num": config.get_num_kv_heads(get_attention_tp_size(args)),
            "head_dim": config.head_dim,
            "full_attention_layer_ids": config.full_attention_layer_ids,
            "enable_kvcache_transpose": False,
            "device": self.device,
            "start_layer": self.start_layer,
            "enable_memory_saver": args.enable_memory_saver,
            "runtime": self.runtime,
        }
        if isinstance(self.req_to_token_pool, HybridReqToTokenPool):
            return HybridLinearKVPool(
                **common,
                mamba_pool=self.req_to_token_pool.mamba_pool,
                use_mla=config.is_mla,
                kv_lora_rank=config.kv_lora_rank or None,
                qk_rope_head_dim=config.qk_rope_head_dim,
            )
        return SWAKVPool(
            **common,
            size_swa=self.swa_max_total_num_tokens,
            swa_attention_layer_ids=config.swa_attention_layer_ids,
            v_head_dim=config.v_head_dim,
        )

    def _make_plain_pool(self) -> KVCache:
        config, args = self.model_config, self.server_args
        common: dict[str, Any] = {
            "page_size": self.page_size,
            "dtype": self.kv_cache_dtype,
            "layer_num": self.num_effective_layers,
            "device": self.device,
            "enable_memory_saver": args.enable_memory_saver,
            "start_layer": self.start_layer,
            "end_layer": self.end_layer,
            "runtime": self.runtime,
            "extra_planes": config.extra_planes,
        }
        if config.is_mla:
            return MLATokenToKVPool(
                self.max_total_num_tokens,
                kv_lora_rank=config.kv_lora_rank,
                qk_rope_head_dim=config.qk_rope_head_dim,
                **common,
            )
        drafts = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
        return MHATokenToKVPool(
            self.max_total_num_tokens,
            head_num=config.get_num_kv_heads(get_attention_tp_size(args)),
            head_dim=config.head_dim,
            v_head_dim=config.v_head_dim,
            enable_alt_stream=not args.enable_pdmux,
            enable_kv_cache_copy=not drafts.is_none(),
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
