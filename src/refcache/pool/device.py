"""Device pools: the KV bytes of every layer, as *planes*.

A plane is one buffer ``[layer, size + page_size, head, dim]``: MHA has K and V (each with its own
width), MLA has one (latent and rope part side by side). Page 0 is a dummy for padded tokens; slots
``page_size ... size + page_size - 1`` are handed out. Everything that copies rows between tiers is
driven by the list of planes, so no pool needs a copy routine of its own.

Bytes are touched only through launches. Getters wait for the layer on the registered layer transfer
counter first: a layer that is being loaded from the host is not read before it has arrived.

Models SGLang's ``MHATokenToKVPool`` and ``MLATokenToKVPool``; left out: the memory saver region,
custom memory pools, the alternate stream, the speculative KV copy.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from refcache.errors import InvalidArgument, InvalidSlot
from refcache.runtime import ImmediateRuntime, Region, Runtime

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Plane(NamedTuple):
    """``buffer``: ``[layer, size + page_size, head_num, head_dim]`` of the store dtype."""

    name: str
    buffer: torch.Tensor
    head_num: int
    head_dim: int


class LayerTransferCounter(Protocol):
    """Whoever knows which layers of a running load have arrived."""

    def wait_until(self, threshold: int) -> None:
        """Let the current stream wait for layer ``threshold`` (counted from 0 in this pool)."""
        ...


class KVCache:
    """Base of the device pools: planes, getters' waits, launches.

    Attributes:
        size: slots that can be handed out; ``page_size``: slots a page.
        dtype: what callers see; ``store_dtype``: what is stored (fp8 as uint8).
        start_layer, end_layer: the model's layers held here; ``layer_num`` of them.
        planes: the buffers.

    Raises:
        InvalidArgument: an extent below 1, or ``end_layer`` that does not fit ``layer_num``.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str,
        widths: Sequence[tuple[str, int, int]],
        start_layer: int | None = None,
        end_layer: int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """``widths``: (name, head_num, head_dim) of each plane."""
        extents = {"size": size, "page_size": page_size, "layer_num": layer_num}
        for name, heads, dim in widths:
            extents |= {f"{name} heads": heads, f"{name} width": dim}
        for what, value in extents.items():
            if value < 1:
                raise InvalidArgument(
                    f"{what}={value} of {type(self).__name__}: expected 1 or more"
                )
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.store_dtype = torch.uint8 if dtype in FP8 else dtype
        self.layer_num = layer_num
        self.device = device
        self.start_layer = start_layer or 0
        self.end_layer = self.start_layer + layer_num - 1 if end_layer is None else end_layer
        if self.end_layer - self.start_layer + 1 != layer_num:
            raise InvalidArgument(
                f"layers {self.start_layer} to {self.end_layer}: expected {layer_num} of them"
            )
        self.runtime: Runtime = runtime or ImmediateRuntime()
        self.layer_transfer_counter: LayerTransferCounter | None = None
        self.planes = tuple(
            Plane(
                name,
                torch.zeros(
                    (layer_num, size + page_size, heads, dim),
                    dtype=self.store_dtype,
                    device=device,
                ),
                heads,
                dim,
            )
            for name, heads, dim in widths
        )
        self._create_buffers()

    def _create_buffers(self) -> None:
        """Name the planes' per-layer views as SGLang does."""
        views = [layer for plane in self.planes for layer in plane.buffer]
        self.data_ptrs = torch.tensor(
            [v.data_ptr() for v in views], dtype=torch.uint64, device=self.device
        )
        self.data_strides = torch.tensor(
            [v[0].numel() * v.element_size() for v in views], device=self.device
        )

    def register_layer_transfer_counter(self, counter: LayerTransferCounter | None) -> None:
        """From now on every getter waits on ``counter`` for its layer."""
        self.layer_transfer_counter = counter

    def get_kv_size_bytes(self) -> int:
        """Bytes of all planes."""
        return sum(p.buffer.numel() * p.buffer.element_size() for p in self.planes)

    def region(self, plane: int, layer_id: int, slots: torch.Tensor | range | int) -> Region:
        """The cells of one (plane, model layer), to name in a launch."""
        return Region(self, plane, self._local(layer_id), slots)

    def _local(self, layer_id: int) -> int:
        if not self.start_layer <= layer_id <= self.end_layer:
            raise InvalidArgument(
                f"layer {layer_id}: this pool holds layers {self.start_layer} to {self.end_layer}"
            )
        return layer_id - self.start_layer

    def _wait(self, layer_id: int) -> None:
        local = self._local(layer_id)
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(local)

    def _view(self, plane: int, layer_id: int) -> torch.Tensor:
        view = self.planes[plane].buffer[self._local(layer_id)]
        return view if self.store_dtype == self.dtype else view.view(self.dtype)

    def _write(self, layer: Any, loc: torch.Tensor, *rows: tuple[torch.Tensor, ...]) -> None:
        """Launch ``plane[layer][loc] = rows`` for every plane; ``layer`` has or is a layer id.

        The rows of a plane may come in parts, side by side; they are read when the launch runs.
        """
        layer_id: int = getattr(layer, "layer_id", layer)
        for plane, parts in zip(self.planes, rows, strict=True):
            seen = (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))
            if seen != (len(loc), plane.head_num, plane.head_dim):
                raise InvalidArgument(
                    f"{plane.name} rows of shape {seen}: expected "
                    f"{(len(loc), plane.head_num, plane.head_dim)}"
                )
        slots = self.size + self.page_size
        if loc.device.type == "cpu" and len(loc):
            low, high = (int(bound) for bound in loc.aminmax())
            if not 0 <= low <= high < slots:
                raise InvalidSlot(f"slots {low} to {high}: expected 0 to {slots - 1}")
        local = self._local(layer_id)

        def run() -> None:
            for plane, parts in zip(self.planes, rows, strict=True):
                row = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
                plane.buffer[local][loc] = row.to(self.dtype).view(self.store_dtype)

        regions = [self.region(plane, layer_id, loc) for plane in range(len(self.planes))]
        self.runtime.launch("set_kv_buffer", run, writes=regions)


