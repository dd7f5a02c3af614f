"""``PagedAdapter``: a pool of numbered pages as an allocator of slots, by three methods.

A block cache hands out page numbers; the contract ``allocator`` asks for slots. An adapter writes::

    class Mine(PagedAdapter):
        first = 0  # the smallest page number of the pool

        def open(self):
            self.pool = BlockPool(self.config.pages)

        def take(self, n):
            return self.pool.pop(n) if n <= len(self.pool) else None

        def give(self, pages):
            self.pool.push(pages)

        def count(self):
            return len(self.pool)

Sizes and lengths that make no sense are refused here: a pool of pages never sees them. Pages are
given back as they come: a page that is free, or none of the pool's, is the pool's business.
"""

from collections.abc import Iterable, Sequence

import torch

from refcache.errors import InvalidArgument
from refcache.oracle.target.config import CacheConfig


class PagedAdapter:
    """See the module docstring. Slots are int64; page ``p`` of the pool has those of page
    ``p + 1 - first``, so that page 0 stays the dummy page.

    Attributes:
        config: ``config.pages`` pages of ``config.page_size`` tokens.
    """

    first = 1
    device = "cpu"

    def __init__(self, config: CacheConfig) -> None:
        self.config, self.size, self.page_size = config, config.size, config.page_size
        self.clear()

    def open(self) -> None:
        """Make an empty pool; called again when the allocator is cleared."""
        raise NotImplementedError

    def take(self, n: int) -> Iterable[int] | None:
        """``n`` pages, or None where there are not so many; then nothing has changed."""
        raise NotImplementedError

    def give(self, pages: Sequence[int]) -> None:
        """These pages are free again."""
        raise NotImplementedError

    def count(self) -> int:
        """How many pages can be taken."""
        raise NotImplementedError

    # ---- what the contract asks for --------------------------------------------------------------

    def clear(self) -> None:
        self._queued: list[int] | None = None
        self.open()

    def available_size(self) -> int:
        return self.count() * self.page_size

    def alloc(self, need_size: int) -> torch.Tensor | None:
        if need_size < 0 or need_size % self.page_size:
            raise InvalidArgument(f"alloc({need_size}) with pages of {self.page_size}")
        return self._grow([(0, need_size, -1)])

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
    ) -> torch.Tensor | None:
        rows = (prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), last_loc.tolist())
        if sum(rows[1]) - sum(rows[0]) != extend_num_tokens:
            raise InvalidArgument(f"alloc_extend: {extend_num_tokens=} is not the sum")
        return self._grow(list(zip(*rows, strict=True)))

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        before = seq_lens_cpu - 1
        return self.alloc_extend(before, before, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))

    def _grow(self, rows: list[tuple[int, int, int]]) -> torch.Tensor | None:
        """Slots for rows of (length before, length after, last slot); None without pages."""
        size = self.page_size
        for before, after, last in rows:
            fits = size <= last < self.size + size and (last + 1 - before) % size == 0
            if before > after or (before and not fits):
                raise InvalidArgument(f"growth from {before} to {after} tokens after slot {last}")
        need = sum(-(-after // size) - -(-before // size) for before, after, _ in rows)
        taken = self.take(need) if need > 0 else []
        if taken is None:
            return None
        pages, slots = iter(taken), []
        for before, after, last in rows:
            for position in range(before, after):
                opens = position % size == 0
                last = (next(pages) + 1 - self.first) * size if opens else last + 1
                slots.append(last)
        return torch.tensor(slots, dtype=torch.int64)

    def free(self, free_index: torch.Tensor) -> None:
        """Give the pages of these slots back, each once; when the group ends, if one is open."""
        if free_index.is_floating_point():
            raise InvalidArgument(f"free: {free_index.dtype}, expected integers")
        numbers = dict.fromkeys(slot // self.page_size for slot in free_index.tolist())
        pages = [number - 1 + self.first for number in numbers]
        if self._queued is None:
            self.give(pages)
        else:
            self._queued += pages

    def free_group_begin(self) -> None:
        self._queued = []

    def free_group_end(self) -> None:
        queued, self._queued = self._queued or [], None
        if queued:
            self.give(queued)

    def merge_and_sort_free(self) -> None:
        """Nothing: the pool has the order that it has."""
