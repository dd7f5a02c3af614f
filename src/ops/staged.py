"""Backups through a staging buffer: long copies for the copy engine where rows are scattered.

Where a host layout keeps all layers of a slot together (``page_first``), or of a page
(``page_head``), a layer's row is a short piece, and :mod:`refcache_ops.engine` would copy row by
row. So the copy kernel gathers rows into a staging buffer *in the host's layout*, and the copy
engine moves each run of neighbouring host blocks, while the next chunk is gathered. What runs
beside is slowed only while rows are gathered, at the speed of device memory.

Index tensors are on the CPU: runs are found there. A pair with a negative slot is skipped, as the
ops do. ``page_head`` takes whole host pages only.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

from refcache.errors import InvalidArgument, UnknownName
from refcache.reference.layout import Layout
from refcache.reference.transfer import check_buffers, check_pairs
from refcache_ops._library import kernels
from refcache_ops.copy.plan import Transfer, plan_transfer
from refcache_ops.driver import copy_many

LAYOUTS = ("page_first", "page_head")
STAGE_BYTES = 32 << 20  # of each of two staging buffers


def run_bytes(layout: str, page_size: int, layer_num: int, row: int) -> int:
    """The host run, in bytes, that every backup of whole pages has; ``row``: bytes a row."""
    if layout not in LAYOUTS:
        raise UnknownName("layout", layout, LAYOUTS)
    return page_size * layer_num * row


def backup_all_layer(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    page_size: int,
    layout: str,
) -> None:
    """As the op. Both index tensors are on the CPU, ``host`` is pinned.

    Rows are gathered on the current stream, the copy engine works on a side stream; the current
    stream waits for it.

    Raises:
        InvalidArgument, UnknownName: as the op; also host pages that are not whole, and layouts
            that keep a layer's rows together.
    """
    if layout not in LAYOUTS:
        raise UnknownName("layout", layout, LAYOUTS)
    check_pairs(host_indices, device_indices)
    layouts = check_buffers(host, device, page_size, layout)
    if not all(buffer.is_pinned() for buffer in host):
        raise InvalidArgument("the copy engine on host memory that is not pinned: pin it")
    if host_indices.is_cuda or device_indices.is_cuda:
        raise InvalidArgument('io_backend="direct" with indices on the device: expected the CPU')
    chunks = _chunks(layouts, host, device, host_indices, device_indices)
    where = device[0].device
    if where.type != "cuda":
        for chunk in chunks:
            chunk.gather()
            chunk.copy()
        return
    current = torch.cuda.current_stream(where)
    side = _side_stream(where, current.cuda_stream)
    side.wait_stream(current)
    free: list[torch.cuda.Event | None] = [None, None]
    for number, chunk in enumerate(chunks):
        copied = free[number % 2]
        if copied is not None:
            current.wait_event(copied)
        chunk.gather()
        side.wait_event(current.record_event())
        with torch.cuda.stream(side):
            chunk.copy()
        free[number % 2] = side.record_event()
    current.wait_stream(side)


class _Chunk(NamedTuple):
    """A part of a backup that fits a staging buffer; the copies are (to, from, bytes)."""

    rows: Transfer
    staged: torch.Tensor
    slots: torch.Tensor
    copies: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    def gather(self) -> None:
        """Rows into the staging buffer, on the current stream."""
        layers = self.rows.plan.layers
        kernels("copy").run(self.rows, self.staged, self.slots, 0, layers, 0, to_host=True)

    def copy(self) -> None:
        """The staging buffer to the host, on the current stream."""
        copy_many(*self.copies, self.slots.device)


@cache
def _side_stream(device: torch.device, beside: int) -> torch.cuda.Stream:
    """The stream on which the copy engine works for the stream ``beside``."""
    return torch.cuda.Stream(device)


def _chunks(
    layouts: Sequence[Layout],
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
) -> Iterator[_Chunk]:
    """Cut a backup to what fits a staging buffer; the caller copies each chunk in turn."""
    name, page, layers = layouts[0].name, layouts[0].page_size, layouts[0].layer_num
    block = 1 if name == "page_first" else page  # so many slots lie together
    order = torch.argsort(host_indices)
    order = order[((host_indices >= 0) & (device_indices >= 0))[order]]
    if not len(order):
        return
    where, item = device[0].device, host[0].element_size()
    blocks = _blocks(host_indices[order].long(), block)
    slots = device_indices[order].pin_memory().to(where, non_blocking=True)
    per_slot = [w.head_num * w.head_dim * item * layers for w in layouts]
    capacity = max(1, STAGE_BYTES // (sum(per_slot) * page)) * page
    capacity = min(capacity, -(-len(slots) // page) * page)
    shapes = [
        Layout.of(name, capacity, page, layers, w.head_num, w.head_dim).shape for w in layouts
    ]
    stages = [
        [torch.empty(shape, dtype=host[0].dtype, device=where) for shape in shapes]
        for _ in range(2 if len(slots) > capacity else 1)
    ]
    staged = torch.arange(capacity, device=where)
    for number, start in enumerate(range(0, len(slots), capacity)):
        stage, these = stages[number % 2], slots[start : start + capacity]
        at, firsts, counts = _runs(blocks[start // block : (start + capacity) // block])
        lists = [
            (h.data_ptr() + firsts * bytes_, kept.data_ptr() + at * bytes_, counts * bytes_)
            for h, kept, bytes_ in zip(host, stage, (b * block for b in per_slot), strict=True)
        ]
        rows = plan_transfer(stage, device, staged[: len(these)], these, page, name)
        to, of, sizes = (torch.cat(parts) for parts in zip(*lists, strict=True))
        yield _Chunk(rows, staged[: len(these)], these, (to, of, sizes))


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


def _runs(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs of sorted blocks: where each starts in the list, its first block, how many blocks."""
    starts = torch.ones(len(blocks), dtype=torch.bool)
    torch.ne(blocks[1:], blocks[:-1] + 1, out=starts[1:])
    at = starts.nonzero().flatten()
    return at, blocks[at], torch.diff(at, append=torch.tensor([len(blocks)]))
