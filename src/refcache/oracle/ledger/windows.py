"""Which full page owns which window page, and the allocator of both pools that tells it.

A full page is handed out with a window page. The window page may be given back alone
(``free_swa``); with the full page it goes too.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from refcache.oracle.ledger.ledger import Ledger, Note
from refcache.oracle.ledger.recording import RecordingAllocator

WindowJudge = Callable[[int], tuple[str, str] | None]
"""Says of a full page whose window is freed which rule that breaks, with the evidence."""


class Windows:
    """See the module docstring.

    Attributes:
        pages: how many window pages there are, numbered from 1.
        of: each full page that has a window page, with that page.
        freed: of each free in the current call, how many full pages and window pages went.
    """

    def __init__(self, pages: int, page_size: int, note: Note) -> None:
        self.pages, self.page_size, self.note = pages, page_size, note
        self.of: dict[int, int] = {}
        self.freed: list[tuple[int, int]] = []
        self._may_free: WindowJudge = self._nothing

    @property
    def free(self) -> int:
        """Window pages that nobody owns."""
        return self.pages - len(self.of)

    def take(self, slots: Sequence[int], mapped: Sequence[int]) -> None:
        """Full slots were handed out, with these window slots: SW1."""
        size = self.page_size
        owners = {window: page for page, window in self.of.items()}
        for slot, window in zip(slots, mapped, strict=True):
            page, own = slot // size, window // size
            if window % size != slot % size or not 1 <= own <= self.pages:
                self.note("SW1", f"slot {slot} was handed out with window slot {window}")
            elif owners.setdefault(own, page) != page or self.of.setdefault(page, own) != own:
                self.note(
                    "SW1",
                    f"page {page} was handed out with window page {own}, which is that of page "
                    f"{owners[own]}",
                )

    def drop(self, pages: Collection[int]) -> int:
        """These full pages have no window from now on; returns how many had one."""
        return sum(self.of.pop(page, None) is not None for page in pages)

    def release(self, pages: Collection[int]) -> bool:
        """Judge a ``free_swa``, then make it; False when it was noted as a violation."""
        for page in pages:
            complaint = self._may_free(page) if page in self.of else None
            if complaint is not None:
                self.note(*complaint)
                return False
        self.freed.append((0, self.drop(pages)))
        return True

    @contextmanager
    def permits(self, may_free: Collection[int] | WindowJudge) -> Iterator[None]:
        """In the block the windows of these full pages may be freed alone."""
        outer = self._may_free
        self._may_free = may_free if callable(may_free) else self._only(may_free)
        try:
            yield
        finally:
            self._may_free = outer

    def _nothing(self, page: int) -> tuple[str, str]:
        return "SW2", f"the window of page {page} was freed; this call frees none"

    def _only(self, allowed: Collection[int]) -> WindowJudge:
        def judge(page: int) -> tuple[str, str] | None:
            if page in allowed:
                return None
            return "SW2", f"the window of page {page} was freed; allowed are {sorted(allowed)}"

        return judge


class RecordingWindows(RecordingAllocator):
    """The allocator of both pools, recorded."""

    def __init__(self, inner: Any, ledger: Ledger, windows: Windows) -> None:
        super().__init__(inner, ledger)
        self.windows = windows

    def free(self, free_index: torch.Tensor) -> None:
        """Both pools get what the ledger has nothing against."""
        pages = list(dict.fromkeys(slot // self.ledger.page_size for slot in free_index.tolist()))
        if self.ledger.release(pages):
            self.windows.freed.append((len(pages), self.windows.drop(pages)))
            self.inner.free(free_index)

    def free_swa(self, free_index: torch.Tensor) -> None:
        """The window pool gets what there is nothing against."""
        pages = list(dict.fromkeys(slot // self.ledger.page_size for slot in free_index.tolist()))
        if self.windows.release(pages):
            self.inner.free_swa(free_index)

    def clear(self) -> None:
        super().clear()
        self.windows.of.clear()
