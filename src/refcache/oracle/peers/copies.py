"""The engine's copy kernels, each one a launch on the simulated machine with its regions.

A kernel gets buffers (tensors, or tables of their addresses) and index tensors. Which pool, plane
and layer a buffer is follows from its address: a pool that takes part is registered by
:func:`register`. Only the meaning of a kernel is modelled (which rows go where), not its speed;
bytes are read, and indices too, when the launch runs. The launch keeps its
index tensors alive: an engine's own record_stream calls sit behind ``is_cuda`` and are never made.

Signatures are those of ``sgl_kernel.kvcacheio``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.oracle.peers import device
from refcache.runtime import Region

Rows = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Buffer:
    """One layer of one plane of a pool: ``rows`` is a view ``[slots, ...]`` in any layout."""

    pool: Any
    plane: int
    layer: int
    rows: torch.Tensor

    def region(self, slots: torch.Tensor) -> Region:
        return Region(self.pool, self.plane, self.layer, slots)


_by_address: dict[int, Buffer] = {}
_by_plane: dict[int, list[Buffer]] = {}


def register(pool: Any, planes: Sequence[Sequence[torch.Tensor]]) -> None:
    """Make a pool known: ``planes[p][layer]`` is a view ``[slots, heads, dim]`` of its bytes."""
    for number, layers in enumerate(planes):
        buffers = [Buffer(pool, number, layer, rows) for layer, rows in enumerate(layers)]
        for buffer in buffers:
            _by_address[buffer.rows.data_ptr()] = buffer
        _by_plane[buffers[0].rows.data_ptr()] = buffers


def forget() -> None:
    """Forget every pool: their addresses may be used again."""
    _by_address.clear()
    _by_plane.clear()


def _layer(tensor: torch.Tensor) -> Buffer:
    found: Buffer = _find(_by_address, tensor.data_ptr())
    return found


def _layers(table: torch.Tensor) -> list[Buffer]:
    """A table of addresses, one a layer."""
    return [_find(_by_address, address) for address in table.tolist()]


def _plane(tensor: torch.Tensor) -> list[Buffer]:
    """A whole plane: its address is its first layer's."""
    found: list[Buffer] = _find(_by_plane, tensor.data_ptr())
    return found


def _find(known: Any, address: int) -> Any:
    if address not in known:
        raise InvalidArgument(f"a copy names address {address:#x}, where no pool has a buffer")
    return known[address]


def _copy(
    name: str,
    sources: Sequence[Buffer],
    targets: Sequence[Buffer],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
) -> None:
    """One launch: row ``src_indices[i]`` of each source to row ``dst_indices[i]`` of its target."""

    def run() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.rows[dst_indices] = source.rows[src_indices]

    device.machine().launch(
        name,
        run,
        reads=[source.region(src_indices) for source in sources],
        writes=[target.region(dst_indices) for target in targets],
    )


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_: Any,
) -> None:
    """One layer, both pools ``layer_first``."""
    sources, targets = [_layer(src_k), _layer(src_v)], [_layer(dst_k), _layer(dst_v)]
    _copy(f"load of layer {targets[0].layer}", sources, targets, src_indices, dst_indices)


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """One layer, from a ``page_first`` host pool."""
    sources = [_plane(src_k)[layer_id], _plane(src_v)[layer_id]]
    targets = [_layer(dst_k), _layer(dst_v)]
    _copy(f"load of layer {layer_id}", sources, targets, src_indices, dst_indices)


def transfer_kv_per_layer_mla(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_: Any,
) -> None:
    """One layer of an MLA pool, both ``layer_first``."""
    target = _layer(dst)
    _copy(f"load of layer {target.layer}", [_layer(src)], [target], src_indices, dst_indices)


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """One layer of an MLA pool, from a ``page_first`` host pool."""
    source = _plane(src)[layer_id]
    _copy(f"load of layer {layer_id}", [source], [_layer(dst)], src_indices, dst_indices)


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers, both pools ``layer_first``; buffers are tables of addresses."""
    sources = _layers(src_k_layers) + _layers(src_v_layers)
    targets = _layers(dst_k_layers) + _layers(dst_v_layers)
    _copy("backup", sources, targets, src_indices, dst_indices)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers, to a ``page_first`` host pool."""
    sources = _layers(src_k_layers) + _layers(src_v_layers)
    _copy("backup", sources, _plane(dst_k) + _plane(dst_v), src_indices, dst_indices)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers of an MLA pool, both ``layer_first``."""
    _copy("backup", _layers(src_layers), _layers(dst_layers), src_indices, dst_indices)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers of an MLA pool, to a ``page_first`` host pool."""
    _copy("backup", _layers(src_layers), _plane(dst), src_indices, dst_indices)


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """The copy engine, either direction, both pools ``layer_first``."""
    sources, targets = [_layer(t) for t in src_layers], [_layer(t) for t in dst_layers]
    _copy("direct copy", sources, targets, src_indices, dst_indices)


KERNELS = tuple(name for name in dir() if name.startswith("transfer_kv"))
"""The kernels above."""


def missing(name: str) -> Callable[..., None]:
    """Any other kernel of that package: it imports, and refuses to be called."""

    def kernel(*_: Any, **__: Any) -> None:
        raise InvalidArgument(f"copy kernel {name} is not modelled: expected one of {KERNELS}")

    return kernel
