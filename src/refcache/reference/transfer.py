"""Copies between the tiers: ``backup_all_layer`` (device to host), ``load_per_layer`` (back).

A transfer is a set of (host slot, device slot) pairs: item i moves between ``host_indices[i]`` and
``device_indices[i]``. The result does not depend on the order of the pairs, nor on splitting or
merging transfers; no slot may appear twice on the written side. A pair with a negative slot on
either side is skipped: -1 is what the allocation ops write where there is no space. K and V (or
MLA's one plane) are *planes*; each has its own row width.

Buffers: ``host`` is one tensor a plane, in ``layout`` (see :mod:`refcache.reference.layout`).
``device`` is either the *stacked* form, one tensor ``[layer, slot, head, dim]`` a plane, or the
*list* form, ``planes * layers`` tensors ``[slot, head, dim]``, plane-major.

The buffers may be on different devices; each index tensor is moved to where it is needed, so these
functions also serve where host memory cannot be read by a kernel (they block until the bytes are
there).
"""

from collections.abc import Sequence

import torch

from refcache.errors import InvalidArgument, InvalidSlot
from refcache.reference.layout import Layout

# By how much ``load_layers`` raises a layer's flag: more than the parts any launch is cut into, so
# that a kernel can add it piece by piece and a half-done layer never reaches the next epoch.
FLAG_EPOCH = 1 << 32


