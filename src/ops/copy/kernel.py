"""The row copy: one kernel for both directions, every layout, any row size and any planes.

Work is cut into tiles of ``BLOCK`` units of one (layer, plane). They are counted layer by layer; a
backup into a layout that keeps the layers of a slot together counts them tile by tile, so that
what is written at one time lies close. Program ``p`` of ``n`` takes tiles p, p + n, ... A tile is a
flat run of units over consecutive items, so rows that are no power of two waste no lanes. Indices
are widened to int64 before any product; strides are compile-time values, one kernel a geometry.

With ``SIGNAL`` each program adds its share of one epoch to a layer's flag once its last tile of the
layer is written: a release at system scope, behind a barrier of the program. The shares of a layer
sum to ``FLAG_EPOCH``, and no proper part of them does, so a waiting stream sees complete layers
only.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from refcache.reference.transfer import FLAG_EPOCH
from refcache_ops._launch import interpreted, launch
from refcache_ops.copy.plan import Transfer

SMALL_BLOCK = 1024  # units a tile when programs are plenty
FLAG_BLOCK = 512  # when a small load raises flags: a layer is there sooner after its last byte
FLAG_UNITS = 1 << 22  # units of a load that is small in this sense
LARGE_BLOCK = 4096  # when a cap leaves few programs, each keeps more bytes in flight
UNITS_A_WARP = 256
MAX_PROGRAMS = 128  # without a cap: more do not make the link faster


@triton.jit
def _pointer(  # type: ignore[no-untyped-def]
    base, index, item, live, head, col, layer,
    STRIDES: tl.constexpr, PLANE: tl.constexpr,
    PAGE: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Pointers ``[BLOCK, words]`` to the unit ``col`` of (item, layer, head)."""
    word: tl.constexpr = tl.int32 if UNIT >= 4 else (tl.int16 if UNIT == 2 else tl.int8)
    words: tl.constexpr = UNIT // 4 if UNIT >= 4 else 1
    slot = tl.load(index + item, mask=live, other=0).to(tl.int64)
    page = (slot.to(tl.uint64) // PAGE).to(tl.int64)
    unit = page * STRIDES[PLANE][0] + (slot - page * PAGE) * STRIDES[PLANE][1]
    unit += head * STRIDES[PLANE][3] + col
    if TABLE:
        start = tl.load(base + layer).to(tl.pointer_type(word))
    else:
        start = base.to(tl.pointer_type(word), bitcast=True)
        unit += layer * STRIDES[PLANE][2]
    start = tl.multiple_of(start, UNIT)
    return start + (unit * words)[:, None] + tl.arange(0, words)[None, :]


@triton.jit
def _copy_tile(  # type: ignore[no-untyped-def]
    src, dst, src_index, dst_index, items, layer, tile,
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
    read = _pointer(
        src, src_index, item, live, head, col, layer,
        SRC_STRIDES, PLANE, SRC_PAGE, SRC_TABLE, UNIT,
    )  # fmt: skip
    write = _pointer(
        dst, dst_index, item, live, head, col, layer,
        DST_STRIDES, PLANE, DST_PAGE, DST_TABLE, UNIT,
    )  # fmt: skip
    tl.store(write, tl.load(read, mask=live[:, None]), mask=live[:, None])


@triton.jit(
    do_not_specialize=["items", "first_layer", "layers"],
    do_not_specialize_on_alignment=["src", "dst", "src_index", "dst_index", "flags"],
)
def copy_kernel(  # type: ignore[no-untyped-def]
    src,
    dst,
    src_index,
    dst_index,
    flags,
    items: tl.int64,
    first_layer: tl.int64,
    layers: tl.int64,
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
    """Buffers and strides are tuples, one entry a plane; so are UNIT, ROW, RUN and the PAGEs."""
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
                    SRC_STRIDES, DST_STRIDES, plane, UNIT[plane], ROW[plane], RUN[plane],
                    SRC_PAGE[plane], DST_PAGE[plane], SRC_TABLE, DST_TABLE, BLOCK,
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
        block = LARGE_BLOCK
    elif flags is not None and layers * items * sum(plan.row) < FLAG_UNITS:
        block = FLAG_BLOCK
    else:
        block = SMALL_BLOCK
    tiles = layers * sum(-(-items * row // block) for row in plan.row)
    host_side: tuple[Any, ...] = (
        transfer.host, host_indices.contiguous(), plan.host, plan.page, False,
    )  # fmt: skip
    device_side: tuple[Any, ...] = (
        transfer.device, device_indices.contiguous(), plan.device,
        (1,) * len(plan.page), plan.table,
    )  # fmt: skip
    source, target = (device_side, host_side) if to_host else (host_side, device_side)
    src, src_index, src_strides, src_page, src_table = source
    dst, dst_index, dst_strides, dst_page, dst_table = target
    launch(
        copy_kernel,
        (min(tiles, max_programs or MAX_PROGRAMS), 1),
        (transfer.key, host_indices.dtype, device_indices.dtype, block, to_host, flags is None),
        device_indices,
        (
            src, dst, src_index, dst_index, flags, items, first_layer, layers,
            src_strides, dst_strides, plan.unit, plan.row, plan.run, src_page, dst_page,
            src_table, dst_table, to_host and plan.layers_inside, block,
            flags is not None, FLAG_EPOCH,
        ),
        max(1, block // UNITS_A_WARP),
    )  # fmt: skip
