"""The copy-engine strategy: what ``io_backend="direct"`` does on CUDA.

Rows are scattered on the device and (in sorted order) come in runs on the host. So the copy kernel
gathers them into a staging buffer *in the host's layout*, and the copy engine moves each run; loads
go the other way. The copy engine needs no multiprocessor: a kernel that runs beside it is slowed
only while rows are gathered or scattered, at the speed of device memory.

Index tensors are on the CPU: runs are found there. Pays when runs are long (see :func:`choose`); a
layout whose blocks are pages takes whole host pages only.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from refcache.errors import InvalidArgument
from refcache.reference.layout import Layout
from refcache.reference.transfer import check_buffers, check_layers, check_pairs
from refcache_ops._library import kernels
from refcache_ops.copy.plan import plan_transfer
from refcache_ops.driver import copy_many

STAGE_BYTES = 64 << 20

# Host runs from which the copy engine is taken by "auto": (device to host, host to device), bytes.
DIRECT_FROM = (64 << 10, 64 << 10)


class Pieces(NamedTuple):
    """How some layers of one plane lie on the host: pieces of one length, block after block.

    ``block`` slots make a block; block b has a piece of ``length`` bytes at
    ``b * stride + offset`` for each of ``offsets``. Pieces of neighbouring blocks touch where
    ``length == stride``.
    """

    block: int
    stride: int
    length: int
    offsets: torch.Tensor


def pieces(where: Layout, first: int, count: int, item: int, *, whole: bool) -> Pieces:
    """The pieces of layers ``first`` .. ``first + count - 1``; ``item``: bytes an element.

    ``whole``: they are all the layers of the host (and of ``where``).
    """
    row = where.head_num * where.head_dim * item
    step = where.layer_stride * item
    if where.name == "layer_first":
        return Pieces(1, row, row, torch.arange(first, first + count) * step)
    if where.name == "page_first":
        return Pieces(1, where.slot_stride * item, count * row, torch.tensor([first * step]))
    page, stride = where.page_size, where.page_stride * item
    if where.name == "page_first_direct":
        return Pieces(page, stride, count * page * row, torch.tensor([first * step]))
    if whole:
        return Pieces(page, stride, stride, torch.tensor([0]))
    heads = torch.arange(where.head_num)[:, None] * (where.head_stride * item)
    slots = torch.arange(page)[None, :] * (where.slot_stride * item)
    return Pieces(
        page, stride, count * where.head_dim * item, (heads + slots).flatten() + first * step
    )


def run_bytes(
    layout: str,
    page_size: int,
    layer_num: int,
    row: int,
    heads: int = 1,
    *,
    one_layer: bool = False,
) -> int:
    """The host run, in bytes, that every transfer of whole pages has; ``row``: bytes a row."""
    where = Layout.of(layout, page_size, page_size, layer_num, heads, row // heads)
    whole = not one_layer or layer_num == 1
    found = pieces(where, 0, layer_num if whole else 1, 1, whole=whole)
    blocks = page_size // found.block
    return found.length * (blocks if found.length == found.stride else 1)


def choose(run: int, *, to_host: bool) -> str:
    """The rule of ``io_backend="auto"``: "direct" for host runs of ``run`` bytes, or "kernel"."""
    return "direct" if run >= DIRECT_FROM[0 if to_host else 1] else "kernel"


def backup_all_layer(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    page_size: int,
    layout: str,
) -> None:
    """As the op, by the copy engine. Both index tensors are on the CPU, ``host`` is pinned.

    Raises:
        InvalidArgument, UnknownName: as the op; also host pages that are not whole.
    """
    layouts = check_buffers(host, device, page_size, layout)
    for chunk in _chunks(
        layouts, host, device, host_indices, device_indices, 0, layouts[0].layer_num
    ):
        kernels("copy").run(
            chunk.gather, chunk.staged, chunk.slots, 0, layouts[0].layer_num, 0, to_host=True
        )
        copy_many(chunk.on_host, chunk.on_stage, chunk.sizes, chunk.slots.device)


def load_per_layer(
    device: Sequence[torch.Tensor],
    host: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
    layout: str,
) -> None:
    """As the op, by the copy engine. Both index tensors are on the CPU, ``host`` is pinned.

    Raises:
        InvalidArgument, UnknownName: as the op; also host pages that are not whole.
    """
    layouts = check_buffers(host, device, page_size, layout, one_layer=True)
    check_layers(layer_id, 1, layouts[0].layer_num)
    planes = len(host)
    if device[0].dim() == 4:
        device = [plane[layer_id] for plane in device]
    elif len(device) > planes:
        device = [device[p * layouts[0].layer_num + layer_id] for p in range(planes)]
    for chunk in _chunks(layouts, host, device, host_indices, device_indices, layer_id, 1):
        copy_many(chunk.on_stage, chunk.on_host, chunk.sizes, chunk.slots.device)
        kernels("copy").run(chunk.gather, chunk.staged, chunk.slots, 0, 1, 0, to_host=False)


class _Chunk(NamedTuple):
    gather: object
    staged: torch.Tensor
    slots: torch.Tensor
    on_host: torch.Tensor
    on_stage: torch.Tensor
    sizes: torch.Tensor


def _chunks(
    layouts: Sequence[Layout],
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    first: int,
    count: int,
) -> Iterator[_Chunk]:
    """Cut a transfer to what fits the staging buffer; the caller copies each chunk in turn."""
    check_pairs(host_indices, device_indices)
    for buffer in host:
        if not buffer.is_pinned():
            raise InvalidArgument("the copy engine on host memory that is not pinned: pin it")
    if host_indices.is_cuda or device_indices.is_cuda:
        raise InvalidArgument('io_backend="direct" with indices on the device: expected the CPU')
    if not len(host_indices):
        return
    where, item, name = device[0].device, host[0].element_size(), layouts[0].name
    order = torch.argsort(host_indices)
    sorted_slots = host_indices[order].long()
    slots = device_indices[order].pin_memory().to(where, non_blocking=True)
    whole = count == layouts[0].layer_num
    shapes = [pieces(layout, first, count, item, whole=whole) for layout in layouts]
    page, block = layouts[0].page_size, shapes[0].block
    blocks = _blocks(sorted_slots, block)
    per_slot = sum(w.head_num * w.head_dim * item * count for w in layouts)
    capacity = max(1, STAGE_BYTES // (per_slot * page)) * page
    capacity = min(capacity, -(-len(sorted_slots) // page) * page)
    stage_layouts = [
        Layout.of(name, capacity, page, count, w.head_num, w.head_dim) for w in layouts
    ]
    stage = [torch.empty(w.shape, dtype=host[0].dtype, device=where) for w in stage_layouts]
    staged = torch.arange(capacity, device=where)
    stage_shapes = [pieces(w, 0, count, item, whole=whole) for w in stage_layouts]
    for start in range(0, len(sorted_slots), capacity):
        some = blocks[start // block : (start + capacity) // block]
        lists = [
            _runs(some, shape, stage_shape, h.data_ptr(), s.data_ptr())
            for shape, stage_shape, h, s in zip(shapes, stage_shapes, host, stage, strict=True)
        ]
        on_host, on_stage, sizes = (torch.cat(parts) for parts in zip(*lists, strict=True))
        these = slots[start : start + capacity]
        gather = plan_transfer(
            stage, device, staged[: len(these)], these, page, name, 0 if count == 1 else None
        )
        yield _Chunk(gather, staged[: len(these)], these, on_host, on_stage, sizes)


def _blocks(slots: torch.Tensor, block: int) -> torch.Tensor:
    """Block numbers of sorted slots that fill whole blocks."""
    if block == 1:
        return slots
    if len(slots) % block == 0:
        found = slots.view(-1, block)
        whole = found[:, :1] + torch.arange(block)
        if bool((found[:, 0] % block == 0).all()) and bool((found == whole).all()):
            return found[:, 0] // block
    raise InvalidArgument(
        f"host slots that are no whole pages of {block}: the copy engine moves whole pages of this "
        'layout; use io_backend="kernel"'
    )


def _runs(
    blocks: torch.Tensor, on_host: Pieces, on_stage: Pieces, host: int, stage: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Addresses on the host, addresses in the staging buffer, and bytes, of each run."""
    touch = on_host.length == on_host.stride and on_stage.length == on_stage.stride
    starts = torch.ones(len(blocks), dtype=torch.bool)
    if touch:
        starts[1:] = blocks[1:] != blocks[:-1] + 1
    at = starts.nonzero().flatten()
    lengths = torch.diff(at, append=torch.tensor([len(blocks)])) * on_host.length
    many = len(on_host.offsets)
    return (
        (host + on_host.offsets[:, None] + blocks[at] * on_host.stride).flatten(),
        (stage + on_stage.offsets[:, None] + at * on_stage.stride).flatten(),
        lengths.repeat(many),
    )
