"""The few file operations that a file backend needs, on one directory.

:class:`OsDisk` is the operating system's; tests have others, which fail or kill.

What the operations promise is what POSIX promises: a name may be lost until the directory is
synced, the bytes of a file until the file is; neither sync includes the other; a rename replaces
the old file at once for everybody who looks, but for the medium it is one more name to write.
"""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """A regular file: its name, bytes, and when it was written or touched last (a sort key)."""

    name: str
    size: int
    used: int


class Disk(Protocol):
    """One directory. Names are without a path; each call raises OSError where the system does."""

    def create(self, name: str) -> int:
        """Make a file that is not there yet, open for writing; a handle."""

    def open(self, name: str) -> int:
        """Open a regular file for reading; a handle."""

    def write(self, handle: int, parts: Sequence[bytes | memoryview]) -> None:
        """Append all of ``parts``."""

    def read(self, handle: int, parts: Sequence[bytearray | memoryview]) -> int:
        """Fill ``parts`` from the file's beginning; how many bytes there were."""

    def size(self, handle: int) -> int:
        """Bytes of the file."""

    def lock(self, handle: int) -> bool:
        """Lock the file against all other openings of it, until it is closed; False: it is."""

    def touch(self, handle: int) -> None:
        """The file was used now."""

    def sync(self, handle: int) -> None:
        """Wait until the bytes of the file are on the medium."""

    def close(self, handle: int) -> None:
        """Give the handle back, and its lock."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, in place of the file that has it."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def entries(self) -> list[Entry]:
        """The regular files, in no order."""

    def sync_directory(self) -> None:
        """Wait until the names are on the medium."""


class OsDisk:
    """The directory ``path``, made with its parents if it is not there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        parent = self.path
        made = []
        while not os.path.isdir(parent):
            made.append(parent)
            parent = os.path.dirname(parent)
        os.makedirs(self.path, exist_ok=True)
        for folder in made:
            _sync_directory(os.path.dirname(folder))

    def create(self, name: str) -> int:
        return os.open(self._at(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def open(self, name: str) -> int:
        # a pipe, or a link to somewhere, is not a page and must not make the reader wait
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self._at(name), flags)

    def write(self, handle: int, parts: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(part).cast("B") for part in parts]
        while left:
            _skip(left, os.writev(handle, left))

    def read(self, handle: int, parts: Sequence[bytearray | memoryview]) -> int:
        left = [memoryview(part).cast("B") for part in parts]
        total = 0
        while left and (count := os.preadv(handle, left, total)):
            total += count
            _skip(left, count)
        return total

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def lock(self, handle: int) -> bool:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def touch(self, handle: int) -> None:
        os.utime(handle)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, old: str, new: str) -> None:
        os.replace(self._at(old), self._at(new))

    def remove(self, name: str) -> None:
        os.remove(self._at(name))

    def entries(self) -> list[Entry]:
        found = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # removed by somebody meanwhile
                    if entry.is_file(follow_symlinks=False):
                        told = entry.stat(follow_symlinks=False)
                        found.append(Entry(entry.name, told.st_size, told.st_mtime_ns))
        return found

    def sync_directory(self) -> None:
        _sync_directory(self.path)

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)


def discard(disk: Disk, name: str) -> bool:
    """Remove a file; False if it is there still."""
    try:
        disk.remove(name)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _sync_directory(path: str) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _skip(parts: list[memoryview], count: int) -> None:
    """Take the first ``count`` bytes off ``parts``."""
    while parts and count >= len(parts[0]):
        count -= len(parts.pop(0))
    if count:
        parts[0] = parts[0][count:]
