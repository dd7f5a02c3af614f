"""Streams of KV events judged: could a legal cache have announced these?

Judged is what follows from the events alone, for each rank and cache group on its own: a block is
removed only while it is stored, and stored after the block before it (N2); a hash never stands for
two prefixes, or for one prefix of two adapters (N1); the tokens of an event fill its blocks (N3);
batches are numbered without a gap (N4). What an engine is free to do besides is data,
:data:`LIBERTIES`. Whether the cache really holds the blocks is judged where calls were recorded.

A stream starts with an empty cache. One whose first batch has a later number was joined late: what
rests on blocks that were never seen is then counted and not judged, until the cache is cleared.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from refcache.errors import InvalidTrace, UnknownName
from refcache.oracle.rules.violation import Violation
from refcache.readers.block_event import BlockEvent, EventBatch, Hash
from refcache.readers.events import read_events
from refcache.trace.verdict import TraceVerdict


@dataclass(frozen=True)
class Liberties:
    """What an engine may do that another must not.

    Attributes:
        again: announce a block that is stored (a full report, or a reused block).
        copies: hold several physical copies of one block, each announced and removed on its own.
        orphans: store a block whose parent was removed meanwhile. Legal for nobody: a parent that
            was never announced.
    """

    again: bool
    copies: bool
    orphans: bool


LIBERTIES = {
    "any": Liberties(again=True, copies=True, orphans=True),
    "vllm": Liberties(again=True, copies=True, orphans=True),
    "sglang": Liberties(again=False, copies=False, orphans=False),
    "dynamo": Liberties(again=True, copies=False, orphans=True),
    "trtllm": Liberties(again=True, copies=False, orphans=True),
    "mooncake": Liberties(again=True, copies=True, orphans=True),
}
"""By engine; ``any`` where the stream does not tell which it is."""


@dataclass
class _Group:
    """The blocks of one cache group of one rank."""

    stored: dict[str, Counter[Hash]] = field(default_factory=dict)  # medium -> copies of a hash
    known: set[Hash] = field(default_factory=set)  # announced since the last clear
    named: dict[Hash, tuple[Any, Any, Any]] = field(
        default_factory=dict
    )  # parent, content, adapter


class Announced:
    """What is cached where after the events so far; raises at the first impossible one.

    Attributes:
        unknown: kinds of events that were skipped, with their counts.
        excused: events that a late joiner could not judge.
        about: the block that the violation is about, once there is one.
    """

    def __init__(self, liberties: Liberties) -> None:
        self.liberties = liberties
        self.ranks: dict[Any, dict[Any, _Group]] = {}
        self.numbers: dict[Any, int] = {}
        self.first_number = 0
        self.cleared: set[Any] = set()  # ranks that were cleared, so that all of them is known
        self.unknown: Counter[str] = Counter()
        self.excused = 0
        self.about: Hash | None = None

    def number(self, batch: EventBatch) -> None:
        """Check the number of a batch against the one before of its source.

        Raises:
            Violation: N4.
        """
        if batch.seq is None:
            return
        last = self.numbers.get(batch.source)
        self.numbers[batch.source] = batch.seq
        if last is None:
            if batch.from_zero and batch.seq > 0:
                self.first_number = batch.seq
        elif batch.seq != last + 1:
            lost = batch.seq - last - 1
            what = f"{lost} are missing" if lost > 0 else "it does not come after it"
            self._fail("N4", f"batch {batch.seq} follows batch {last}: {what}")

    def apply(self, event: BlockEvent) -> None:
        """Apply one event.

        Raises:
            Violation: it cannot come after those before it; then the state is of no more use.
        """
        if event.op == "other":
            self.unknown[event.kind] += 1
        elif event.op == "cleared":
            self._clear(event)
        elif event.op == "stored":
            self._store(event)
        else:
            for block in event.hashes:
                self._remove(event, block)

    def resident(self) -> dict[tuple[Any, Any, str], Counter[Hash]]:
        """(rank, group, medium) -> copies of each block."""
        return {
            (rank, name, medium): +copies
            for rank, groups in self.ranks.items()
            for name, group in groups.items()
            for medium, copies in group.stored.items()
        }

    def _clear(self, event: BlockEvent) -> None:
        """Nothing is stored any more, on one rank or all, on one medium or all."""
        ranks = [event.rank] if event.rank is not None else list(self.ranks)
        for rank in ranks:
            for group in self.ranks.get(rank, {}).values():
                for medium in [event.medium] if event.medium else list(group.stored):
                    group.stored.pop(medium, None)
                group.known = {h for copies in group.stored.values() for h in copies}
        if event.medium is None:
            self.cleared.update(ranks)

    def _store(self, event: BlockEvent) -> None:
        """Blocks become resident: N3 for their tokens, N2 for their parent, N1 for their names."""
        if event.misfit is not None:
            self._fail("N3", event.misfit)
        groups = self.ranks.setdefault(event.rank, {})
        group = groups.setdefault(event.group, _Group())
        copies = group.stored.setdefault(event.medium or "", Counter())
        parent = event.parent
        if parent is not None and not self._has(groups, group, parent):
            if not self._late(event.rank):
                told = f"stored {_shown(event.contents)} after page {parent}, which is not stored"
                self._fail("N2", told, parent)
            self.excused += 1
        named: dict[Hash, tuple[Any, Any, Any]] = {}
        for i, block in enumerate(event.hashes):
            if event.contents is not None:
                name = (parent, event.contents[i], event.adapter)
                old = named.get(block) or group.named.setdefault(block, name)
                self._same(group, block, old, name)
                named[block] = name
            if copies[block] and not (self.liberties.again or self.liberties.copies):
                told = f"stored page {block} of {self._prefix(group, block)} twice"
                self._fail("N2", told, block)
            parent = block
        for block in event.hashes:
            copies[block] = copies[block] + 1 if self.liberties.copies else 1
            group.known.add(block)

    def _fail(self, rule: str, evidence: str, about: Hash | None = None) -> NoReturn:
        self.about = about
        raise Violation(rule, evidence)

    def _late(self, rank: Any) -> bool:
        """Whether blocks of a rank were perhaps stored before the first batch."""
        return self.first_number > 0 and rank not in self.cleared

    def _has(self, groups: dict[Any, _Group], group: _Group, block: Hash) -> bool:
        """Whether ``block`` may be a parent: stored (or once announced) in this rank."""
        for candidate in [group, *(g for g in groups.values() if g is not group)]:
            if self.liberties.orphans and block in candidate.known:
                return True
            if any(copies[block] for copies in candidate.stored.values()):
                return True
        return False

    def _same(
        self, group: _Group, block: Hash, old: tuple[Any, Any, Any], new: tuple[Any, Any, Any]
    ) -> None:
        """N1: a block that is announced again has the name it had."""
        if old[2] != new[2]:
            was, now = (_adapter(name[2]) for name in (old, new))
            self._fail("N1", f"page {block} is of {now}, and was of {was}", block)
        if old[:2] != new[:2]:
            now, was = self._chain(group, new), self._chain(group, old)
            self._fail("N1", f"page {block} is {now}, and was {was}", block)

    def _remove(self, event: BlockEvent, block: Hash) -> None:
        """Take one copy away; ``moved`` puts it on the event's medium instead."""
        groups = self.ranks.get(event.rank, {})
        named = [groups[event.group]] if event.group in groups else []
        for group in named if event.group is not None else [*named, *groups.values()]:
            for medium, copies in group.stored.items():
                moved = event.op == "moved"
                if copies[block] and (moved or event.medium in (None, medium)):
                    copies[block] -= 1
                    if moved:
                        group.stored.setdefault(event.medium or "", Counter())[block] += 1
                    return
        if self._late(event.rank) and not any(block in group.known for group in groups.values()):
            self.excused += 1
            return
        where = f" on {event.medium}" if event.medium not in (None, "GPU") else ""
        self._fail("N2", f"{event.op} page {block}, which is not stored{where}", block)

    def _prefix(self, group: _Group, block: Hash) -> str:
        return self._chain(group, group.named[block]) if block in group.named else "?"

    def _chain(self, group: _Group, name: tuple[Any, Any, Any]) -> str:
        """The whole prefix that a name stands for, as far as it was told."""
        contents = []
        above: Any = name
        for _ in range(len(group.named) + 1):
            contents.append(above[1])
            if above[0] is None or above[0] not in group.named:
                break
            above = group.named[above[0]]
        return _shown(tuple(reversed(contents)))


