"""Planes: what a pool keeps of every slot, as it is declared, as it exists, and as it is copied.

A :class:`PlaneSpec` is all that a pool says of a plane. :class:`Plane` is the buffer made from it;
:class:`PlaneGroup` are those of two pools that one call of a copy function moves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from refcache.errors import InvalidArgument


class PlaneSpec(NamedTuple):
    """The declaration of a plane.

    Attributes:
        name: what messages call it.
        head_num, head_dim: extent of a row.
        dtype: of its elements; None: the pool's.
        slots_per_row: 1, or how many neighbouring slots of a page share a row (a page's index keys
            and scales, say); a divisor of the page size. Each has an equal part of the row.
    """

    name: str
    head_num: int
    head_dim: int
    dtype: torch.dtype | None = None
    slots_per_row: int = 1


class Plane(NamedTuple):
    """A plane that exists.

    ``buffer``: ``[layer, (size + page_size) / slots_per_row, head_num, head_dim]`` of what is
    stored; ``dtype``: what callers see, if that differs. The rest is as declared.
    """

    name: str
    buffer: torch.Tensor
    head_num: int
    head_dim: int
    slots_per_row: int = 1
    dtype: torch.dtype | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot in one layer: its part of a row, rounded up."""
        row = self.head_num * self.head_dim * self.buffer.element_size()
        return -(-row // self.slots_per_row)

    def by_slot(self) -> torch.Tensor:
        """A view ``[layer, size + page_size, head_num, dim]``: each slot's part of its row.

        Raises:
            InvalidArgument: rows of several slots that cannot be cut into equal parts.
        """
        if self.slots_per_row == 1:
            return self.buffer
        layers, rows, heads, dim = self.buffer.shape
        if heads != 1 or dim % self.slots_per_row:
            raise InvalidArgument(
                f"rows {heads} x {dim} of {self.name}, for {self.slots_per_row} slots each: "
                "expected one head, in equal parts"
            )
        return self.buffer.view(layers, rows * self.slots_per_row, 1, dim // self.slots_per_row)


@dataclass(frozen=True)
class PlaneGroup:
    """Planes that one call of a copy function moves: of one dtype, with rows of as many slots.

    Attributes:
        host, device: the buffers, one a plane.
        page_size: rows a page.
        slots_per_row: slots a row; transfers of such planes are of whole pages.
    """

    host: tuple[torch.Tensor, ...]
    device: list[torch.Tensor]
    page_size: int
    slots_per_row: int

    def rows(self, *slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of some slots, which are whole ascending pages if rows have several slots."""
        if self.slots_per_row == 1:
            return slots
        return tuple(one[:: self.slots_per_row] // self.slots_per_row for one in slots)


def group_planes(
    host: Sequence[torch.Tensor], device: Sequence[Plane], page_size: int
) -> list[PlaneGroup]:
    """The planes of both pools, in groups; the last one is that of the first plane."""
    kinds: dict[tuple[torch.dtype, int], list[int]] = {}
    for number, plane in enumerate(device):
        kinds.setdefault((plane.buffer.dtype, plane.slots_per_row), []).append(number)
    return [
        PlaneGroup(
            tuple(host[n] for n in numbers),
            [device[n].buffer for n in numbers],
            page_size // slots,
            slots,
        )
        for (_, slots), numbers in reversed(kinds.items())
    ]


def check_whole_pages(page_size: int, *indices: torch.Tensor) -> None:
    """Raise InvalidArgument unless these slots are whole ascending pages.

    Of tensors on the CPU only: reading others would wait for the device.
    """
    for index in indices:
        whole = len(index) % page_size == 0
        if whole and index.device.type == "cpu":
            pages = index.view(-1, page_size)
            first = pages[:, :1]
            whole = bool(
                (pages == first + torch.arange(page_size)).all() and (first % page_size == 0).all()
            )
        if not whole:
            raise InvalidArgument(
                f"a transfer of {len(index)} slots of a pool with rows of several slots: "
                f"expected whole ascending pages of {page_size}"
            )
