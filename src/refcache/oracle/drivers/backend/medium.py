"""A simulated disk: what a directory may look like after a crash.

What a program did to a directory is a journal of changes (:mod:`.watch` writes it). Two things make
them last: a sync of a file for its bytes, a sync of the directory for its names; neither includes
the other. Until then

* a new name, a rename or a removal may be lost, each by itself, so also *reordered*: a rename may
  last whose data did not, and one that came later than another that did not;
* the bytes of a file may be those of its last sync, all of them, a beginning of them, or as many
  zeros (the size lasted, the data did not).

:meth:`Medium.images` lists the directories that this allows, at the point that the journal has
come to. POSIX allows every one; a file system that is mounted in a careful mode, fewer.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

MOST_NAMES = 5
"""Pending changes of names that are tried in every combination; of more, the oldest or the newest
ones are lost, or one alone."""


class Change(NamedTuple):
    """One change: *bytes*, *sync* of a file; *name*, *remove* of a name; *sync* of file 0: the
    directory. ``old`` is the name that a rename takes away."""

    kind: str
    file: int
    name: str = ""
    old: str = ""
    data: bytes = b""


class Medium:
    """See the module docstring. Files are numbers above 0.

    Attributes:
        names, data: what is sure to last. ``pending``: changes of names that are not.
        fresh: bytes of files since their last sync, where they differ from it.
    """

    def __init__(self) -> None:
        self.names: dict[str, int] = {}
        self.data: dict[int, bytes] = {}
        self.pending: list[Change] = []
        self.fresh: dict[int, bytes] = {}

    def apply(self, change: Change) -> None:
        """The program goes on by one change."""
        if change.kind == "bytes":
            self.fresh[change.file] = change.data
        elif change.kind in ("name", "remove"):
            self.pending.append(change)
        elif change.file:
            self.data[change.file] = self.fresh.pop(change.file, self.data.get(change.file, b""))
        else:
            self.names = _named(self.names, self.pending)
            self.pending = []

    def images(self) -> Iterator[dict[str, bytes]]:
        """Each directory that a crash at this point may leave, by name."""
        for lasting in _subsets(self.pending):
            names = _named(self.names, lasting)
            yield from self._contents(names)

    def _contents(self, names: dict[str, int]) -> Iterator[dict[str, bytes]]:
        """Of these names: all unsynced bytes last, none do, or one file is the exception."""
        unsure = sorted({file for file in names.values() if file in self.fresh})
        whole = {**self.data, **self.fresh}
        yield {name: whole.get(file, b"") for name, file in names.items()}
        if unsure:
            yield {name: self.data.get(file, b"") for name, file in names.items()}
        for file in unsure:
            for torn in self._torn(file):
                at = whole | {file: torn}
                yield {name: at.get(f, b"") for name, f in names.items()}

    def _torn(self, file: int) -> Iterator[bytes]:
        new = self.fresh[file]
        yield bytes(len(new))
        yield new[: len(new) // 2]
        yield new[:-1]
        yield new[: len(new) // 2] + bytes(len(new) - len(new) // 2)


def _subsets(pending: list[Change]) -> Iterator[list[Change]]:
    if len(pending) <= MOST_NAMES:
        for kept in itertools.product((True, False), repeat=len(pending)):
            yield list(itertools.compress(pending, kept))
        return
    for cut in range(len(pending) + 1):
        yield pending[:cut]
        yield pending[cut:]
    for i in range(len(pending)):
        yield pending[:i] + pending[i + 1 :]


def _named(names: dict[str, int], changes: list[Change]) -> dict[str, int]:
    """The names after these changes."""
    after = dict(names)
    for change in changes:
        if change.kind == "remove":
            after.pop(change.name, None)
        else:
            after[change.name] = change.file
            if change.old and after.get(change.old) == change.file:
                del after[change.old]
    return after