def device_rows(
    device: Sequence[torch.Tensor], planes: int, plane: int, layer: int
) -> torch.Tensor:
    """The view ``[slot, head, dim]`` of one (plane, layer), in either form of ``device``."""
    if len(device) == planes and device[plane].dim() == 4:
        return device[plane][layer]
    return device[plane * (len(device) // planes) + layer]


def layer_buffers(
    device: Sequence[torch.Tensor], planes: int, layer: int
) -> tuple[Sequence[torch.Tensor], int]:
    """The buffers that hold a layer, and of how many layers a plane has a buffer each (else 1).

    Of the list form the layer's planes alone, so that a call looks at nothing else.

    Raises:
        InvalidArgument: the list has no such layer.
    """
    layers = len(device) // max(1, planes)
    if layers < 2 or layers * planes != len(device) or device[0].dim() != 3:
        return device, 1
    check_layers(layer, 1, layers)
    return [device[plane * layers + layer] for plane in range(planes)], layers


def check_dtype(dtype: torch.dtype) -> None:
    """Raise InvalidArgument unless KV can be of this dtype: real numbers of whole bytes.

    Rows are moved as bytes, so any floating point type and any integer of whole bytes will do.
    """
    if not (dtype.is_floating_point or dtype in _INTEGERS):
        raise InvalidArgument(
            f"buffers of {dtype}: expected a floating point type or an integer of whole bytes"
        )


_INTEGERS = (
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.bool,
)  # fmt: skip


def check_programs(max_programs: int) -> None:
    """Raise InvalidArgument for a negative cap on the programs of a copy; 0 is no cap."""
    if max_programs < 0:
        raise InvalidArgument(f"max_programs={max_programs}: expected 0 (no cap) or more")


def check_pairs(host_indices: torch.Tensor, device_indices: torch.Tensor) -> None:
    """Raise InvalidArgument unless the index tensors can be the pairs of a transfer."""
    for what, index in (("host_indices", host_indices), ("device_indices", device_indices)):
        if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
            raise InvalidArgument(
                f"{what}: {index.dtype} of shape {tuple(index.shape)}; expected int32 or int64 [n]"
            )
    if host_indices.shape != device_indices.shape:
        raise InvalidArgument(
            f"{len(host_indices)} host_indices and {len(device_indices)} device_indices: "
            "expected as many of each"
        )


def check_buffers(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    page_size: int,
    layout: str,
    *,
    one_layer: bool = False,
) -> list[Layout]:
    """The host layout of each plane, after a check of every buffer's dtype, shape and strides.

    ``one_layer``: ``device`` may also be one layer's planes alone, ``[slot, head, dim]`` each.

    Raises:
        InvalidArgument, UnknownName: buffers that cannot hold the same rows.
    """
    for buffer in host:
        check_dtype(buffer.dtype)
    layouts = [Layout.of_buffer(layout, buffer, page_size) for buffer in host]
    if not layouts or not device or len(device) % len(layouts):
        raise InvalidArgument(
            f"{len(device)} device buffers for {len(layouts)} host planes: expected one a plane, "
            "or one a plane and layer"
        )
    per_plane = len(device) // len(layouts)
    if len({t.dim() for t in device}) > 1 or (per_plane > 1 and device[0].dim() == 4):
        raise InvalidArgument(
            f"device buffers of {[t.dim() for t in device]} dimensions for {len(layouts)} host "
            "planes: expected [layer, slot, head, dim] a plane, or [slot, head, dim] everywhere"
        )
    for i, tensor in enumerate(device):
        want = layouts[i // per_plane]
        row = (want.head_num, want.head_dim)
        if tensor.dtype != host[0].dtype or tensor.requires_grad:
            raise InvalidArgument(
                f"device buffer {i} of {tensor.dtype}, requires_grad={tensor.requires_grad}: "
                f"expected {host[0].dtype} as on the host, without grad"
            )
        if tensor.dim() not in (3, 4) or tuple(tensor.shape[-2:]) != row:
            raise InvalidArgument(
                f"device buffer {i} of shape {tuple(tensor.shape)}: expected rows {row}, "
                "as [layer, slot, head, dim] or [slot, head, dim]"
            )
        layers = tensor.shape[0] if tensor.dim() == 4 else per_plane
        if layers != want.layer_num and not (one_layer and per_plane == 1 and tensor.dim() == 3):
            raise InvalidArgument(
                f"{layers} device layers for {want.layer_num} host layers: expected as many"
            )
        if tensor.stride()[-2:] != (row[1], 1):
            raise InvalidArgument(
                f"device buffer {i} with strides {tensor.stride()}: expected contiguous rows"
            )
    if any(buffer.dtype != host[0].dtype or buffer.requires_grad for buffer in host):
        raise InvalidArgument(f"host buffers of {[b.dtype for b in host]}: expected one dtype")
    if len({where.size for where in layouts}) != 1:
        raise InvalidArgument(f"host planes of {[w.size for w in layouts]} slots: expected as many")
    return layouts


def _pairs(
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    host: torch.Tensor,
    device: torch.Tensor,
    host_slots: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs that move, int64, each side on the device of its buffers."""
    check_pairs(host_indices, device_indices)
    on_host = host_indices.to(host.device, torch.int64)
    on_device = device_indices.to(device.device, torch.int64)
    moved = (on_host >= 0) & (on_device >= 0).to(on_host.device)
    on_host, on_device = on_host[moved], on_device[moved.to(on_device.device)]
    for what, slots, size in (
        ("host_indices", on_host, host_slots),
        ("device_indices", on_device, device.shape[-3]),
    ):
        if len(slots) and int(slots.max()) >= size:
            raise InvalidSlot(
                f"{what} up to {int(slots.max())}: expected {size - 1} at most, or a negative "
                "one for a pair that is skipped"
            )
    return on_host, on_device


def backup_all_layer(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    page_size: int,
    layout: str,
) -> None:
    """Copy every layer of device slot ``device_indices[i]`` into host slot ``host_indices[i]``.

    Writes ``host``; reads ``device``. Indices: int32 or int64 ``[n]``, each in its own dtype; a
    pair with a negative slot is skipped.

    Raises:
        InvalidArgument, UnknownName: shapes, dtypes or layout that do not fit.
        InvalidSlot: a slot behind the last one.
    """
    layouts = check_buffers(host, device, page_size, layout)
    to, source = _pairs(host_indices, device_indices, host[0], device[0], layouts[0].size)
    for plane, where in enumerate(layouts):
        for layer in range(where.layer_num):
            rows = device_rows(device, len(host), plane, layer).view(torch.uint8)[source]
            target = where.rows(host[plane], layer).view(torch.uint8)
            target[to // page_size, to % page_size] = rows.to(target.device)


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
        InvalidArgument, UnknownName, InvalidSlot: as :func:`backup_all_layer`.
    """
    device, layers = layer_buffers(device, len(host), layer_id)
    layouts = check_buffers(host, device, page_size, layout, one_layer=True)
    check_layers(layer_id, 1, layouts[0].layer_num)
    check_list(layers, layouts[0].layer_num)
    source, to = _pairs(host_indices, device_indices, host[0], device[0], layouts[0].size)
    for plane, where in enumerate(layouts):
        source_rows = where.rows(host[plane], layer_id).view(torch.uint8)
        rows = source_rows[source // page_size, source % page_size]
        target = device[plane][layer_id] if device[plane].dim() == 4 else device[plane]
        target.view(torch.uint8)[to] = rows.to(target.device)


def load_layers(
    device: Sequence[torch.Tensor],
    host: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_flags: torch.Tensor,
    first_layer: int,
    layer_num: int,
    page_size: int,
    layout: str,
) -> None:
    """:func:`load_per_layer` for ``layer_num`` layers from ``first_layer`` on, each one announced.

    When layer ``l`` has arrived, ``layer_flags[l]`` (int64, one a layer of the pool, on the
    device) has grown by ``FLAG_EPOCH``. It is never reset: whoever waits for the k-th load through
    a set of flags waits for ``k * FLAG_EPOCH``, which no earlier load can satisfy.

    Raises:
        InvalidArgument, UnknownName, InvalidSlot: as :func:`backup_all_layer`.
    """
    layouts = check_buffers(host, device, page_size, layout)
    check_pairs(host_indices, device_indices)
    check_layers(first_layer, layer_num, layouts[0].layer_num)
    check_flags(layer_flags, layouts[0].layer_num)
    for layer in range(first_layer, first_layer + layer_num):
        load_per_layer(device, host, host_indices, device_indices, layer, page_size, layout)
        layer_flags[layer] += FLAG_EPOCH


def check_layers(first: int, count: int, layer_num: int) -> None:
    """Raise InvalidArgument unless layers first .. first + count - 1 exist."""
    if not 0 <= first <= first + count <= layer_num or count < 0:
        raise InvalidArgument(
            f"{count} layers from layer_id={first} on: expected some of 0 to {layer_num - 1}"
        )


def check_list(layers: int, layer_num: int) -> None:
    """Raise InvalidArgument unless a list of buffers has one for each layer of the host, or is of
    one layer alone."""
    if layers not in (1, layer_num):
        raise InvalidArgument(
            f"{layers} device layers for {layer_num} host layers: expected as many"
        )


def check_flags(layer_flags: torch.Tensor, layer_num: int) -> None:
    """Raise InvalidArgument unless ``layer_flags`` is contiguous int64 ``[layer_num]``."""
    if layer_flags.shape != (layer_num,) or layer_flags.dtype != torch.int64:
        raise InvalidArgument(
            f"layer_flags: {layer_flags.dtype} of shape {tuple(layer_flags.shape)}; "
            f"expected int64 {[layer_num]}"
        )
    if not layer_flags.is_contiguous():
        raise InvalidArgument("layer_flags that is not contiguous: expected contiguous memory")
