"""Copies between the tiers: ``backup_all_layer`` (device to host), ``load_per_layer`` (back).

A transfer is a set of (host slot, device slot) pairs: item i moves between ``host_indices[i]`` and
``device_indices[i]``. The result does not depend on the order of the pairs, nor on splitting or
merging transfers; no slot may appear twice on the written side. K and V (or MLA's one plane) are
*planes*; each has its own row width.

Buffers: ``host`` is one tensor a plane, in ``layout`` (see :mod:`refcache.reference.layout`).
``device`` is either the *stacked* form, one tensor ``[layer, slot, head, dim]`` a plane, or the
*list* form, ``planes * layers`` tensors ``[slot, head, dim]``, plane-major.
"""

from collections.abc import Sequence

import torch

from refcache.errors import InvalidArgument
from refcache.reference.layout import Layout


def device_rows(
    device: Sequence[torch.Tensor], planes: int, plane: int, layer: int
) -> torch.Tensor:
    """The view ``[slot, head, dim]`` of one (plane, layer), in either form of ``device``."""
    if len(device) == planes and device[plane].dim() == 4:
        return device[plane][layer]
    return device[plane * (len(device) // planes) + layer]


def check_transfer(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
) -> None:
    """Raise InvalidArgument unless the arguments can be a transfer (shapes and dtypes only)."""
    for what, index in (("host_indices", host_indices), ("device_indices", device_indices)):
        if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(
                f"{what}: {index.dtype} of shape {tuple(index.shape)}; expected int32 or int64 [n]"
            )
    if len(host_indices) != len(device_indices):
        raise InvalidArgument(
            f"{len(host_indices)} host_indices and {len(device_indices)} device_indices: "
            "expected as many of each"
        )
    if not host or len(device) % len(host):
        raise InvalidArgument(
            f"{len(device)} device buffers for {len(host)} host planes: expected one a plane, "
            "or one a plane and layer"
        )
    for tensor in (*host, *device):
        if tensor.dtype != host[0].dtype:
            raise InvalidArgument(
                f"buffers of {host[0].dtype} and {tensor.dtype}: expected one dtype"
            )


def backup_all_layer(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    page_size: int,
    layout: str,
) -> None:
    """Copy every layer of device slot ``device_indices[i]`` into host slot ``host_indices[i]``.

    Writes ``host``; reads ``device``. Indices: int32 or int64 ``[n]``.

    Raises:
        InvalidArgument, UnknownName: shapes, dtypes or layout that do not fit.
    """
    check_transfer(host, device, host_indices, device_indices)
    to, source = host_indices.long(), device_indices.long()
    for plane, buffer in enumerate(host):
        where = Layout.of_buffer(layout, buffer, page_size)
        for layer in range(where.layer_num):
            rows = device_rows(device, len(host), plane, layer)
            where.rows(buffer, layer)[to // page_size, to % page_size] = rows[source].to(
                buffer.device
            )


def load_per_layer(
    device: Sequence[torch.Tensor],
    host: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
    layout: str,
) -> None:
    """Copy one layer of host slot ``host_indices[i]`` into device slot ``device_indices[i]``.

    Writes ``device``; reads ``host``. ``device`` may also be this layer's planes alone
    (``[slot, head, dim]``, one a plane). ``layer_id`` counts from 0 in this pool.

    Raises:
        InvalidArgument, UnknownName: shapes, dtypes or layout that do not fit.
    """
    check_transfer(host, device, host_indices, device_indices)
    source, to = host_indices.long(), device_indices.long()
    alone = len(device) == len(host) and device[0].dim() == 3
    for plane, buffer in enumerate(host):
        where = Layout.of_buffer(layout, buffer, page_size)
        if not 0 <= layer_id < where.layer_num:
            raise InvalidArgument(f"layer_id={layer_id}: expected 0 to {where.layer_num - 1}")
        rows = device[plane] if alone else device_rows(device, len(host), plane, layer_id)
        rows[to] = where.rows(buffer, layer_id)[source // page_size, source % page_size].to(
            rows.device
        )
