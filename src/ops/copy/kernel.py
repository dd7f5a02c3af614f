"""The row copy: one kernel for both directions, every layout, any row size and any planes.

Work is cut into tiles of ``BLOCK`` units of one (layer, plane). They are counted layer by layer; a
backup into a layout that keeps the layers of a slot together counts them tile by tile, so that
what is written at one time lies close. Program ``p`` of ``n`` takes tiles p, p + n, ... A tile is a
flat run of units over consecutive items, so rows that are no power of two waste no lanes. Indices
are widened to int64 before any product; an item with a negative index on either side is skipped.
The strides of a model's geometry are compile-time values; what grows with the pool, the distance
between layers, is not, so pools of every size share one kernel.

With ``SIGNAL`` each program adds its share of one epoch to a layer's flag once its last tile of the
layer is written: a release at system scope, behind a barrier of the program. The shares of a layer
sum to ``FLAG_EPOCH``, and no proper part of them does, so a waiting stream sees complete layers
only.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from refcache.reference.transfer import FLAG_EPOCH
from refcache_ops._launch import Type, Variant, interpreted, pointer_to, pointers
from refcache_ops.copy.plan import Plan, Transfer
from refcache_ops.driver import one_address

SMALL_BLOCK = 1024  # units a tile when programs are plenty
FLAG_BLOCK = 512  # when a small load raises flags: a layer is there sooner after its last byte
FLAG_UNITS = 1 << 22  # units of a load that is small in this sense
UNITS_A_WARP = 256
# When a cap leaves few programs. A load waits for the link: each keeps more bytes in flight. Writes
# are posted: beside a model more of them at a time cost it more than they bring.
LOAD_BLOCK = 8192
WRITE_BLOCK = 2048
WRITE_WARPS = 16
MAX_PROGRAMS = 128  # without a cap: more do not make the link faster


@triton.jit
def _pointer(  # type: ignore[no-untyped-def]
    base, slot, head, col, layer, layer_stride,
    STRIDES: tl.constexpr, PLANE: tl.constexpr,
    PAGE: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Pointers ``[BLOCK, words]`` to the unit ``col`` of (slot, layer, head)."""
    word: tl.constexpr = tl.int32 if UNIT >= 4 else (tl.int16 if UNIT == 2 else tl.int8)
    words: tl.constexpr = UNIT // 4 if UNIT >= 4 else 1
    page = (slot.to(tl.uint64) // PAGE).to(tl.int64)
    unit = page * STRIDES[PLANE][0] + (slot - page * PAGE) * STRIDES[PLANE][1]
    unit += head * STRIDES[PLANE][2] + col
    if TABLE:
        start = tl.load(base + layer).to(tl.pointer_type(word))
    else:
        start = base.to(tl.pointer_type(word), bitcast=True) + layer * layer_stride * words
    start = tl.multiple_of(start, UNIT)
    return start + (unit * words)[:, None] + tl.arange(0, words)[None, :]


@triton.jit
def _copy_tile(  # type: ignore[no-untyped-def]
    src, dst, src_index, dst_index, items, layer, tile, src_layer, dst_layer,
    SRC_STRIDES: tl.constexpr, DST_STRIDES: tl.constexpr, PLANE: tl.constexpr,
    UNIT: tl.constexpr, ROW: tl.constexpr, RUN: tl.constexpr,
    SRC_PAGE: tl.constexpr, DST_PAGE: tl.constexpr,
    SRC_TABLE: tl.constexpr, DST_TABLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tile * BLOCK
    flat = ((start % ROW).to(tl.int32) + tl.arange(0, BLOCK)).to(tl.uint32)
    row = flat // ROW
    within = flat - row * ROW
    head = within // RUN
    col = (within - head * RUN).to(tl.int64)
    head = head.to(tl.int64)
    item = start // ROW + row.to(tl.int64)
    live = item < items
    source = tl.load(src_index + item, mask=live, other=-1).to(tl.int64)
    target = tl.load(dst_index + item, mask=live, other=-1).to(tl.int64)
    live = (source >= 0) & (target >= 0)
    read = _pointer(
        src, source, head, col, layer, src_layer, SRC_STRIDES, PLANE, SRC_PAGE, SRC_TABLE, UNIT
    )
    write = _pointer(
        dst, target, head, col, layer, dst_layer, DST_STRIDES, PLANE, DST_PAGE, DST_TABLE, UNIT
    )
    tl.store(write, tl.load(read, mask=live[:, None]), mask=live[:, None])


@triton.jit
def copy_kernel(  # type: ignore[no-untyped-def]
    src,
    dst,
    src_index,
    dst_index,
    flags,
    items: tl.int64,
    first_layer: tl.int64,
    layers: tl.int64,
    src_layer,
    dst_layer,
    SRC_STRIDES: tl.constexpr,
    DST_STRIDES: tl.constexpr,
    UNIT: tl.constexpr,
    ROW: tl.constexpr,
    RUN: tl.constexpr,
    SRC_PAGE: tl.constexpr,
    DST_PAGE: tl.constexpr,
    SRC_TABLE: tl.constexpr,
    DST_TABLE: tl.constexpr,
    LAYERS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGNAL: tl.constexpr,
    EPOCH: tl.constexpr,
):
    """Buffers and strides are tuples, one entry a plane; so are UNIT, ROW, RUN and the PAGEs.

    ``src_layer`` and ``dst_layer`` are the strides of a layer; SRC_STRIDES and DST_STRIDES those of
    a page, a slot and a head.
    """
    layer_tiles = tl.zeros((), tl.int64)
    for plane in tl.static_range(len(UNIT)):
        layer_tiles += tl.cdiv(items * ROW[plane], BLOCK)
    work = tl.program_id(0).to(tl.int64)
    while work < layer_tiles * layers:
        if LAYERS_LAST:
            layer = first_layer + work % layers
            tile = work // layers
        else:
            layer = first_layer + work // layer_tiles
            tile = work % layer_tiles
        for plane in tl.static_range(len(UNIT)):
            plane_tiles = tl.cdiv(items * ROW[plane], BLOCK)
            if (tile >= 0) & (tile < plane_tiles):
                _copy_tile(
                    src[plane], dst[plane], src_index, dst_index, items, layer, tile,
                    src_layer[plane], dst_layer[plane], SRC_STRIDES, DST_STRIDES, plane,
                    UNIT[plane], ROW[plane], RUN[plane], SRC_PAGE[plane], DST_PAGE[plane],
                    SRC_TABLE, DST_TABLE, BLOCK,
                )  # fmt: skip
            tile -= plane_tiles
        if SIGNAL:
            # A program's tiles of one layer are as many apart as there are programs.
            programs = tl.num_programs(0).to(tl.int64)
            tile = work % layer_tiles
            if tile + programs >= layer_tiles:
                tl.debug_barrier()
                others = tl.minimum(layer_tiles, programs) - 1
                share = tl.where(tile % programs == 0, EPOCH - others, 1)
                tl.atomic_add(flags + layer, share, sem="release", scope="sys")
        work += tl.num_programs(0)


def reachable(host: Sequence[torch.Tensor]) -> bool:
    """Whether a kernel can read and write the host buffers: pinned, registered or on the device."""
    return interpreted() or all(buffer.is_cuda or buffer.is_pinned() for buffer in host)


def run(
    transfer: Transfer,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    first_layer: int,
    layers: int,
    max_programs: int,
    *,
    to_host: bool,
    flags: torch.Tensor | None = None,
) -> None:
    """Launch the copy of ``layers`` layers from ``first_layer`` on; 0 programs means no cap.

    Host memory must be readable by the device: pinned or registered.
    """
    plan = transfer.plan
    items = host_indices.numel()
    if items == 0 or layers == 0:
        if flags is not None:
            flags[first_layer : first_layer + layers] += FLAG_EPOCH
        return
    if 0 < max_programs < 8:
        block = WRITE_BLOCK if to_host else LOAD_BLOCK
    elif flags is not None and layers * items * sum(plan.row) < FLAG_UNITS:
        block = FLAG_BLOCK
    else:
        block = SMALL_BLOCK
    tiles = layers * sum(-(-items * row // block) for row in plan.row)
    signal = flags is not None
    variant = _variant(plan, block, to_host, signal, host_indices.dtype, device_indices.dtype)
    on = device_indices
    host = (bases(on, transfer.host), host_indices.contiguous(), plan.host_layer)
    device = (bases(on, transfer.device), device_indices.contiguous(), plan.device_layer)
    source, target = (device, host) if to_host else (host, device)
    indices = (source[1], target[1], device[1] if flags is None else flags)
    args = (
        source[0], target[0], *pointers(on, indices), items, first_layer, layers,
        source[2], target[2],
    )  # fmt: skip
    variant.launch(min(tiles, max_programs or MAX_PROGRAMS), on, args)


@cache
def _variant(
    plan: Plan,
    block: int,
    to_host: bool,
    signal: bool,
    host_index: torch.dtype,
    device_index: torch.dtype,
) -> Variant:
    """The kernel of a plan, kept by it."""
    planes = len(plan.unit)
    host = ("*i8", host_index, plan.host, plan.page, False)
    device = (
        "*i64" if plan.table else "*i8", device_index, plan.device, (1,) * planes, plan.table,
    )  # fmt: skip
    source, target = (device, host) if to_host else (host, device)
    types: tuple[Type, ...] = (
        (source[0],) * planes, (target[0],) * planes,
        pointer_to(source[1]), pointer_to(target[1]), "*i64" if signal else pointer_to(device[1]),
        "i64", "i64", "i64", ("i64",) * planes, ("i64",) * planes,
    )  # fmt: skip
    constants = (
        source[2], target[2], plan.unit, plan.row, plan.run, source[3], target[3],
        source[4], target[4], to_host and plan.layers_inside, block, signal, FLAG_EPOCH,
    )  # fmt: skip
    warps = WRITE_WARPS if block == WRITE_BLOCK else max(1, block // UNITS_A_WARP)
    return Variant(copy_kernel, types, constants, warps)


def bases(on: torch.Tensor, buffers: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The buffers, or tables of addresses, as arguments of a launch on the device of ``on``.

    Host memory goes as an address where the device knows it by that; else the launcher asks.
    """
    if on.is_cuda:
        if buffers[0].is_cuda or one_address(on.get_device()):
            return tuple(b.data_ptr() for b in buffers)
        return tuple(buffers)
    tables = buffers[0].dim() == 1
    return tuple(b if tables else b.as_strided((1,), (1,)).view(torch.uint8) for b in buffers)
