"""A batch of pages on its way into files: written, synced, renamed, and their names synced.

All pages are written before the first is synced, and all renamed before the directory is synced
once; a page is stored when its bytes *and* its name are on the medium. In that order no crash
leaves a name without its bytes, and nothing that was called stored is lost.
"""

from collections.abc import Set
from contextlib import suppress
from types import TracebackType

import torch

from refcache.storage.disk import Disk, discard
from refcache.storage.page_format import PageFormat, memory_of


class FileBatch:
    """A ``with`` block: its files are closed, and unlocked, at the end.

    Attributes:
        written: name -> (temporary name, handle) of each page that is on its way.
    """

    def __init__(self, disk: Disk, form: PageFormat, writer: str) -> None:
        self.disk = disk
        self.form = form
        self.writer = writer
        self.written: dict[str, tuple[str, int]] = {}
        self._handles: list[int] = []

    def __enter__(self) -> "FileBatch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            self.disk.close(handle)

    def add(self, name: str, key: str, page: torch.Tensor) -> bool:
        """Write a page under a temporary name, and lock it; False if that fails."""
        temporary = self.form.temporary(name, self.writer)
        try:
            handle = self.disk.create(temporary)
        except OSError:
            return False
        self._handles.append(handle)
        with suppress(OSError):  # no space, or a medium that fails: nothing of it stays
            memory = memory_of(page)
            if self.disk.lock(handle):
                self.disk.write(handle, [self.form.header(key, memory), memory])
                self.written[name] = (temporary, handle)
                return True
        discard(self.disk, temporary)
        return False

    def publish(self, found: Set[str]) -> frozenset[str]:
        """Give the files their names; the names that last, with those of ``found``.

        ``found`` were there already: perhaps renamed by a process that died, or that has not come
        to its sync yet, so the directory is synced for them too. When something fails, nothing of
        the batch stays and nothing lasts.
        """
        placed: list[str] = []
        try:
            for _, handle in self.written.values():
                self.disk.sync(handle)
            for name, (temporary, _) in self.written.items():
                self.disk.rename(temporary, name)
                placed.append(name)
            if placed or found:
                self.disk.sync_directory()
            return frozenset(placed) | found
        except OSError:
            for name, (temporary, _) in self.written.items():
                discard(self.disk, name if name in placed else temporary)
            return frozenset()
