"""Copies by the copy engine through a staging buffer: long copies where rows are scattered.

What :mod:`refcache_ops.engine` does for backups into layouts that keep a page's layers together.
Rows are scattered on the device and (in sorted order) come in runs on the host. So the copy kernel
gathers them into a staging buffer *in the host's layout*, and the copy engine moves each run; loads
go the other way. The copy engine needs no multiprocessor: a kernel that runs beside it is slowed
only while rows are gathered or scattered, at the speed of device memory.

Index tensors are on the CPU: runs are found there. A pair with a negative slot is skipped, as the
ops do. A layout whose blocks are pages takes whole host pages only.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from refcache.errors import InvalidArgument
from refcache.reference.layout import Layout
from refcache.reference.transfer import check_buffers, check_layers, check_pairs
from refcache_ops._library import kernels
from refcache_ops.copy.plan import Transfer, plan_transfer
from refcache_ops.driver import copy_many

STAGE_BYTES = 32 << 20  # of each of two staging buffers


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
    layers = layouts[0].layer_num
    _pipeline(
        device[0].device,
        _chunks(layouts, host, device, host_indices, device_indices, 0, layers),
        lambda chunk: chunk.move_rows(layers, to_host=True),
        lambda chunk: copy_many(chunk.on_host, chunk.on_stage, chunk.sizes, chunk.slots.device),
        engine_first=False,
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
    _pipeline(
        device[0].device,
        _chunks(layouts, host, device, host_indices, device_indices, layer_id, 1),
        lambda chunk: copy_many(chunk.on_stage, chunk.on_host, chunk.sizes, chunk.slots.device),
        lambda chunk: chunk.move_rows(1, to_host=False),
        engine_first=True,
    )


class _Chunk(NamedTuple):
    """A part of a transfer that fits a staging buffer."""

    rows: Transfer
    staged: torch.Tensor
    slots: torch.Tensor
    on_host: torch.Tensor
    on_stage: torch.Tensor
    sizes: torch.Tensor

    def move_rows(self, layers: int, *, to_host: bool) -> None:
        """Gather rows into the staging buffer, or scatter them out of it, on the current stream."""
        kernels("copy").run(self.rows, self.staged, self.slots, 0, layers, 0, to_host=to_host)


@cache
def _side_stream(device: torch.device, beside: int) -> torch.cuda.Stream:
    """The stream on which the copy engine works for the stream ``beside``."""
    return torch.cuda.Stream(device)


def _pipeline(
    device: torch.device,
    chunks: Iterator[_Chunk],
    produce: Callable[[_Chunk], None],
    consume: Callable[[_Chunk], None],
    *,
    engine_first: bool,
) -> None:
    """Produce and consume chunk after chunk in two staging buffers, on two streams.

    Rows move on the current stream and the copy engine works on a side stream (``engine_first``: it
    produces), so that one chunk's rows move while another is copied. The current stream waits.
    """
    if device.type != "cuda":
        for chunk in chunks:
            produce(chunk)
            consume(chunk)
        return
    current = torch.cuda.current_stream(device)
    side = _side_stream(device, current.cuda_stream)
    first, second = (side, current) if engine_first else (current, side)
    side.wait_stream(current)
    free: list[torch.cuda.Event | None] = [None, None]
    for number, chunk in enumerate(chunks):
        consumed = free[number % 2]
        if consumed is not None:
            first.wait_event(consumed)
        with torch.cuda.stream(first):
            produce(chunk)
        second.wait_event(first.record_event())
        with torch.cuda.stream(second):
            consume(chunk)
        free[number % 2] = second.record_event()
    current.wait_stream(side)


def _chunks(
    layouts: Sequence[Layout],
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    first: int,
    count: int,
) -> Iterator[_Chunk]:
    """Cut a transfer to what fits a staging buffer; the caller copies each chunk in turn."""
    check_pairs(host_indices, device_indices)
    for buffer in host:
        if not buffer.is_pinned():
            raise InvalidArgument("the copy engine on host memory that is not pinned: pin it")
    if host_indices.is_cuda or device_indices.is_cuda:
        raise InvalidArgument('io_backend="direct" with indices on the device: expected the CPU')
    where, item, name = device[0].device, host[0].element_size(), layouts[0].name
    whole = count == layouts[0].layer_num
    shapes = [pieces(layout, first, count, item, whole=whole) for layout in layouts]
    page, block = layouts[0].page_size, shapes[0].block
    blocks, slots, merged = _sorted_pairs(host_indices, device_indices, block, where)
    if not len(slots):
        return
    per_slot = sum(w.head_num * w.head_dim * item * count for w in layouts)
    capacity = max(1, STAGE_BYTES // (per_slot * page)) * page
    capacity = min(capacity, -(-len(slots) // page) * page)
    stage_layouts = [
        Layout.of(name, capacity, page, count, w.head_num, w.head_dim) for w in layouts
    ]
    stages = [
        [torch.empty(w.shape, dtype=host[0].dtype, device=where) for w in stage_layouts]
        for _ in range(2 if len(slots) > capacity else 1)
    ]
    staged = torch.arange(capacity, device=where)
    stage_shapes = [pieces(w, 0, count, item, whole=whole) for w in stage_layouts]
    for number, start in enumerate(range(0, len(slots), capacity)):
        stage = stages[number % 2]
        lists = []
        for shape, stage_shape, h, kept in zip(shapes, stage_shapes, host, stage, strict=True):
            touch = shape.length == shape.stride
            if (start, capacity, touch) not in merged:
                some = blocks[start // block : (start + capacity) // block]
                merged[start, capacity, touch] = _merge(some, touch=touch)
            at, firsts, counts = merged[start, capacity, touch]
            on_host = _addresses(h.data_ptr(), shape, firsts)
            on_stage = _addresses(kept.data_ptr(), stage_shape, at)
            lists.append((on_host, on_stage, (counts * shape.length).repeat(len(shape.offsets))))
        on_host, on_stage, sizes = (torch.cat(parts) for parts in zip(*lists, strict=True))
        these = slots[start : start + capacity]
        rows = plan_transfer(
            stage, device, staged[: len(these)], these, page, name, 0 if count == 1 else None
        )
        yield _Chunk(rows, staged[: len(these)], these, on_host, on_stage, sizes)


_Runs = dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
_last_pairs: list[Any] = []


def _sorted_pairs(
    host_indices: torch.Tensor, device_indices: torch.Tensor, block: int, where: torch.device
) -> tuple[torch.Tensor, torch.Tensor, _Runs]:
    """Block numbers in host order, the device slots in that order (on the device), known runs.

    The last answer is kept, because a load asks once a layer. It is known again by the slots
    themselves: who else writes the caller's memory (numpy, another view) tells nobody.
    """
    stream = torch.cuda.current_stream(where).cuda_stream if where.type == "cuda" else 0
    asked = (block, where, stream, host_indices.dtype, device_indices.dtype)
    last = tuple(_last_pairs)  # another thread may put its own there meanwhile
    if last:
        host, device, before, answer = last
        if before == asked and host.equal(host_indices) and device.equal(device_indices):
            blocks, slots, merged = answer
            return blocks, slots, merged
    host, device = host_indices.clone(), device_indices.clone()
    moved = (host >= 0) & (device >= 0)
    order = torch.argsort(host)
    order = order[moved[order]]
    blocks = _blocks(host[order].long(), block)
    slots = device[order].pin_memory().to(where, non_blocking=True)
    merged = {}
    _last_pairs[:] = [host, device, asked, (blocks, slots, merged)]
    return blocks, slots, merged


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


def _merge(blocks: torch.Tensor, *, touch: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs of sorted blocks: where each starts in the list, its first block, how many blocks.

    ``touch``: pieces of neighbouring blocks touch; else every block is a run of its own.
    """
    if not touch:
        return torch.arange(len(blocks)), blocks, torch.ones_like(blocks)
    starts = torch.ones(len(blocks), dtype=torch.bool)
    torch.ne(blocks[1:], blocks[:-1] + 1, out=starts[1:])
    at = starts.nonzero().flatten()
    counts = at.new_empty(len(at))
    torch.sub(at[1:], at[:-1], out=counts[:-1])
    counts[-1] = len(blocks) - at[-1]
    return at, blocks[at], counts


def _addresses(base: int, where: Pieces, blocks: torch.Tensor) -> torch.Tensor:
    """The address of the piece of each block, for one offset after another."""
    starts = blocks * where.stride + base
    if len(where.offsets) == 1:
        return starts + where.offsets
    return (where.offsets[:, None] + starts).flatten()
