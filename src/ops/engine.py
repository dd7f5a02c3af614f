"""Copies of pages by the copy engine, listed for all layers at once and issued layer by layer.

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


class Copies(NamedTuple):
    """The copies of every layer.

    Attributes:
        on_host, on_device: int64 ``[layer, copy]``: addresses.
        sizes: int64 ``[copy]``: bytes; the same for each layer.
        device: of the device side.
    """

    on_host: torch.Tensor
    on_device: torch.Tensor
    sizes: torch.Tensor
    device: torch.device

    def issue(self, layer: int, *, to_host: bool) -> None:
        """Issue the copies of one layer on the current stream.

        Raises:
            DriverError: a copy was refused; earlier ones may have been issued.
        """
        sides = self.on_host[layer], self.on_device[layer]
        target, source = sides if to_host else sides[::-1]
        copy_many(target, source, self.sizes, self.device)


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
    layers = range(layouts[0].layer_num)
    lists = [
        _of_plane(where, buffer, [device_rows(device, len(host), plane, i) for i in layers], *pairs)
        for plane, (where, buffer) in enumerate(zip(layouts, host, strict=True))
    ]
    on_host, on_device, sizes = zip(*lists, strict=True)
    return Copies(
        torch.cat(on_host, 1), torch.cat(on_device, 1), torch.cat(sizes), device[0].device
    )


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
    for layer in range(len(copies.on_host)):
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
    check_layers(layer_id, 1, len(copies.on_host))
    copies.issue(layer_id, to_host=False)


def copy_bytes(
    layout: str, page_size: int, layer_num: int, row: int, heads: int = 1, *, to_host: bool
) -> int:
    """The bytes of each copy, at least, for whole pages; ``row``: bytes of a row of one layer."""
    if to_host and layout in staged.LAYOUTS:
        return staged.run_bytes(layout, page_size, layer_num, row)
    pieces = {"page_first": row, "page_head": row // heads}
    return pieces.get(layout, row * page_size)


def _of_plane(
    where: Layout,
    host: torch.Tensor,
    device: Sequence[torch.Tensor],
    host_slots: torch.Tensor,
    device_slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Addresses ``[layer, copy]`` on the host and on the device, and sizes ``[copy]``."""
    if len({rows.stride(0) for rows in device}) != 1:
        raise InvalidArgument("layers of a plane that differ in strides: expected one stride")
    item, row = host.element_size(), where.head_num * where.head_dim
    apart = where.head_num > 1 and where.head_stride != where.head_dim  # heads, on the host
    if not apart and where.slot_stride == device[0].stride(0) == row:
        starts, rows = _runs(where, host_slots, device_slots)
    else:
        starts = torch.arange(len(host_slots))
        rows = torch.ones_like(starts)
    host_slots, device_slots = host_slots[starts], device_slots[starts]
    page = host_slots // where.page_size
    at_host = page * where.page_stride + host_slots % where.page_size * where.slot_stride
    at_device = device_slots * device[0].stride(0)
    sizes = rows * row
    if apart:
        heads = torch.arange(where.head_num)[:, None]
        at_host = (at_host + heads * where.head_stride).flatten()
        at_device = (at_device + heads * where.head_dim).flatten()
        sizes = torch.full_like(at_host, where.head_dim)
    layers = torch.arange(where.layer_num)[:, None]
    bases = torch.tensor([rows.data_ptr() for rows in device])[:, None]
    return (
        (at_host + layers * where.layer_stride) * item + host.data_ptr(),
        at_device * item + bases,
        sizes * item,
    )


def _runs(
    where: Layout, host_slots: torch.Tensor, device_slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where runs of pairs start in the list, and their lengths."""
    first = torch.ones(len(host_slots), dtype=torch.bool)
    next_ = (host_slots[1:] == host_slots[:-1] + 1) & (device_slots[1:] == device_slots[:-1] + 1)
    if where.page_stride != where.page_size * where.slot_stride:
        next_ &= host_slots[1:] % where.page_size != 0
    torch.logical_not(next_, out=first[1:])
    starts = first.nonzero().flatten()
    return starts, torch.diff(starts, append=torch.tensor([len(first)]))
