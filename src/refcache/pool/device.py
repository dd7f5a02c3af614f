"""Device pools: ``MHATokenToKVPool`` and ``MLATokenToKVPool``, over :mod:`refcache.pool.kv_cache`.

Models SGLang's classes of these names; left out: custom memory pools, which say where the bytes
come from and change nothing else.
"""

from collections.abc import Sequence
from typing import Any

import torch

from refcache.arguments import shown
from refcache.errors import InvalidArgument, refuse_unmodelled
from refcache.pool.kv_cache import KVCache
from refcache.pool.planes import PlaneSpec
from refcache.runtime import Region, Runtime, Stream

NOT_OF_A_POOL = {
    "swa_head_num": None, "swa_head_dim": None, "swa_v_head_dim": None, "k_scale": None,
    "v_scale": None, "use_nsa": False, "override_kv_cache_dim": None,
}  # fmt: skip


class MHATokenToKVPool(KVCache):
    """K and V of multi-head (or grouped-query) attention; ``v_head_dim`` defaults to ``head_dim``.

    ``k_buffer[l]`` and ``v_buffer[l]`` are views ``[size + page_size, head_num, dim]``.

    Attributes:
        alt_stream: with ``enable_alt_stream``, a stream that writes V while K is written.
        capture_mode: whether ``alt_stream`` is used. SGLang uses it while it captures a CUDA graph,
            whose launches cost the host nothing later, and only then.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool = False,
        v_head_dim: int | None = None,
        swa_head_num: None = None,
        swa_head_dim: None = None,
        swa_v_head_dim: None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        enable_alt_stream: bool = True,
        enable_kv_cache_copy: bool = False,
        runtime: Runtime | None = None,
        extra_planes: Sequence[PlaneSpec] = (),
    ) -> None:
        """``enable_kv_cache_copy``: :meth:`move_kv_cache` may be called. ``swa_*`` must be None."""
        swa = {"swa_head_num": swa_head_num, "swa_head_dim": swa_head_dim}
        refuse_unmodelled("a pool", swa | {"swa_v_head_dim": swa_v_head_dim}, NOT_OF_A_POOL)
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        widths = [("k", head_num, head_dim), ("v", head_num, self.v_head_dim)]
        layers = start_layer, end_layer
        super().__init__(
            size, page_size, dtype, layer_num, device, widths, *layers, enable_memory_saver,
            runtime, extra_planes,
        )  # fmt: skip
        self.enable_kv_cache_copy = enable_kv_cache_copy
        self.alt_stream: Stream | None = self.runtime.Stream("alt") if enable_alt_stream else None
        self.capture_mode = False

    def _create_buffers(self) -> None:
        super()._create_buffers()
        self.k_buffer, self.v_buffer = (list(plane.buffer) for plane in self.planes[:2])
        self.k_data_ptrs = self.data_ptrs[: self.layer_num]
        self.v_data_ptrs = self.data_ptrs[self.layer_num : 2 * self.layer_num]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K, and of V."""
        return self.planes[0].buffer.nbytes, self.planes[1].buffer.nbytes

    def set_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: None = None,
        v_scale: None = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write the rows of some tokens of one layer, as one launch (with ``alt_stream``, two).

        Args:
            layer: a layer id, or an object with ``layer_id``.
            loc: integer ``[n]``, device slots.
            cache_k, cache_v: ``[n, head_num, head_dim]`` and ``[n, head_num, v_head_dim]``; read
                when the launch runs; converted to the pool's dtype.
            k_scale, v_scale: must be None, rows are stored as they are.
            layer_id_override: the layer id, instead of that of ``layer``.

        Raises:
            InvalidArgument, InvalidSlot: before anything is launched.
        """
        refuse_unmodelled("set_kv_buffer", {"k_scale": k_scale, "v_scale": v_scale}, NOT_OF_A_POOL)
        layer = layer if layer_id_override is None else layer_id_override
        self._write(layer, loc, (cache_k,), (cache_v,))

    def _launch_write(
        self,
        local: int,
        loc: torch.Tensor,
        rows: Sequence[tuple[torch.Tensor, ...]],
        planes: Sequence[int],
    ) -> None:
        if self.alt_stream is None or not self.capture_mode:
            return super()._launch_write(local, loc, rows, planes)
        current = self.runtime.current_stream()
        self.alt_stream.wait_stream(current)
        super()._launch_write(local, loc, rows, planes[:1])
        with self.runtime.stream(self.alt_stream):
            super()._launch_write(local, loc, rows, planes[1:])
        current.wait_stream(self.alt_stream)

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy the rows of slot ``src_loc[i]`` to slot ``tgt_loc[i]``, all layers, as one launch.

        Of every plane. Speculation uses it: draft tokens that were accepted move to where their
        sequence goes on. All sources are read before a target is written.

        Raises:
            InvalidArgument: made without ``enable_kv_cache_copy``; lists of different lengths.
        """
        if not self.enable_kv_cache_copy:
            raise InvalidArgument("move_kv_cache: expected enable_kv_cache_copy=True")
        self._check_slots("tgt_loc", tgt_loc)
        self._check_slots("src_loc", src_loc)
        if len(tgt_loc) != len(src_loc):
            raise InvalidArgument(
                f"move_kv_cache of {tuple(src_loc.shape)} to {tuple(tgt_loc.shape)}: expected [n] "
                "each"
            )
        self.check_resident()

        def run() -> None:
            for plane in self.planes:
                rows = plane.by_slot()
                rows[:, tgt_loc] = rows[:, src_loc]

        reads, writes = (
            [Region(self, plane, range(self.layer_num), loc) for plane in range(len(self.planes))]
            for loc in (src_loc, tgt_loc)
        )
        self.runtime.launch("move_kv_cache", run, reads, writes)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """K of a layer, ``[size + page_size, head_num, head_dim]``, after waiting for the layer."""
        self._wait(layer_id)
        return self._get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """V of a layer, ``[size + page_size, head_num, v_head_dim]``, after waiting for it."""
        self._wait(layer_id)
        return self._get_value_buffer(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, each through its own getter."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def _get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._view(0, layer_id)

    def _get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._view(1, layer_id)


class MLATokenToKVPool(KVCache):
    """The latent KV of multi-head latent attention: one row of ``kv_lora_rank + qk_rope_head_dim``.

    ``kv_buffer[l]`` is a view ``[size + page_size, 1, width]``; the value is its latent part.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool = False,
        start_layer: int | None = None,
        end_layer: int | None = None,
        use_nsa: bool = False,
        override_kv_cache_dim: None = None,
        runtime: Runtime | None = None,
        extra_planes: Sequence[PlaneSpec] = (),
    ) -> None:
        """``use_nsa``, ``override_kv_cache_dim``: must be False and None."""
        given = {"use_nsa": use_nsa, "override_kv_cache_dim": override_kv_cache_dim}
        refuse_unmodelled("a pool", given, NOT_OF_A_POOL)
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_cache_dim = kv_lora_rank + qk_rope_head_dim
        widths = [("kv", 1, self.kv_cache_dim)]
        layers = start_layer, end_layer
        super().__init__(
            size, page_size, dtype, layer_num, device, widths, *layers, enable_memory_saver,
            runtime, extra_planes,
        )  # fmt: skip

    def _create_buffers(self) -> None:
        super()._create_buffers()
        self.kv_buffer = list(self.planes[0].buffer)

    def set_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor | None = None,
    ) -> None:
        """As :meth:`MHATokenToKVPool.set_kv_buffer`; ``cache_v`` is part of ``cache_k``: unused."""
        self._write(layer, loc, (cache_k,))

    def set_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k_nope: torch.Tensor, cache_k_rope: torch.Tensor
    ) -> None:
        """Write latent ``[n, 1, kv_lora_rank]`` and rope ``[n, 1, qk_rope_head_dim]`` parts."""
        self._write(layer, loc, (cache_k_nope, cache_k_rope))

    def get_mla_kv_buffer(
        self, layer: Any, loc: torch.Tensor, dst_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch a copy of some rows: latent ``[n, 1, kv_lora_rank]`` and rope parts.

        They come as ``dst_dtype`` (default: the pool's), after waiting for the layer.
        """
        layer_id: int = getattr(layer, "layer_id", layer)
        self._check_slots("loc", loc)
        if not isinstance(dst_dtype, torch.dtype | None):
            raise InvalidArgument(f"dst_dtype={shown(dst_dtype)}: expected a torch.dtype or None")
        source = self.get_key_buffer(layer_id)
        rows = source.new_empty((len(loc), 1, self.kv_cache_dim), dtype=dst_dtype or self.dtype)

        def run() -> None:
            rows.copy_(source[loc])

        self.runtime.launch("get_mla_kv_buffer", run, reads=[self.region(0, layer_id, loc)])
        return rows[..., : self.kv_lora_rank], rows[..., self.kv_lora_rank :]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """The whole row of a layer, ``[size + page_size, 1, width]``, after waiting for it."""
        self._wait(layer_id)
        return self._view(0, layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The latent part, ``[size + page_size, 1, kv_lora_rank]``, after waiting for the layer."""
        self._wait(layer_id)
        return self._view(0, layer_id)[..., : self.kv_lora_rank]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, each through its own getter."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)
