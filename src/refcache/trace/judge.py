"""``judge``: could a legal cache have produced this trace? If not, from which record on, and why.

The records are applied one by one to a model that knows who owns each page of both tiers and what
it holds. Whatever the contract leaves open is taken from the trace: any free page, any victim, any
split point, more evicted than asked, a copy that ends when it ends. What it does not leave open is
compared, under the same rules as everywhere (:mod:`refcache.oracle.rules.catalog`).

The model sees no bytes and no nodes: a wrong copy, or a lock count that nothing reveals, is for the
suites. Storage below the host is not modelled.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from refcache.oracle.ledger.ledger import Freed
from refcache.oracle.rules.violation import Violation
from refcache.trace import format as f
from refcache.trace import host_rules  # noqa: F401  (registers its judging functions)
from refcache.trace.events.residency import DEVICE
from refcache.trace.events.stream import judge_events
from refcache.trace.file import TraceReader, is_recorded
from refcache.trace.model import show
from refcache.trace.pool_rules import may_refuse
from refcache.trace.rules import JUDGES, Model, Undecidable, judges, op_of
from refcache.trace.tree_rules import due, evicted_enough, returned
from refcache.trace.verdict import TraceVerdict

PARTS = (
    f.Alloc,
    f.AllocExtend,
    f.AllocDecode,
    f.Free,
    f.Clear,
    f.HostAlloc,
    f.HostFree,
    f.HostClear,
    f.Write,
    f.Load,
    f.StartLoading,
    f.Ack,
)
"""What may happen inside another call."""


def judge_trace(path: str | Path) -> TraceVerdict:
    """Judge a trace file up to its end, its first violation, or its damage.

    Raises:
        InvalidTrace: it cannot be opened, or has no header.
    """
    reader = TraceReader(path)
    return judge_lines(reader.header, reader)


def judge_file(
    path: str | Path, *, format: str | None = None, engine: str | None = None
) -> TraceVerdict:
    """Judge a trace, or else a stream of KV events.

    Args:
        format, engine: of a stream of events; see :func:`judge_events`. Naming one says that the
            file is a stream.

    Raises:
        InvalidTrace: it cannot be opened, or is neither.
    """
    if format is None and engine is None and is_recorded(path):
        return judge_trace(path)
    return judge_events(path, format=format, engine=engine)


def judge_lines(header: f.Header, lines: Iterable[f.Line]) -> TraceVerdict:
    """Judge lines in memory, or those of a reader, whose damage is then reported."""
    judge = Judge(header)
    for line in lines:
        try:
            judge.apply(line)
        except Violation as violation:
            return TraceVerdict(
                "violation",
                judge.records,
                line.n,
                op_of(line.call),
                violation.id,
                violation.evidence,
                tuple(judge.argument(violation.id, violation.evidence)),
            )
        except Undecidable as reason:
            where = f"record {line.n}, {op_of(line.call)}: {reason}"
            return TraceVerdict("unknown", judge.records, damage=where)
    damage = getattr(lines, "damage", None)
    return TraceVerdict("ok" if damage is None else "unknown", judge.records, damage=damage)


class Judge(Model):
    """Applies lines one by one to the model, under all rules."""

    def apply(self, line: f.Line) -> None:
        """Judge one line and make it so.

        Raises:
            Violation: no legal cache could have produced it.
            Undecidable: it names something that no record before it does.
        """
        self.records += 1
        self.n = line.n
        call = line.call
        self.device.at = self.host.at = f"record {line.n} {op_of(call)}"
        self.device.freed, self.host.freed = Freed(), Freed()
        self.device.dropped, self.host.dropped = [], []
        self.loaded = []
        self.device.gaps = self.host.gaps = self.header.excerpt and line.after is None
        self.totals = not self.header.excerpt or line.before is not None
        self.written = {}
        before = self.counts()
        if call.error is not None and may_refuse(self, call):
            return
        permit(self, call)
        returned(self, line)
        for part in line.inner:
            self._dispatch(part, inner=True)
        if call.error is not None:
            raise Violation("crash", f"{op_of(call)} raised {call.error}")
        self._dispatch(call, inner=False)
        self.file_written()
        self._closed()
        self._sizes(line, before)

    def _dispatch(self, call: f.AnyCall, inner: bool) -> None:
        if inner and not isinstance(call, PARTS):
            raise Undecidable(f"{op_of(call)} inside another call")
        if inner and call.error is not None:
            return  # it did nothing; the outer call says what came of it
        JUDGES[type(call)](self, call)

    def _closed(self) -> None:
        """T1 on the device; on the host, what is left must still be reachable."""
        for prefix in self.device.dropped:
            if prefix not in self.device.cached and self.device.below[prefix]:
                below = next(p for p in self.device.cached if self.device.above(p) == prefix)
                raise Violation(
                    "T1",
                    f"the page of {show(prefix)} is gone from the device, but {show(below)} is in "
                    f"page {self.device.cached[below]}",
                )
        for prefix in (*self.device.dropped, *self.host.dropped):
            anywhere = prefix in self.device.cached or prefix in self.host.cached
            if not anywhere and self.host.below[prefix]:
                below = next(p for p in self.host.cached if self.host.above(p) == prefix)
                raise Violation(
                    "H1",
                    f"{show(prefix)} is gone from both tiers, but {show(below)} is in host page "
                    f"{self.host.cached[below]}, which nothing reaches",
                )

    def _sizes(self, line: f.Line, before: tuple[int, int, int]) -> None:
        """What the cache counts must change as what it did says."""
        after, known = line.after, line.before or self.last
        if after is None:
            return
        if self.totals:
            self._growth(known, after, before)
            self._delta(line.call, known, after)
        self._protected(after)
        if isinstance(line.call, f.Evict):
            evicted_enough(self, line.call, after)
        self.last = after

    def _growth(self, known: f.Sizes, after: f.Sizes, before: tuple[int, int, int]) -> None:
        """P1, A1 and H1: the sizes change by what the record did."""
        size = self.page_size
        free, cached, host_free = (
            (now - then) * size for now, then in zip(self.counts(), before, strict=True)
        )
        self.require(
            after.available - known.available == free,
            "P1",
            f"available_size() went from {known.available} to {after.available}, but the pages "
            f"that were freed less those that were taken are {free} tokens",
        )
        if after.evictable is not None and after.protected is not None:
            grown = after.evictable + after.protected
            grown -= (known.evictable or 0) + (known.protected or 0)
            self.require(
                grown == cached,
                "A1",
                f"evictable_size() + protected_size() grew by {grown}, but {cached} more tokens "
                "are cached",
            )
        if after.host_available is not None and known.host_available is not None:
            grown = after.host_available - known.host_available
            self.require(
                grown == host_free,
                "H1",
                f"the free host slots grew by {grown}, but {host_free} were freed less those taken",
            )

    def _delta(self, call: f.AnyCall, known: f.Sizes, after: f.Sizes) -> None:
        """K1: a lock returns by how much the evictable tokens changed."""
        if isinstance(call, f.IncLockRef | f.DecLockRef) and call.delta is not None:
            grown = (after.evictable or 0) - (known.evictable or 0)
            self.require(
                call.delta == grown,
                "K1",
                f"{op_of(call)} returned {call.delta}, evictable_size() changed by {grown}",
            )

    def _protected(self, after: f.Sizes) -> None:
        """At least what is held, which a copy in flight may add to; nothing if nobody holds."""
        if after.protected is None:
            return
        locked = len(self.device.locked()) * self.page_size
        holders = self.device.holding or self.copies
        fits = after.protected >= locked if holders else after.protected == 0
        self.require(
            fits, "A2", f"protected_size() = {after.protected}, but holders lock {locked} tokens"
        )


@judges(f.TakeEvents)
def _take_events(model: Model, call: f.TakeEvents) -> None:
    for event in call.events:
        model.events.apply(event)
    if DEVICE in model.events.media:
        model.events.media[DEVICE].check(model.device)


def permit(model: Model, call: f.AnyCall) -> None:
    """Say what this call may free, before its inner records are judged."""
    device, host = model.device, model.host
    device.may_free = device.only(set())
    host.may_free = partial(_host_may_free, model)
    if isinstance(call, f.Evict | f.InitLoadBack):
        device.may_free = _unless_copied(model, device.only_unlocked)
    elif isinstance(call, f.CacheUnfinishedReq | f.CacheFinishedReq):
        device.may_free = _unless_copied(model, device.only(due(model, call)))
    elif isinstance(call, f.Free | f.Write | f.Load):
        device.may_free = _unless_copied(model, partial(_only_callers, model))


def _unless_copied(model: Model, judge: Any) -> Any:
    """The judge, and nothing that a copy in flight still uses."""

    def judged(page: int) -> tuple[str, str] | None:
        for copy in model.copies.values():
            if page in copy.device:
                return "X2", (
                    f"page {page} was freed while the {copy.kind} of record {copy.n} is not "
                    "acknowledged"
                )
        complaint: tuple[str, str] | None = judge(page)
        return complaint

    return judged


def _only_callers(model: Model, page: int) -> tuple[str, str] | None:
    if isinstance(model.device.owner[page], str):
        return None
    return "P1", f"{model.device.says(page)}, and was freed by a caller of the allocator"


def _host_may_free(model: Model, page: int) -> tuple[str, str] | None:
    for copy in model.copies.values():
        if page in copy.host:
            return "X1", (
                f"page {page} was freed while the {copy.kind} of record {copy.n} is not "
                "acknowledged"
            )
    return None
