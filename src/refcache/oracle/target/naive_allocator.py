"""The naive allocator: a set of free pages, the highest handed out first.

It shares no code with the reference; see :mod:`refcache.oracle.target.naive`.
"""

import torch

from refcache.errors import DoubleFree, InvalidArgument, InvalidSlot


class NaiveAllocator:
    """A set of free pages, one of queued pages; every other page is handed out."""

    def __init__(self, size: int, page_size: int) -> None:
        self.size, self.page_size, self.device = size, page_size, "cpu"
        self.clear()

    def clear(self) -> None:
        self._free = set(range(1, self.size // self.page_size + 1))
        self._queued: set[int] | None = None

    def available_size(self) -> int:
        return len(self._free) * self.page_size

    def lists(self) -> list[list[int]]:
        """The free pages, and those that wait in a free group. A set has no other order."""
        return [sorted(self._free), sorted(self._queued or ())]

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
        for t in (prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc):
            if t.dim() != 1 or len(t) != len(seq_lens) or t.is_floating_point():
                raise InvalidArgument(f"alloc_extend: {t.dtype} {tuple(t.shape)}")
        rows = list(
            zip(prefix_lens_cpu.tolist(), seq_lens_cpu.tolist(), last_loc.tolist(), strict=True)
        )
        if sum(seq - prefix for prefix, seq, _ in rows) != extend_num_tokens:
            raise InvalidArgument(f"alloc_extend: {extend_num_tokens=} is not the sum")
        return self._grow(rows)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        before = seq_lens_cpu - 1
        return self.alloc_extend(before, before, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))

    def _grow(self, rows: list[tuple[int, int, int]]) -> torch.Tensor | None:
        """Slots for rows of (length before, length after, last slot); None without pages."""
        size = self.page_size
        for prefix, seq, last in rows:
            inside = size <= last < self.size + size and (last + 1 - prefix) % size == 0
            if not 0 <= prefix <= seq or (prefix and not inside):
                raise InvalidArgument(f"growth from {prefix} to {seq} tokens after slot {last}")
        pages = sorted(self._free)
        out: list[int] = []
        for prefix, seq, last in rows:
            for position in range(prefix, seq):
                if position % size:
                    last += 1
                elif not pages:
                    return None
                else:
                    last = pages.pop() * size
                out.append(last)
        self._free = set(pages)
        return torch.tensor(out, dtype=torch.int64)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.dim() != 1 or free_index.is_floating_point():
            raise InvalidArgument(f"free: {free_index.dtype} {tuple(free_index.shape)}")
        pages = {slot // self.page_size for slot in free_index.tolist()}
        for page in pages:
            if not 1 <= page <= self.size // self.page_size:
                raise InvalidSlot(f"free of page {page}")
            if page in self._free or page in (self._queued or ()):
                raise DoubleFree(f"free of page {page}")
        if self._queued is None:
            self._free |= pages
        else:
            self._queued |= pages

    def free_group_begin(self) -> None:
        if self._queued is not None:
            raise InvalidArgument("a free group is open")
        self._queued = set()

    def free_group_end(self) -> None:
        if self._queued is None:
            raise InvalidArgument("no free group is open")
        self._free, self._queued = self._free | self._queued, None

    def backup_state(self) -> frozenset[int]:
        return frozenset(self._free)

    def restore_state(self, state: frozenset[int]) -> None:
        self._free = set(state)

    def merge_and_sort_free(self) -> None:
        """Nothing to do: a set has no order."""
