"""Pages of a host pool as flat tensors: what storage below the host reads and writes.

A flat page holds the planes one after the other, each as ``[layer, slot of the page, head, dim]``,
whatever the layout of the pool. A page that one layout has stored is therefore read back right by
another. (In SGLang 0.5.10 a flat page has the order of its layout, under the same key: what
``layer_first`` wrote, ``page_first`` reads as garbage. Its ``layer_first`` page is ours.)

Every access names its cells, so that the simulated machine sees a storage thread that reads slots
which somebody else writes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from refcache.errors import InvalidArgument, InvalidSlot
from refcache.reference import Layout
from refcache.runtime import Region, Runtime


class HostPages:
    """The pages of :class:`refcache.pool.HostKVCache`, which has the attributes named here."""

    dtype: torch.dtype
    layer_num: int
    layout: str
    page_num: int
    page_size: int
    planes: tuple[torch.Tensor, ...]
    runtime: Runtime

    def get_data_page(self, index: int | torch.Tensor, flat: bool = True) -> Any:
        """A copy of the page whose first slot is ``index``.

        Returns:
            The flat page; or without ``flat`` a list of the planes, ``[L, P, H, D]`` each.

        Raises:
            InvalidSlot: ``index`` is no page's first slot.
        """
        pages = self._page_views(index)
        copies: list[torch.Tensor] = []

        def read() -> None:
            copies.extend(page.clone(memory_format=torch.contiguous_format) for page in pages)

        self.runtime.host_access("read a host page", read, reads=self._page_regions(index))
        return torch.cat([page.flatten() for page in copies]) if flat else copies

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A flat page that belongs to nobody, to read into."""
        return torch.zeros(sum(view.numel() for view in self._page_views(0)), dtype=self.dtype)

    def set_from_flat_data_page(self, index: int | torch.Tensor, data_page: torch.Tensor) -> None:
        """Overwrite the page whose first slot is ``index``.

        Raises:
            InvalidSlot: as :meth:`get_data_page`.
            InvalidArgument: not a flat page of this pool; nothing was written.
        """
        pages = self._page_views(index)
        sizes = [page.numel() for page in pages]
        if data_page.numel() != sum(sizes) or data_page.dtype != self.dtype:
            raise InvalidArgument(
                f"a flat page of {data_page.numel()} x {data_page.dtype}: expected {sum(sizes)} x "
                f"{self.dtype}"
            )

        def write() -> None:
            for page, values in zip(pages, torch.split(data_page.flatten(), sizes), strict=True):
                page.copy_(values.view(page.shape))

        self.runtime.host_access("write a host page", write, writes=self._page_regions(index))

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Where the bytes of these pages are, for a backend that reads and writes in place.

        One piece for each page and plane where its bytes are one run; else (``layer_first``) one
        for each layer of it, layer by layer and plane by plane.

        Args:
            indices: int64, whole pages.

        Returns:
            Addresses, and as many lengths in bytes.

        Raises:
            InvalidSlot: not whole pages.
        """
        pieces: list[torch.Tensor] = []
        for first in self._first_slots(indices):
            pieces += _runs(self._page_views(first))
        return _meta(pieces)

    def get_split_heads_page_buffer_meta(
        self, indices: torch.Tensor, split_factor: int
    ) -> tuple[list[int], list[int]]:
        """As :meth:`get_page_buffer_meta`, cut along the heads into ``split_factor`` parts.

        Ranks of another number then find their heads as pieces of their own.

        Raises:
            InvalidArgument: the layout is not ``page_head``, or the heads cannot be cut so.
        """
        heads = [view.shape[2] for view in self._page_views(0)]
        if self.layout != "page_head" or any(count % split_factor for count in heads):
            raise InvalidArgument(
                f"{split_factor} parts of {heads} heads in layout {self.layout}: expected "
                "page_head, and a divisor"
            )
        pieces: list[torch.Tensor] = []
        for first in self._first_slots(indices):
            for view in self._page_views(first):
                pieces += torch.split(view, view.shape[2] // split_factor, dim=2)
        return _meta(pieces)

    def _first_slots(self, indices: torch.Tensor) -> list[int]:
        if indices.numel() % self.page_size:
            raise InvalidSlot(f"{indices.numel()} slots: expected whole pages of {self.page_size}")
        first: list[int] = indices[:: self.page_size].tolist()
        return first

    def _page_views(self, index: int | torch.Tensor) -> list[torch.Tensor]:
        """The page in each plane, as a view ``[L, P, H, D]``."""
        page, inside = divmod(int(index), self.page_size)
        if inside or not 0 <= page < self.page_num:
            raise InvalidSlot(
                f"host slot {int(index)}: expected the first slot of one of {self.page_num} pages"
            )
        return [
            Layout.of_buffer(self.layout, plane, self.page_size).page(plane, page)
            for plane in self.planes
        ]

    def _page_regions(self, index: int | torch.Tensor) -> list[Region]:
        slots = range(int(index), int(index) + self.page_size)
        layers = range(self.layer_num)
        return [Region(self, plane, layers, slots) for plane in range(len(self.planes))]


def _runs(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Pieces of these views that lie in one run each."""
    pieces: list[torch.Tensor] = []
    for view in views:
        whole = view.numel() == _span(view)
        pieces += [view] if whole else list(view)
    return pieces


def _span(view: torch.Tensor) -> int:
    """Elements from the first to the last of a view."""
    lengths: Sequence[int] = view.shape
    return 1 + sum((n - 1) * s for n, s in zip(lengths, view.stride(), strict=True))


def _meta(pieces: list[torch.Tensor]) -> tuple[list[int], list[int]]:
    address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
    return [address(p) for p in pieces], [p.numel() * p.element_size() for p in pieces]
