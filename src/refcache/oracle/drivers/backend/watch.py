"""Sees what a backend does to its directory, whoever wrote it: a journal for the simulated disk.

While it watches, the functions of ``os`` and ``open`` through which Python reaches files are
wrapped. Around each call the directory is looked at, and what has changed is written down; bytes
may so be written in any way, only syncs must go through ``os.fsync`` or ``os.fdatasync``. Files are
told apart by their inodes, kept open so that none is used twice.
"""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from refcache.oracle.drivers.backend.medium import Change

HOOKED = (
    *((os, name) for name in ("open", "close", "rename", "replace", "remove", "unlink", "link")),
    *((os, name) for name in ("fsync", "fdatasync", "truncate", "ftruncate", "rmdir")),
    (io, "open"),
    (builtins, "open"),
)
REAL = {(owner, name): getattr(owner, name) for owner, name in HOOKED}
SYNCS = ("fsync", "fdatasync")


class Died(BaseException):
    """The process that is watched is killed here."""


class Watch:
    """The journal of one directory.

    Attributes:
        changed: is told each change, when it has happened.
        left: calls until the process dies; None: it lives. A dead one only closes what is open.
    """

    def __init__(self, path: str, changed: Callable[[Change], None]) -> None:
        self.path = path
        self.changed = changed
        self._numbers: dict[int, int] = {}  # inode -> number
        self._kept: list[int] = []
        self._names: dict[str, int] = {}
        self._data: dict[int, bytes] = {}
        self._busy = False
        self.left: int | None = None
        self.look()

    def __del__(self) -> None:
        for handle in self._kept:
            REAL[os, "close"](handle)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Write down what happens in the block."""
        for owner, name in HOOKED:
            setattr(owner, name, self._hook(owner, name))
        try:
            yield
        finally:
            for owner, name in HOOKED:
                setattr(owner, name, REAL[owner, name])
            self.look()

    def _hook(self, owner: Any, name: str) -> Callable[..., Any]:
        real = REAL[owner, name]

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self._busy or not self._ours(args):
                return real(*args, **kwargs)
            self.look()
            if name != "close":
                self._dies()
            answer = real(*args, **kwargs)
            if name in SYNCS:
                handle = args[0] if isinstance(args[0], int) else args[0].fileno()
                self._tell(self._sync_of(os.fstat(handle)))
            self.look()
            return answer

        return hooked

    def _ours(self, args: tuple[Any, ...]) -> bool:
        """Whether a call is about this directory, or an open file; others (of a finalizer, of
        another thread) change nothing here."""
        first = args[0] if args else None
        return isinstance(first, int) or (
            isinstance(first, str | os.PathLike) and os.fspath(first).startswith(self.path)
        )

    def _dies(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Died

    def _tell(self, *changes: Change) -> None:
        self._busy = True
        try:
            for change in changes:
                self.changed(change)
        finally:
            self._busy = False

    def _sync_of(self, told: os.stat_result) -> Change:
        """A sync of this directory, or of a file: of number -1 if it is elsewhere."""
        if told.st_ino == os.stat(self.path).st_ino:
            return Change("sync", 0)
        return Change("sync", self._numbers.get(told.st_ino, -1))

    def look(self) -> None:
        """Compare the directory with what it was, and tell the changes."""
        self._busy = True
        try:
            names, data = self._seen()
        finally:
            self._busy = False
        changes = []
        new, gone = names.keys() - self._names.keys(), self._names.keys() - names.keys()
        replaced = {n for n in names.keys() & self._names.keys() if names[n] != self._names[n]}
        for name in sorted(new | replaced):
            old = next((o for o in sorted(gone) if self._names[o] == names[name]), "")
            gone = gone - {old}
            changes.append(Change("name", names[name], name, old))
        changes += [Change("remove", self._names[name], name) for name in sorted(gone)]
        changes += [
            Change("bytes", file, data=content)
            for file, content in data.items()
            if self._data.get(file, b"") != content
        ]
        self._names, self._data = names, {**self._data, **data}
        self._tell(*changes)

    def _seen(self) -> tuple[dict[str, int], dict[int, bytes]]:
        names: dict[str, int] = {}
        data: dict[int, bytes] = {}
        for entry in os.scandir(self.path):
            with suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    number, content = self._file(entry.path)
                    names[entry.name], data[number] = number, content
        return names, data

    def _file(self, path: str) -> tuple[int, bytes]:
        """The number of a file, and its bytes."""
        handle = REAL[os, "open"](path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        told = os.fstat(handle)
        number = self._numbers.get(told.st_ino)
        if number is None:
            number = self._numbers[told.st_ino] = len(self._numbers) + 1
            self._kept.append(handle)
            return number, os.pread(handle, told.st_size, 0)
        try:
            return number, os.pread(handle, told.st_size, 0)
        finally:
            REAL[os, "close"](handle)
