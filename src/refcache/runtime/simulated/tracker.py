"""The race tracker: which two accesses to one cell does nothing order?

Vector clocks over actors (streams and host threads). Every launch gets, when it is issued, the
clock of everything that is ordered before it: program order of its stream, what its stream has
waited for, and what the host thread that issues it knows to be done. Two accesses to one cell, at
least one a write, whose clocks do not order them are a race, in whichever order they would run; it
is reported when the second is issued, before it touches anything. A cell is one (pool, plane,
layer, slot); its history is its last write and, for each actor, its last read since. A free is no
access: the next owner's first access must simply be ordered after the previous owner's last one.

Also here, because it needs the same reports: the lifetime of index tensors. A launch holds a weak
reference to them; one that is dead when the launch runs was handed back to the allocator too early.

Left out: ownership of slots in flight (rules X1 to X3), which is not a matter of order.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from refcache.errors import RefcacheError
from refcache.runtime.api import Region, Slots

Clock = dict[int, int]  # actor index -> how many of its accesses are ordered before


def join(clock: Clock, other: Clock) -> None:
    """Let ``clock`` know all that ``other`` knows."""
    for actor, count in other.items():
        if count > clock.get(actor, 0):
            clock[actor] = count


class Actor:
    """A stream or a host thread: it does one thing after another.

    Attributes:
        clock: what is ordered before its next access; its own component counts its accesses.
    """

    def __init__(self, index: int, kind: str, name: str) -> None:
        self.index = index
        self.kind = kind
        self.name = name
        self.clock: Clock = {index: 0}

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}'"

    def access(self, name: str, issued: int) -> "Access":
        """Take the next step: a new access, with a snapshot of the clock."""
        clock = self.clock
        clock[self.index] += 1
        return Access(name, self, clock[self.index], issued, clock.copy())


class Access:
    """One launch, or one access by the host: ``number`` of its actor, ``issued`` of the machine."""

    __slots__ = ("actor", "clock", "issued", "name", "number")

    def __init__(self, name: str, actor: Actor, number: int, issued: int, clock: Clock) -> None:
        self.name = name
        self.actor = actor
        self.number = number
        self.issued = issued
        self.clock = clock

    def before(self, other: "Access") -> bool:
        """Is this access ordered before ``other``?"""
        return other.clock.get(self.actor.index, 0) >= self.number

    def __str__(self) -> str:
        return f"'{self.name}' (number {self.number} of {self.actor})"


class RaceFound(RefcacheError):
    """Two conflicting accesses to one cell that nothing orders.

    Attributes:
        first, second: the accesses, in the order in which they were issued.
        where: the cell, in words.
        missing: the edge that would have ordered them.
    """

    def __init__(
        self, one: Access, one_writes: bool, other: Access, other_writes: bool, where: str
    ) -> None:
        if one.issued > other.issued:
            one, one_writes, other, other_writes = other, other_writes, one, one_writes
        self.first, self.second, self.where = first, second, where = one, other, where
        known = second.clock.get(first.actor.index, 0)
        self.missing = (
            f"{second.actor} knows {first.actor} up to number {known}; expected a wait for "
            f"number {first.number} before '{second.name}' (an event recorded after it on "
            f"{first.actor} and waited for by {second.actor}, or by the host before the launch)"
        )
        kind = {True: "write", False: "read"}
        super().__init__(
            f"race on {where}: {kind[one_writes]} by {first} and {kind[other_writes]} by "
            f"{second} are not ordered. {self.missing}"
        )


class DeadIndex(RefcacheError):
    """A launch ran after an index tensor that it needs had been handed back to the allocator."""

    def __init__(self, access: Access, position: int) -> None:
        self.access, self.position = access, position
        super().__init__(
            f"index tensor {position} of {access} is dead when the launch runs; expected "
            f"record_stream of it on {access.actor}, or a reference kept until then"
        )


class Cells(dict[int, list[Any]]):
    """The cells of one (pool, plane, layer): slot -> [last write, last reads, retired].

    The reads are by actor. What these two have replaced is retired, and kept only while a launch
    is pending whose slots are not known.
    """

    def __init__(self, where: str) -> None:
        self.where = where


class Touch(NamedTuple):
    """A region of one launch, ready to be checked."""

    cells: Cells
    slots: Iterable[int] | Callable[[], Slots | list[int]]
    write: bool


class Held:
    """A weak reference to the storage of an index tensor, and a copy of its values at the issue.

    The reference is followed once, when the launch runs.
    """

    __slots__ = ("_slots", "_tensor", "copy", "place", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.storage = weakref.ref(tensor.untyped_storage())
        self.copy = tensor.clone()
        self.place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._tensor: torch.Tensor | None = None
        self._slots: list[int] | None = None

    def get(self) -> torch.Tensor | None:
        """The tensor; None when its storage is gone."""
        if self._tensor is None:
            storage = self.storage()
            if storage is not None:
                self._tensor = torch.empty(0, dtype=self.copy.dtype).set_(storage, *self.place)
        return self._tensor

    def slots(self) -> list[int]:
        """Its values; those at the issue when its storage is gone."""
        if self._slots is None:
            tensor = self.get()
            self._slots = (self.copy if tensor is None else tensor).tolist()
        return self._slots


def _values(slots: Slots | list[int]) -> Iterable[int]:
    if isinstance(slots, torch.Tensor):
        values: list[int] = slots.flatten().tolist()
        return values
    return (slots,) if isinstance(slots, int) else slots


def late(regions: Iterable[Region], indices: Mapping[int, Held]) -> list[Region]:
    """The regions, to be checked when the launch runs, with the slots they have now.

    Those of ``indices`` (see :meth:`Tracker.issue`) and those of functions are read late anyhow.
    """
    return [
        region if callable(region.slots) or id(region.slots) in indices else _fixed(region)
        for region in regions
    ]


def _fixed(region: Region) -> Region:
    values = torch.tensor(list(_values(region.slots)), dtype=torch.int64)  # type: ignore[arg-type]
    return region._replace(slots=lambda: values)


class Tracker:
    """See the module docstring.

    Args:
        stop: raise the first report where it is found; else only collect.

    Attributes:
        reports: every :class:`RaceFound` and :class:`DeadIndex`, in the order found.
    """

    def __init__(self, stop: bool = True) -> None:
        self.stop = stop
        self.reports: list[RefcacheError] = []
        self._pools: dict[int, tuple[Any, dict[tuple[int, int], Cells]]] = {}
        self._late = 0  # launches that are pending and whose slots are not all known
        self._retired: list[list[Any]] = []  # cells with a third element

    def issue(
        self,
        access: Access,
        reads: Iterable[Region],
        writes: Iterable[Region],
        indices: Mapping[int, Held] = MappingProxyType({}),
    ) -> list[Touch]:
        """Check ``access``, which is being issued.

        Args:
            indices: its index tensors by their ``id``; slots given as one of them are read late.

        Returns:
            The regions whose slots are not known yet: :meth:`run` them when the launch runs.
        """
        known: dict[int, tuple[Any, Iterable[int]]] = {}  # the planes of a copy share their slots
        ready: list[Touch] = []
        late: list[Touch] = []
        for write, regions in ((False, reads), (True, writes)):
            for pool, plane, layers, slots in regions:
                values: Iterable[int] | Callable[[], Slots | list[int]]
                if callable(slots):
                    values, into = slots, late
                elif id(slots) in indices:
                    values, into = indices[id(slots)].slots, late
                else:
                    if id(slots) not in known:
                        known[id(slots)] = (slots, _values(slots))
                    values, into = known[id(slots)][1], ready
                for layer in (layers,) if isinstance(layers, int) else layers:
                    into.append(Touch(self._cells(pool, plane, layer), values, write))
        self._check(access, ready)
        self._late += bool(late)
        return late

    def run(self, access: Access, late: Iterable[Touch]) -> None:
        """Check the regions that :meth:`issue` returned, if any: the launch runs now."""
        if not late:
            return
        try:
            self._check(access, late)
        finally:
            self._late -= 1
            if self._late == 0:
                for cell in self._retired:
                    cell[2] = None
                self._retired.clear()

    def _check(self, access: Access, touched: Iterable[Touch]) -> None:
        """Report every race of ``access`` on the cells ``touched``; enter it into their history.

        ``access`` may have been issued before some of that history, if its slots were not known
        then: it may come before the last write, and must be compared with what that has replaced.
        """
        index, clock = access.actor.index, access.clock
        for cells, slots, write in touched:
            for slot in _values(slots()) if callable(slots) else slots:
                cell = cells.get(slot)
                if cell is None:
                    first = [access, None, None] if write else [None, {index: access}, None]
                    cells[slot] = first
                    continue
                last, reads, retired = cell
                for old, wrote in retired or ():
                    if (write or wrote) and not (old.before(access) or access.before(old)):
                        self._race(old, wrote, access, write, cells, slot)
                if last is not None and clock.get(last.actor.index, 0) < last.number:
                    if access.before(last):
                        self._retire(cell, access, write)
                        continue
                    self._race(last, True, access, write, cells, slot)
                if not write:
                    before = None if reads is None else reads.get(index)
                    if reads is None:
                        cell[1] = {index: access}
                    elif before is None or before.number < access.number:
                        reads[index] = access
                    else:
                        before = access
                    self._retire(cell, before, False)
                    continue
                after = {}
                for reader, read in (reads or {}).items():
                    if access.before(read):
                        after[reader] = read
                        continue
                    if clock.get(read.actor.index, 0) < read.number:
                        self._race(read, False, access, True, cells, slot)
                    self._retire(cell, read, False)
                self._retire(cell, last, True)
                cell[0], cell[1] = access, after or None

    def _retire(self, cell: list[Any], access: Access | None, wrote: bool) -> None:
        """Keep what leaves the history while a launch with unknown slots is pending."""
        if self._late and access is not None:
            if cell[2] is None:
                cell[2] = []
                self._retired.append(cell)
            cell[2].append((access, wrote))

    def indices(self, access: Access, held: Iterable[Held]) -> list[torch.Tensor]:
        """The index tensors of a launch that runs now; reports those that are dead."""
        out = []
        for position, one in enumerate(held):
            tensor = one.get()
            if tensor is None:
                self._report(DeadIndex(access, position))
                tensor = one.copy
            out.append(tensor)
        return out

    def _race(
        self, one: Access, wrote: bool, other: Access, writes: bool, cells: Cells, slot: int
    ) -> None:
        self._report(RaceFound(one, wrote, other, writes, f"{cells.where} slot {slot}"))

    def _report(self, found: RefcacheError) -> None:
        self.reports.append(found)
        if self.stop:
            raise found

    def adopt(self, pool: Any, cells: dict[tuple[int, int], Cells]) -> None:
        """Know ``pool`` by the history of its cells, for as long as it lives."""
        key = id(pool)
        forget = partial(self._pools.pop, key)  # called with the dead reference: pop's default
        self._pools[key] = (weakref.ref(pool, forget), cells)

    def _cells(self, pool: Any, plane: int, layer: int) -> Cells:
        if id(pool) not in self._pools:
            self.adopt(pool, {})
        entry = self._pools[id(pool)]
        cells = entry[1].get((plane, layer))
        if cells is None:
            where = f"{type(pool).__name__} plane {plane} layer {layer}"
            cells = entry[1][plane, layer] = Cells(where)
        return cells