class MHATokenToKVPool(KVCache):
    """K and V of multi-head (or grouped-query) attention; ``v_head_dim`` defaults to ``head_dim``.

    ``k_buffer[l]`` and ``v_buffer[l]`` are views ``[size + page_size, head_num, dim]``.
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
        start_layer: int | None = None,
        end_layer: int | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """``enable_memory_saver`` is accepted for SGLang's callers and not modelled."""
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        widths = [("k", head_num, head_dim), ("v", head_num, self.v_head_dim)]
        super().__init__(
            size, page_size, dtype, layer_num, device, widths, start_layer, end_layer, runtime
        )

    def _create_buffers(self) -> None:
        super()._create_buffers()
        self.k_buffer, self.v_buffer = (list(plane.buffer) for plane in self.planes)
        self.k_data_ptrs = self.data_ptrs[: self.layer_num]
        self.v_data_ptrs = self.data_ptrs[self.layer_num :]

    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Write the rows of some tokens of one layer, as one launch.

        Args:
            layer: a layer id, or an object with ``layer_id``.
            loc: integer ``[n]``, device slots.
            cache_k, cache_v: ``[n, head_num, head_dim]`` and ``[n, head_num, v_head_dim]``; read
                when the launch runs; converted to the pool's dtype.

        Raises:
            InvalidArgument, InvalidSlot: before anything is launched.
        """
        self._write(layer, loc, (cache_k,), (cache_v,))

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
        runtime: Runtime | None = None,
    ) -> None:
        """``enable_memory_saver`` is accepted for SGLang's callers and not modelled."""
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_cache_dim = kv_lora_rank + qk_rope_head_dim
        widths = [("kv", 1, self.kv_cache_dim)]
        super().__init__(
            size, page_size, dtype, layer_num, device, widths, start_layer, end_layer, runtime
        )

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
