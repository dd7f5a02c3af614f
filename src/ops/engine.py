"""Copies of pages by the copy engine, listed once for all layers and issued layer by layer.

A *run* is as many pairs as lie together on both sides: a page, or several that are neighbours here
and there. Where a layer of a page is one piece on the host (``layer_first``,
``page_first_direct``) a run is one copy; elsewhere each row (``page_first``) or head of a row
(``page_head``) is. The lists are made by a few tensor operations, whatever their length; one driver
call issues a layer. No kernel runs, so the model beside is not slowed; short copies are slow
(docs/performance.md).

Backups into the other two layouts are staged (:mod:`refcache_ops.staged`): gathered on the device
first, their pages are long pieces on the host.

Index tensors are on the CPU. Safe to call from any host thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from refcache.errors import InvalidArgument
from refcache.reference.layout import Layout
from refcache.reference.transfer import check_buffers, check_layers, check_pairs, device_rows
from refcache_ops import staged
from refcache_ops.driver import copy_many


class PlaneCopies(NamedTuple):
    """The copies of one plane in its first layer, and how they move on with the layer.

    Attributes:
        at_host, at_device: int64 ``[copy]``: bytes from where the plane, or the layer, begins.
        sizes: int64 ``[copy]``: bytes.
        host: address of the plane; ``host_step``: bytes from one layer of it to the next.
        device: addresses of the layers.
    """

    at_host: torch.Tensor
    at_device: torch.Tensor
    sizes: torch.Tensor
    host: int
    host_step: int
    device: tuple[int, ...]


class Copies(NamedTuple):
    """The copies of every layer; a layer's addresses are made when it is issued.

    So the first layer is on its way before the last is listed.

    Attributes:
        planes: of each plane, what is the same in all layers.
        sizes: int64 ``[copy]``: bytes, of the planes together; the same for each layer.
        layer_num: how many layers there are.
        on: of the device side.
    """

    planes: tuple[PlaneCopies, ...]
    sizes: torch.Tensor
    layer_num: int
    on: torch.device

    def issue(self, layer: int, *, to_host: bool) -> None:
        """Issue the copies of one layer on the current stream.

        Raises:
            DriverError: a copy was refused; earlier ones may have been issued.
        """
        on_host = torch.cat([p.at_host + (p.host + layer * p.host_step) for p in self.planes])
        on_device = torch.cat([p.at_device + p.device[layer] for p in self.planes])
        target, source = (on_host, on_device) if to_host else (on_device, on_host)
        copy_many(target, source, self.sizes, self.on)


def list_copies(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    page_size: int,
    layout: str,
) -> Copies:
    """The copies between these buffers (as for the ops); pairs with a negative slot are left out.

    Raises:
        InvalidArgument, UnknownName: as the ops; also for host memory that is not pinned, and for
            indices that are not on the CPU.
    """
    check_pairs(host_indices, device_indices)
    layouts = check_buffers(host, device, page_size, layout)
    if not all(buffer.is_pinned() for buffer in host):
        raise InvalidArgument("the copy engine on host memory that is not pinned: pin it")
    if host_indices.is_cuda or device_indices.is_cuda:
        raise InvalidArgument('io_backend="direct" with indices on the device: expected the CPU')
    there = (host_indices >= 0) & (device_indices >= 0)
    pairs = host_indices[there].long(), device_indices[there].long()
    layer_num = layouts[0].layer_num
    runs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    planes = tuple(
        _of_plane(where, buffer, _device_layers(device, len(host), plane, layer_num), *pairs, runs)
        for plane, (where, buffer) in enumerate(zip(layouts, host, strict=True))
    )
    return Copies(planes, torch.cat([p.sizes for p in planes]), layer_num, device[0].device)


def backup_all_layer(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    page_size: int,
    layout: str,
) -> None:
    """As the op, by the copy engine; see :func:`list_copies`."""
    if layout in staged.LAYOUTS:
        staged.backup_all_layer(host, device, host_indices, device_indices, page_size, layout)
        return
    copies = list_copies(host, device, host_indices, device_indices, page_size, layout)
    for layer in range(copies.layer_num):
        copies.issue(layer, to_host=True)


def load_per_layer(
    device: Sequence[torch.Tensor],
    host: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
    layout: str,
) -> None:
    """As the op, by the copy engine; for more than one layer keep what :func:`list_copies` gives.

    ``device``: all layers.
    """
    copies = list_copies(host, device, host_indices, device_indices, page_size, layout)
    check_layers(layer_id, 1, copies.layer_num)
    copies.issue(layer_id, to_host=False)


def copy_bytes(
    layout: str, page_size: int, layer_num: int, row: int, heads: int = 1, *, to_host: bool
) -> int:
    """The bytes of each copy, at least, for whole pages; ``row``: bytes of a row of one layer."""
    if to_host and layout in staged.LAYOUTS:
        return staged.run_bytes(layout, page_size, layer_num, row)
    pieces = {"page_first": row, "page_head": row // heads}
    return pieces.get(layout, row * page_size)


class _Layers(NamedTuple):
    """A plane on the device: the address of each layer, and elements from a slot to the next."""

    addresses: tuple[int, ...]
    slot_stride: int


def _device_layers(
    device: Sequence[torch.Tensor], planes: int, plane: int, layer_num: int
) -> _Layers:
    """Where the layers of a plane are, in either form of ``device``.

    Raises:
        InvalidArgument: they differ in strides.
    """
    if len(device) == planes and device[plane].dim() == 4:
        whole = device[plane]
        step = whole.stride(0) * whole.element_size()
        first = whole.data_ptr()
        return _Layers(tuple(first + i * step for i in range(layer_num)), whole.stride(1))
    layers = [device_rows(device, planes, plane, layer) for layer in range(layer_num)]
    if len({rows.stride(0) for rows in layers}) != 1:
        raise InvalidArgument("layers of a plane that differ in strides: expected one stride")
    return _Layers(tuple(rows.data_ptr() for rows in layers), layers[0].stride(0))


def _of_plane(
    where: Layout,
    host: torch.Tensor,
    device: _Layers,
    host_slots: torch.Tensor,
    device_slots: torch.Tensor,
    runs: dict[int, tuple[torch.Tensor, torch.Tensor]],
) -> PlaneCopies:
    """The copies of one plane. ``runs``: those found so far, by what ends a run: planes share."""
    item, row = host.element_size(), where.head_num * where.head_dim
    apart = where.head_num > 1 and where.head_stride != where.head_dim  # heads, on the host
    if not apart and where.slot_stride == device.slot_stride == row:
        ends = 0 if where.page_stride == where.page_size * where.slot_stride else where.page_size
        if ends not in runs:
            runs[ends] = _runs(ends, host_slots, device_slots)
        starts, rows = runs[ends]
        host_slots, device_slots = host_slots[starts], device_slots[starts]
    else:
        rows = torch.ones_like(host_slots)
    page = host_slots // where.page_size
    at_host = page * where.page_stride + host_slots % where.page_size * where.slot_stride
    at_device = device_slots * device.slot_stride
    sizes = rows * row
    if apart:
        heads = torch.arange(where.head_num)[:, None]
        at_host = (at_host + heads * where.head_stride).flatten()
        at_device = (at_device + heads * where.head_dim).flatten()
        sizes = torch.full_like(at_host, where.head_dim)
    return PlaneCopies(
        at_host * item, at_device * item, sizes * item,
        host.data_ptr(), where.layer_stride * item, device.addresses,
    )  # fmt: skip


def _runs(
    page_size: int, host_slots: torch.Tensor, device_slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where runs of pairs start in the list, and their lengths.

    ``page_size``: of pages that no run crosses; 0: pages lie one behind another.
    """
    first = torch.ones(len(host_slots), dtype=torch.bool)
    next_ = (host_slots[1:] == host_slots[:-1] + 1) & (device_slots[1:] == device_slots[:-1] + 1)
    if page_size:
        next_ &= host_slots[1:] % page_size != 0
    torch.logical_not(next_, out=first[1:])
    starts = first.nonzero().flatten()
    return starts, torch.diff(starts, append=torch.tensor([len(first)]))