def _shown(contents: tuple[Any, ...] | None) -> str:
    if contents is None:
        return "a page"
    if all(isinstance(content, tuple) for content in contents):
        return str([token for content in contents for token in content])
    return str(list(contents))


def _adapter(name: Any) -> str:
    return "no adapter" if name is None else f"adapter {', '.join(map(str, name))!r}"


def judge_events(
    path: str | Path, *, format: str | None = None, engine: str | None = None
) -> TraceVerdict:
    """Judge a stream up to its end, its first violation, or its damage.

    ``records`` of the verdict counts events; ``n`` is the line of the failing one.

    Args:
        format: a name of ``refcache.readers.EVENT_FORMATS``, instead of the first value's form.
        engine: a name of ``LIBERTIES``, instead of what the stream tells.

    Raises:
        InvalidTrace: the file cannot be read, or its first line holds no KV event. UnknownName.
    """
    if engine is not None and engine not in LIBERTIES:
        raise UnknownName("engine", engine, LIBERTIES)
    return judge_batches(read_events(path, format), engine)


def judge_batches(batches: Iterable[EventBatch], engine: str | None = None) -> TraceVerdict:
    """Judge batches, one at a time; see :func:`judge_events`.

    Raises:
        InvalidTrace: the first batch cannot be read. What breaks off later is the damage.
    """
    announced: Announced | None = None
    name, count, damage = engine or "any", 0, None
    op, line = "batch", 0
    try:
        for batch in batches:
            if announced is None:
                name = engine or batch.engine or "any"
                announced = Announced(LIBERTIES[name])
            op, line = "batch", batch.line
            announced.number(batch)
            for event in batch.events:
                count += 1
                op = event.kind
                announced.apply(event)
    except Violation as violation:
        notes = tuple(_notes(announced, name, engine)) if announced else ()
        rule, evidence = violation.id, violation.evidence
        return TraceVerdict("violation", max(count, 1), line, op, rule, evidence, notes=notes)
    except InvalidTrace as error:
        if announced is None:
            raise
        damage = str(error)
    if announced is None:
        return TraceVerdict("unknown", 0, damage="there are no events")
    notes = tuple(_notes(announced, name, engine))
    verdict = "unknown" if damage is not None or announced.excused else "ok"
    return TraceVerdict(verdict, count, damage=damage, notes=notes)


def _notes(announced: Announced, name: str, engine: str | None) -> Iterable[str]:
    if engine is None:
        told = "not told, so every engine's liberties are allowed" if name == "any" else name
        yield f"engine: {told}"
    for kind, count in announced.unknown.items():
        yield f"skipped: {count:,} of the unknown kind {kind}"
    if announced.first_number:
        yield (
            f"joined late: the first batch has number {announced.first_number}; "
            f"{announced.excused:,} events rest on blocks that were never seen"
        )
