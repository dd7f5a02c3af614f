"""What the pools need to know of a model: layers, heads, widths, dtype, vocabulary."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from refcache.errors import InvalidArgument
from refcache.pool import BaseLinearStateParams, PlaneSpec
from refcache.types import ServerArgs


def get_attention_tp_size(server_args: ServerArgs) -> int:
    """Ranks that share one layer's heads: all, or under DP attention those of one group.

    >>> get_attention_tp_size(ServerArgs(tp_size=8, dp_size=4, enable_dp_attention=True))
    2
    """
    groups = server_args.dp_size if server_args.enable_dp_attention else 1
    return server_args.tp_size // groups


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the KV cache of a model.

    Attributes:
        num_hidden_layers: attention layers.
        num_key_value_heads: of all ranks together; ``head_dim``, ``v_head_dim``: K and V widths
            (``v_head_dim`` None: as K).
        kv_lora_rank, qk_rope_head_dim: widths of the latent row; a rank above 0 means MLA.
        vocab_size: token ids are 0 to ``vocab_size - 1``.
        dtype: of the KV cache under ``kv_cache_dtype="auto"``. The stand-in model writes 64-bit
            words (:mod:`refcache.engine.models.content`), so a row must be a whole number of 8
            bytes.
        extra_planes: what the pool keeps of every slot besides KV.
        mamba2_cache_params: the layers with a recurrent state instead of KV, and its shapes.
        swa_attention_layer_ids: the layers that attend to ``sliding_window_size`` tokens.

    Raises:
        InvalidArgument: an extent that is too small; layers that do not exist, or of two kinds; a
            mix of layers that has no pool.
    """

    is_encoder_decoder: ClassVar[bool] = False

    num_hidden_layers: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 1
    v_head_dim: int | None = None
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    vocab_size: int = 32000
    dtype: torch.dtype = torch.int64
    extra_planes: tuple[PlaneSpec, ...] = ()
    mamba2_cache_params: BaseLinearStateParams | None = None
    swa_attention_layer_ids: tuple[int, ...] = ()
    sliding_window_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}={getattr(self, name)}: expected at least 1")
        if not (self.is_hybrid_ssm or self.is_hybrid_swa):
            return
        if not self.full_attention_layer_ids:
            raise InvalidArgument("a hybrid model: expected a layer with full attention")
        if not set(self.mamba_layer_ids + self.swa_attention_layer_ids) <= set(
            range(self.num_hidden_layers)
        ):
            raise InvalidArgument(f"hybrid layers: expected 0 to {self.num_hidden_layers - 1}")
        if self.is_hybrid_ssm and self.is_hybrid_swa:
            raise InvalidArgument("states and sliding windows in one model: expected one of both")
        if self.is_hybrid_swa and (self.is_mla or (self.sliding_window_size or 0) < 1):
            raise InvalidArgument(
                f"layers with a window, sliding_window_size={self.sliding_window_size}, "
                f"kv_lora_rank={self.kv_lora_rank}: expected a window of 1 or more, and no MLA"
            )
        if self.extra_planes or (
            self.is_hybrid_ssm and self.v_head_dim not in (None, self.head_dim)
        ):
            raise InvalidArgument(
                "extra_planes or another v_head_dim of a hybrid model: its pool has none"
            )

    @property
    def mamba_layer_ids(self) -> tuple[int, ...]:
        """Layers with a state."""
        params = self.mamba2_cache_params
        return () if params is None else tuple(params.layers)

    @property
    def full_attention_layer_ids(self) -> tuple[int, ...]:
        """Layers with the KV of every token."""
        others = self.mamba_layer_ids + self.swa_attention_layer_ids
        return tuple(i for i in range(self.num_hidden_layers) if i not in others)

    @property
    def is_hybrid_ssm(self) -> bool:
        return self.mamba2_cache_params is not None

    @property
    def is_hybrid_swa(self) -> bool:
        return bool(self.swa_attention_layer_ids)

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    def get_num_kv_heads(self, tensor_parallel_size: int) -> int:
        """KV heads of one rank; every rank has at least one, if need be a copy.

        >>> ModelConfig(num_key_value_heads=8).get_num_kv_heads(2)
        4
        >>> ModelConfig(num_key_value_heads=2).get_num_kv_heads(8)
        1
        """
        return max(1, self.num_key_value_heads // tensor_parallel_size)

    def row_elements(self, tensor_parallel_size: int) -> int:
        """KV elements of one token in one layer on one rank, all planes."""
        if self.is_mla:
            return self.kv_lora_rank + self.qk_rope_head_dim
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        return self.get_num_kv_heads(tensor_parallel_size) * (self.head_dim + v_head_dim)
