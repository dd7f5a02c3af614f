"""From tensors to strides: what the row-copy kernel needs to know of the two tiers.

Both tiers are described alike: for each plane a base address and four strides, so the place of
(slot, layer, head) is the formula of :mod:`refcache.reference.layout`, on the device with pages of
one slot. The device side may instead be a table of addresses, one a layer.

Everything is counted in *units*: the largest power of two up to 16 bytes that divides every
address, stride and row of a plane. A row of any size and alignment is a whole number of units.
A plan is made, and every shape checked, once a geometry; later calls look it up. Threads may plan
at once: a plan is known by itself, not by a number that two of them could be given, and two equal
plans do no harm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from refcache.errors import InvalidArgument
from refcache.reference.layout import Layout
from refcache.reference.transfer import check_buffers, check_list, check_pairs, layer_buffers

Strides = tuple[int, int, int]  # page, slot, head


@dataclass(frozen=True, eq=False)
class Plan:
    """Per plane, in units of ``unit`` bytes. Equal to itself only, so that it can be a key.

    Attributes:
        unit: bytes a unit: 1, 2, 4, 8 or 16.
        row: units a row.
        run: units that lie together on the host: a row, or one head of it.
        host, device: strides of a page, a slot and a head; of the model's geometry.
        host_layer, device_layer: strides of a layer; they grow with the pool.
        page: slots a page in the host formula (1 where pages make no difference).
        layers: of the pool.
        table: the device side is a table of addresses, one a layer.
        layers_inside: on the host, all layers of a slot (or page) lie together.
    """

    unit: tuple[int, ...]
    row: tuple[int, ...]
    run: tuple[int, ...]
    host: tuple[Strides, ...]
    device: tuple[Strides, ...]
    host_layer: tuple[int, ...]
    device_layer: tuple[int, ...]
    page: tuple[int, ...]
    layers: int
    table: bool
    layers_inside: bool


class Transfer(NamedTuple):
    """A plan and its tensors: per plane one host buffer, and one device buffer or address table."""

    plan: Plan
    host: tuple[torch.Tensor, ...]
    device: tuple[torch.Tensor, ...]


_plans: dict[Any, Plan] = {}  # of a geometry


def plan_transfer(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    page_size: int,
    layout: str,
    layer_id: int | None = None,
) -> Transfer:
    """The plan of a transfer, with its tensors; ``layer_id``: of the one layer to move.

    Raises:
        InvalidArgument, UnknownName: as the reference; also for indices that are not on the device
            of ``device``, and for layers of a plane that differ in strides.
    """
    check_pairs(host_indices, device_indices)
    planes, layers = len(host), 1
    one_layer = layer_id is not None
    if layer_id is not None:
        device, layers = layer_buffers(device, planes, layer_id)
    key = (
        layout, page_size, one_layer, planes,
        *[
            (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15, t.requires_grad)
            for t in (*host, *device)
        ],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        layouts = check_buffers(host, device, page_size, layout, one_layer=one_layer)
        plan = _plans.setdefault(key, _make_plan(layouts, host, device))
    check_list(layers, plan.layers)
    where = device[0].device
    if host_indices.device != where or device_indices.device != where:
        raise InvalidArgument(
            f"indices on {host_indices.device} and {device_indices.device}: expected both on "
            f"{where}"
        )
    if plan.table:
        table = _table(tuple(t.data_ptr() for t in device), device[0].device)
        return Transfer(plan, tuple(host), table.view(planes, plan.layers).unbind())
    return Transfer(plan, tuple(host), tuple(device))


def _make_plan(
    layouts: Sequence[Layout], host: Sequence[torch.Tensor], device: Sequence[torch.Tensor]
) -> Plan:
    per_plane = len(device) // len(layouts)
    if len({t.device for t in device}) != 1 or len({h.device for h in host}) != 1:
        raise InvalidArgument("buffers of one tier on several devices: expected one device a tier")
    units, rows, runs, host_strides, device_strides = [], [], [], [], []
    pages = []
    for plane, where in enumerate(layouts):
        layers = device[plane * per_plane : (plane + 1) * per_plane]
        if len({t.stride() for t in layers}) != 1:
            raise InvalidArgument(f"layers of plane {plane} differ in strides: expected one stride")
        item = layers[0].element_size()
        apart = where.head_num > 1 and where.head_stride != where.head_dim  # heads, on the host
        paged = where.page_stride != where.page_size * where.slot_stride
        pages.append(where.page_size if paged else 1)
        on_host = (
            where.page_stride if paged else where.slot_stride,
            where.slot_stride if paged else 0,
            where.head_stride if apart else 0,
            where.layer_stride,
        )
        on_device = (
            layers[0].stride(-3),
            0,
            where.head_dim if apart else 0,
            layers[0].stride(0) if layers[0].dim() == 4 else 0,
        )
        run = where.head_dim if apart else where.head_num * where.head_dim
        addresses = [t.data_ptr() for t in (host[plane], *layers)]
        unit = math.gcd(16, *addresses, *(item * s for s in (run, *on_host, *on_device)))
        units.append(unit)
        rows.append(where.head_num * where.head_dim * item // unit)
        runs.append(run * item // unit)
        host_strides.append(_in_units(on_host, item, unit))
        device_strides.append(_in_units(on_device, item, unit))
    return Plan(
        tuple(units), tuple(rows), tuple(runs),
        tuple(s[:3] for s in host_strides), tuple(s[:3] for s in device_strides),
        tuple(s[3] for s in host_strides), tuple(s[3] for s in device_strides),
        tuple(pages), layouts[0].layer_num, per_plane > 1, layouts[0].name != "layer_first",
    )  # fmt: skip


def _in_units(strides: Sequence[int], item: int, unit: int) -> tuple[int, int, int, int]:
    page, slot, head, layer = (s * item // unit for s in strides)
    return page, slot, head, layer


_tables: dict[Any, torch.Tensor] = {}


def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The addresses on the device. Kept for good: a kernel of any stream may still be going to read
    the table, and a captured graph reads it at every replay."""
    key = (addresses, device)
    table = _tables.get(key)
    if table is not None:
        return table
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise InvalidArgument(
            f"a list of {len(addresses)} device buffers inside a CUDA graph capture: their table "
            "of addresses is made by a blocking copy; make the call once before, or pass stacked "
            "buffers"
        )
    table = torch.tensor(addresses, dtype=torch.int64, device=device)
    return _tables.setdefault(key, table)
