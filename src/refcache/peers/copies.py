"""The engine's copy kernels, each call one launch on the simulated machine with its regions.

``sgl_kernel.kvcacheio`` has one function a layout, backend and kind of pool. They all mean the
same: row ``src_indices[i]`` of some buffers goes to row ``dst_indices[i]`` of others. A buffer is
named by a layer's tensor, by a whole plane (all layers, or the layer ``layer_id`` of it), or by a
table of addresses, one a layer. So one function serves them all: it finds out from addresses which
pool, plane and layer each buffer is (:func:`register`), and issues the copy. Bytes and indices are
read when the launch runs.

The launch keeps its index tensors alive: an engine's own ``record_stream`` calls are behind
``is_cuda`` and never made on a CPU. Strides and sizes that the engine passes are not looked at.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.peers import device
from refcache.runtime import Region


@dataclass(frozen=True)
class Buffer:
    """One layer of one plane of a pool: a view ``[slots, ...]``, or ``[pages, P, ...]``."""

    pool: Any
    plane: int
    layer: int
    rows: torch.Tensor
    paged: bool

    def region(self, slots: torch.Tensor) -> Region:
        return Region(self.pool, self.plane, self.layer, slots)

    def place(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The index of these slots' rows."""
        size = self.rows.shape[1]
        return (slots // size, slots % size) if self.paged else (slots,)


_layers: dict[int, Buffer] = {}
_planes: dict[int, list[Buffer]] = {}


def register(pool: Any, planes: Sequence[Sequence[torch.Tensor]], paged: bool = False) -> None:
    """Make a pool known: ``planes[p][layer]`` is a view of the rows, ``paged`` or by slot."""
    for number, layers in enumerate(planes):
        buffers = [Buffer(pool, number, i, rows, paged) for i, rows in enumerate(layers)]
        for buffer in buffers:
            _layers[buffer.rows.data_ptr()] = buffer
        _planes[buffers[0].rows.data_ptr()] = buffers


def forget() -> None:
    """Forget every pool: their addresses may be used again."""
    _layers.clear()
    _planes.clear()


def kernel(name: str) -> Callable[..., None]:
    """The copy kernel of that name; called with keywords, as engines do."""

    def transfer(
        *, src_indices: torch.Tensor, dst_indices: torch.Tensor, layer_id: int = -1, **given: Any
    ) -> None:
        sources, targets = (
            [
                buffer
                for key, value in given.items()
                if key.startswith(side) and isinstance(value, (torch.Tensor, list, tuple))
                for buffer in _buffers(value, layer_id)
            ]
            for side in ("src", "dst")
        )

        def run() -> None:
            for source, target in zip(sources, targets, strict=True):
                rows = source.rows[source.place(src_indices)]
                target.rows[target.place(dst_indices)] = rows

        layers = sorted({target.layer for target in targets})
        device.machine().launch(
            f"{name}, layers {layers}",
            run,
            reads=[source.region(src_indices) for source in sources],
            writes=[target.region(dst_indices) for target in targets],
        )

    transfer.__name__ = name
    return transfer


def _buffers(value: Any, layer_id: int) -> list[Buffer]:
    """What an argument names: a list of arguments, a table of addresses, a layer, or a plane."""
    if isinstance(value, (list, tuple)):
        return [buffer for one in value for buffer in _buffers(one, layer_id)]
    if value.dtype == torch.uint64:
        return [_find(address) for address in value.tolist()]
    first = _find(value.data_ptr())
    if value.numel() == first.rows.numel():
        return [first]
    plane = _planes[value.data_ptr()]
    return plane if layer_id < 0 else [plane[layer_id]]


def _find(address: int) -> Buffer:
    if address not in _layers:
        raise InvalidArgument(f"a copy names address {address:#x}, where no pool has a buffer")
    return _layers[address]
