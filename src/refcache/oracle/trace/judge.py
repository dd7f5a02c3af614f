"""``judge``: could a legal cache have produced this trace? If not, from which record on, and why.

The records are applied one by one to a model that knows who owns each page of both tiers and what
it holds. Whatever the contract leaves open is taken from the trace: any free page, any victim, any
split point, more evicted than asked, a copy that ends when it ends. What it does not leave open is
compared, under the same rules as everywhere (:mod:`refcache.oracle.catalog`).

The model sees no bytes and no nodes: a wrong copy, or a lock count that nothing reveals, is for the
suites. Storage below the host is not modelled.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import torch

from refcache.oracle.event_check import EventReplay
from refcache.oracle.ledger import Prefix
from refcache.oracle.trace import format as f
from refcache.oracle.trace.events import AllBlocksCleared
from refcache.oracle.trace.model import History, show
from refcache.oracle.violation import Violation
from refcache.reference import alloc_extend

SHOWN_PAGES = 4


class Undecidable(Exception):
    """A record that the records before do not suffice to judge."""


@dataclass(frozen=True)
class TraceVerdict:
    """What became of a trace.

    Attributes:
        verdict: ``ok``, ``violation`` or ``unknown`` (damaged, or not enough was recorded).
        records: how many were judged, the failing one included.
        n, op: number and name of the record that no legal cache could have produced.
        rule, evidence: the broken rule and what was seen.
        argument: what the evidence rests on, as records before it.
        damage: why the rest of the file could not be judged.
    """

    verdict: str
    records: int
    n: int = 0
    op: str = ""
    rule: str = ""
    evidence: str = ""
    argument: tuple[str, ...] = ()
    damage: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.records:,} records judged"]
        if self.verdict == "violation":
            lines.append(f"record {self.n}, {self.op}: no legal cache could have produced it")
            lines.append(str(Violation(self.rule, self.evidence)))
            if self.argument:
                lines.append("because:")
                lines += [f"  {line}" for line in self.argument]
        if self.damage is not None:
            lines.append(f"the rest was not judged: {self.damage}")
        return "\n".join(lines)


def judge_trace(path: str | Path) -> TraceVerdict:
    """Judge a trace file up to its end, its first violation, or its damage.

    Raises:
        InvalidTrace: it cannot be opened, or has no header.
    """
    reader = f.TraceReader(path)
    return judge_lines(reader.header, reader)


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
                tuple(judge.argument(violation.evidence)),
            )
        except Undecidable as reason:
            where = f"record {line.n}, {op_of(line.call)}: {reason}"
            return TraceVerdict("unknown", judge.records, damage=where)
    damage = getattr(lines, "damage", None)
    return TraceVerdict("ok" if damage is None else "unknown", judge.records, damage=damage)


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


TAGS: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in get_args(f.AnyCall)}


def op_of(call: f.AnyCall) -> str:
    """The name of a call, as the format has it."""
    return TAGS[type(call)]


@dataclass
class Copy:
    """A copy from submission to acknowledgement: what it reads and writes, page by page."""

    kind: str
    n: int
    device: set[int]
    host: set[int]
    prefixes: list[Prefix | None] = field(default_factory=list)


class Judge:
    """The model and the rules; :meth:`apply` takes one line. See the module docstring."""

    def __init__(self, header: f.Header) -> None:
        self.header = header
        self.page_size = header.page_size
        self.device = History(header.size // header.page_size, header.page_size)
        host = header.host_size or 0
        self.host = History(host // header.page_size, header.page_size, "host ")
        self.nodes: dict[int, Prefix] = {0: (None, ())}
        self.copies: dict[tuple[str, int], Copy] = {}
        self.states: dict[int, tuple[dict[int, Any], dict[Prefix, int]]] = {}
        self.events: dict[str, EventReplay] = {}
        self.records = 0
        self.n = 0
        self.last = f.Sizes(
            header.size, 0, 0, header.host_size if header.host_size is not None else None
        )

    # ---- one record ------------------------------------------------------------------------------

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
        self.device.freed, self.host.freed = [], []
        self.device.dropped, self.host.dropped = [], []
        self.loaded: list[int] = []
        before = self._counts()
        if call.error is not None and self._may_refuse(call):
            return
        self._permit(call)
        for part in line.inner:
            self._dispatch(part, inner=True)
        if call.error is not None:
            raise Violation("crash", f"{op_of(call)} raised {call.error}")
        self._dispatch(call, inner=False)
        self._closed()
        self._sizes(line, before)

    def _dispatch(self, call: f.AnyCall, inner: bool) -> None:
        if inner and not isinstance(call, PARTS):
            raise Undecidable(f"{op_of(call)} inside another call")
        if inner and call.error is not None:
            return  # it did nothing; the outer call says what came of it
        getattr(self, f"_{op_of(call)}")(call)

    def _counts(self) -> tuple[int, int, int]:
        return self.device.free_count, len(self.device.cached), self.host.free_count

    def argument(self, evidence: str) -> Iterator[str]:
        """The past of each page that the evidence names."""
        for tier, history in (("", self.device), ("host ", self.host)):
            pattern = r"(?<!host )pages? \[?(\d+)" if not tier else r"host pages? \[?(\d+)"
            pages = dict.fromkeys(int(p) for p in re.findall(pattern, evidence))
            yield from history.story(list(pages)[:SHOWN_PAGES])

    def _require(self, holds: bool, rule: str, evidence: str) -> None:
        if not holds:
            raise Violation(rule, evidence)

    def _may_refuse(self, call: f.AnyCall) -> bool:
        """Whether the contract lets this call raise: a misuse, which then changes nothing."""
        if isinstance(call, f.Free):
            pages = self._pages(call.slots)
            return any(not isinstance(self.device.owner.get(p), str) for p in pages)
        if isinstance(call, f.DecLockRef):
            prefix = self.nodes.get(call.node)
            return prefix is None or not self.device.holding[call.node, prefix]
        if isinstance(call, f.IncLockRef):
            prefix = self.nodes.get(call.node)
            return prefix is None or (bool(prefix[1]) and prefix not in self.device.cached)
        if isinstance(call, f.Alloc):
            return call.need_size < 0 or call.need_size % self.page_size != 0
        if isinstance(call, f.FreeGroupBegin | f.FreeGroupEnd):
            return (self.device.queued is None) == isinstance(call, f.FreeGroupEnd)
        return False

    # ---- what a call may free --------------------------------------------------------------------

    def _permit(self, call: f.AnyCall) -> None:
        """Say what this call may free, before its inner records are judged."""
        device, host = self.device, self.host
        device.may_free = device.only(set())
        host.may_free = self._host_may_free
        if isinstance(call, f.Evict | f.InitLoadBack):
            device.may_free = self._unless_copied(device.only_unlocked)
        elif isinstance(call, f.CacheUnfinishedReq | f.CacheFinishedReq):
            device.may_free = self._unless_copied(device.only(self._due(call)))
        elif isinstance(call, f.Free | f.Write | f.Load):
            device.may_free = self._unless_copied(self._only_callers)

    def _unless_copied(self, judge: Any) -> Any:
        def judged(page: int) -> tuple[str, str] | None:
            for copy in self.copies.values():
                if page in copy.device:
                    return "X2", (
                        f"page {page} was freed while the {copy.kind} of record {copy.n} is not "
                        "acknowledged"
                    )
            complaint: tuple[str, str] | None = judge(page)
            return complaint

        return judged

    def _only_callers(self, page: int) -> tuple[str, str] | None:
        if isinstance(self.device.owner[page], str):
            return None
        return "P1", f"{self.device.says(page)}, and was freed by a caller of the allocator"

    def _host_may_free(self, page: int) -> tuple[str, str] | None:
        for copy in self.copies.values():
            if page in copy.host:
                return "X1", (
                    f"page {page} was freed while the {copy.kind} of record {copy.n} is not "
                    "acknowledged"
                )
        return None

    # ---- the allocators --------------------------------------------------------------------------

    def _pages(self, slots: Iterable[int]) -> list[int]:
        return list(dict.fromkeys(slot // self.page_size for slot in slots))

    def _alloc(self, call: f.Alloc) -> None:
        self._grow([0], [call.need_size], [-1], call.slots)

    def _alloc_extend(self, call: f.AllocExtend) -> None:
        self._grow(call.prefix_lens, call.seq_lens, call.last_loc, call.slots)

    def _alloc_decode(self, call: f.AllocDecode) -> None:
        prefix_lens = [seq - 1 for seq in call.seq_lens]
        self._grow(prefix_lens, call.seq_lens, call.last_loc, call.slots)

    def _grow(
        self, prefix_lens: list[int], seq_lens: list[int], last_loc: list[int], slots: Any
    ) -> None:
        """Any free pages will do; which slots of them, and in which order, is fixed."""
        size = self.page_size
        lanes = list(zip(prefix_lens, seq_lens, last_loc, strict=False))
        if len({len(prefix_lens), len(seq_lens), len(last_loc)}) > 1 or any(
            not 0 <= prefix <= seq < 2**40 for prefix, seq, _ in lanes
        ):
            raise Undecidable(f"lengths {prefix_lens} to {seq_lens} after {last_loc}")
        need = sum(-(-seq // size) - -(-prefix // size) for prefix, seq, _ in lanes)
        free = self.device.free_count
        if slots is None:
            self._require(need > free, "AL2", f"refused {need} pages although {free} are free")
            return
        count = sum(seq - prefix for prefix, seq, _ in lanes)
        self._require(len(slots) == count, "AL1", f"{len(slots)} slots, but {count} were asked for")
        opened, start = [], 0
        for before, after, end in lanes:
            growth = slots[start : start + after - before]
            start += after - before
            opened += [s // size for s in growth[-before % size :: size]]
            if growth and before % size:
                self._require(
                    isinstance(self.device.owner.get(end // size), str),
                    "P1",
                    f"tokens were put behind slot {end}: {self.device.says(end // size)}",
                )
        prefix, seq, last, pages = (
            torch.tensor(part, dtype=torch.int64)
            for part in (prefix_lens, seq_lens, last_loc, opened)
        )
        expected = alloc_extend(prefix, seq, last, pages, size, count).tolist()
        wrong = next((i for i, s in enumerate(slots) if s != expected[i]), None)
        if wrong is not None:
            raise Violation(
                "AL1",
                f"slot {wrong} of the answer is {slots[wrong]}, expected {expected[wrong]} with "
                "the pages that it opens",
            )
        self._require(
            len(set(opened)) == len(opened),
            "P1",
            f"pages {sorted(p for p in opened if opened.count(p) > 1)} were handed out twice in "
            "one answer",
        )
        self.device.take([page * size for page in opened], f"record {self.n}")

    def _free(self, call: f.Free) -> None:
        self.device.release(self._pages(call.slots))

    def _free_group_begin(self, call: f.FreeGroupBegin) -> None:
        self.device.queued = set()

    def _free_group_end(self, call: f.FreeGroupEnd) -> None:
        self.device.queued = None

    def _clear(self, call: f.Clear) -> None:
        cached = len(self.device.cached)
        self._require(not cached, "P1", f"every page was cleared while {cached} pages are cached")
        self.device.clear()

    def _backup_state(self, call: f.BackupState) -> None:
        self.states[call.state] = (dict(self.device.owner), dict(self.device.cached))

    def _restore_state(self, call: f.RestoreState) -> None:
        if call.state not in self.states:
            raise Undecidable(f"state {call.state} was saved before the recording")
        owner, cached = self.states[call.state]
        self._require(
            cached == self.device.cached,
            "P1",
            "the free list of an earlier state was restored although what is cached has changed",
        )
        self.device.owner = dict(owner)

    # ---- the tree --------------------------------------------------------------------------------

    def _elements(self, tokens: f.Tokens) -> tuple[Any, ...]:
        if self.header.is_eagle and tokens and isinstance(tokens[0], int):
            return tuple(pairwise(tokens))
        return tuple(tokens)

    def _whole(self, tokens: f.Tokens, extra_key: str | None) -> Prefix:
        elements = self._elements(tokens)
        return extra_key, elements[: len(elements) // self.page_size * self.page_size]

    def _longest_on_host(self, prefix: Prefix, start: int) -> int:
        """How far ``prefix`` goes on in the host tier, from ``start`` elements on."""
        end = start
        for part in self.host.prefixes(prefix):
            if len(part[1]) > start:
                if part not in self.host.cached:
                    break
                end = len(part[1])
        return end

    def _match_prefix(self, call: f.MatchPrefix) -> None:
        prefix = self._whole(call.tokens, call.extra_key)
        here = self.device.longest(prefix)
        length = len(here[1])
        expected = self.device.slots(here)
        if call.slots != expected:
            common = next(
                (i for i, (a, b) in enumerate(zip(call.slots, expected, strict=False)) if a != b),
                min(len(call.slots), len(expected)),
            )
            pages = self._pages((call.slots if len(call.slots) > common else expected)[common:])
            raise Violation(
                "M0" if common == min(len(call.slots), length) else "C1",
                f"match of {show(prefix)} gave {len(call.slots)} slots, {length} tokens are on the "
                f"device: {show(here)}; they differ from token {common} on, in pages {pages[:4]}",
            )
        there = self._longest_on_host(prefix, length)
        self._require(
            call.host_hit_length == there - length,
            "M0",
            f"match of {show(prefix)} found {length} tokens on the device and "
            f"{call.host_hit_length} on the host, but {there - length} more are on the host",
        )
        self.nodes[call.node] = here
        if call.host_hit_length:
            self.nodes[call.host_node] = (prefix[0], prefix[1][:there])

    def _insert(self, call: f.Insert) -> None:
        prefix = self._whole(call.tokens, call.extra_key)
        known = len(self.device.longest(prefix)[1])
        if len(call.slots) < len(prefix[1]):
            raise Undecidable(f"{len(call.slots)} slots for {len(prefix[1])} elements")
        self._require(
            call.prefix_len == known,
            "M3",
            f"insert of {show(prefix)} returned {call.prefix_len}, but {known} tokens were on the "
            "device before",
        )
        self._adopt(prefix, call.slots, known)

    def _adopt(self, prefix: Prefix, slots: f.Slots, known: int) -> None:
        """The tree takes over whole pages of a caller."""
        size = self.page_size
        for part in self.device.prefixes(prefix):
            end = len(part[1])
            if end <= known:
                continue
            page, mine = slots[end - size] // size, slots[end - size : end]
            self._require(
                mine == list(range(page * size, (page + 1) * size)),
                "P2",
                f"slots {mine} were cached as a page of {size}",
            )
            self._require(
                isinstance(self.device.owner.get(page), str),
                "P1",
                f"page {page} was cached for {show(part)}; {self.device.says(page)}",
            )
            self.device.adopt(part, page)

    def _evict(self, call: f.Evict) -> None:
        freed = len(self.device.freed) * self.page_size
        self._require(
            call.num_tokens_evicted == freed,
            "E1",
            f"evict returned {call.num_tokens_evicted}, it freed {freed} tokens",
        )

    def _evicted_enough(self, call: f.Evict, after: f.Sizes) -> None:
        """E3; under write-back a leaf without room on the host may have to stay."""
        freed = len(self.device.freed) * self.page_size
        if freed >= call.num_tokens or self.header.write_policy == "write_back":
            return
        locked = self.device.locked()
        busy = {page for copy in self.copies.values() for page in copy.device}
        left = (p for p, page in self.device.cached.items() if p not in locked and page not in busy)
        unlocked = next(left, None)
        self._require(
            unlocked is None or after.evictable == 0,
            "E3",
            f"evict({call.num_tokens}) freed {freed} although {show(unlocked or (None, ()))} is "
            "not locked",
        )

    def _prefix_of(self, node: int) -> Prefix:
        if node not in self.nodes:
            raise Undecidable(f"node {node} is in no record before")
        return self.nodes[node]

    def _inc_lock_ref(self, call: f.IncLockRef) -> None:
        self._lock(call.node, self._prefix_of(call.node))

    def _lock(self, node: int, prefix: Prefix) -> None:
        gone = prefix[1] and prefix not in self.device.cached
        self._require(not gone, "L2", f"{show(prefix)} was locked, and is not on the device")
        if prefix[1]:
            self.device.hold(node, prefix)

    def _dec_lock_ref(self, call: f.DecLockRef) -> None:
        self._unlock(call.node, self._prefix_of(call.node))

    def _unlock(self, node: int, prefix: Prefix) -> None:
        if prefix[1]:
            self.device.drop(node, prefix)

    def _reset(self, call: f.Reset) -> None:
        self.device.forget()
        self.host.forget()
        self.copies.clear()

    # ---- requests --------------------------------------------------------------------------------

    def _due(self, call: f.CacheUnfinishedReq | f.CacheFinishedReq) -> set[int]:
        """The pages that the call has to free: duplicates, and at the end the tail."""
        if call.tokens is None or call.row is None:
            raise Undecidable("the cache did not ask how many tokens were computed")
        if len(call.row) != len(call.tokens):
            raise Undecidable(f"{len(call.row)} slots for {len(call.tokens)} tokens")
        protected = call.cache_protected_len
        whole = self._whole(call.tokens, call.extra_key)
        known = len(self.device.longest(whole)[1])
        row = call.row
        self._check_row(call, (whole[0], whole[1][:protected]))
        slots = row[protected:known]
        if isinstance(call, f.CacheFinishedReq):
            slots = slots + row[len(whole[1]) :] if call.is_insert else row[protected:]
        return set(self._pages(slots))

    def _check_row(
        self, call: f.CacheUnfinishedReq | f.CacheFinishedReq, protected: Prefix
    ) -> None:
        """The row before the call: first the tree's pages, then the request's own."""
        assert call.row is not None
        size, row, length = self.page_size, call.row, call.cache_protected_len
        self._require(
            length % size == 0 and 0 <= length <= len(protected[1]),
            "R2",
            f"{length} protected tokens of {len(row)}, page size {size}",
        )
        ours = self.device.slots(protected) if self._is_cached(protected) else None
        if ours != row[:length]:
            pages = self._pages(row[:length])
            raise Violation(
                "R2",
                f"the row starts with pages {pages[:4]}; the tree has {show(protected)} in "
                f"{'no' if ours is None else self._pages(ours)[:4]} pages",
            )
        for start in range(length, len(row), size):
            page, mine = row[start] // size, row[start : start + size]
            self._require(
                mine == list(range(page * size, page * size + len(mine))),
                "R1",
                f"tokens {start} to {start + len(mine) - 1} are in slots {mine}, page size {size}",
            )
            self._require(
                isinstance(self.device.owner.get(page), str),
                "P1",
                f"token {start} of the row is in page {page}; {self.device.says(page)}",
            )

    def _is_cached(self, prefix: Prefix) -> bool:
        return all(part in self.device.cached for part in self.device.prefixes(prefix))

    def _cache_unfinished_req(self, call: f.CacheUnfinishedReq) -> None:
        whole = self._whole(call.tokens, call.extra_key)
        self._settle(call, whole, call.row, insert=True)
        self._require(
            call.new_protected_len == len(whole[1]),
            "R2",
            f"cache_protected_len = {call.new_protected_len}, but {len(whole[1])} tokens fill "
            "whole pages",
        )
        expected = self.device.slots(whole) + call.row[len(whole[1]) :]
        self._require(
            call.new_row == expected,
            "R2",
            f"the row is {call.new_row[:16]} after the call, expected {expected[:16]} "
            f"(pages {self._pages(expected)[:4]})",
        )
        self.nodes[call.new_node] = whole
        self._lock(call.new_node, whole)
        self._unlock(call.last_node, self._held_by(call, whole))

    def _cache_finished_req(self, call: f.CacheFinishedReq) -> None:
        assert call.tokens is not None
        assert call.row is not None
        whole = self._whole(call.tokens, call.extra_key)
        self._settle(call, whole, call.row, call.is_insert)
        self._unlock(call.last_node, self._held_by(call, whole))

    def _held_by(self, call: Any, whole: Prefix) -> Prefix:
        self._prefix_of(call.last_node)
        return whole[0], whole[1][: call.cache_protected_len]

    def _settle(self, call: Any, whole: Prefix, row: f.Slots, insert: bool) -> None:
        freed = set(self.device.freed)
        known = len(self.device.longest(whole)[1])
        due = set(self._pages(row[call.cache_protected_len : known]))
        if isinstance(call, f.CacheFinishedReq):
            start = len(whole[1]) if insert else call.cache_protected_len
            due = (due if insert else set()) | set(self._pages(row[start:]))
        lost = sorted(due - freed)
        self._require(
            not lost,
            "P1",
            f"pages {lost} belong to nobody: the request gave them up, they were not freed",
        )
        if insert:
            self._adopt(whole, row, known)

    # ---- the host tier ---------------------------------------------------------------------------

    def _host_alloc(self, call: f.HostAlloc) -> None:
        need = -(-call.need_size // self.page_size)
        free = self.host.free_count
        if call.slots is None:
            self._require(need > free, "AL2", f"refused {need} host pages although {free} are free")
            return
        self._require(
            len(call.slots) == call.need_size,
            "AL1",
            f"{len(call.slots)} host slots, but {call.need_size} were asked for",
        )
        self._whole_pages(call.slots)
        self.host.take(call.slots, f"record {self.n}")

    def _whole_pages(self, slots: f.Slots) -> None:
        size = self.page_size
        expected = [p * size + i for p in self._pages(slots) for i in range(size)]
        self._require(slots == expected, "H2", f"host slots {slots[:16]} are no whole pages")

    def _host_free(self, call: f.HostFree) -> None:
        self.host.release(self._pages(call.slots))

    def _host_clear(self, call: f.HostClear) -> None:
        self.host.clear()

    def _write(self, call: f.Write) -> None:
        if call.host_slots is None:
            return
        pages, hosts = self._pages(call.slots), self._pages(call.host_slots)
        self._require(
            len(call.host_slots) == len(call.slots),
            "C2",
            f"{len(call.slots)} tokens are copied to {len(call.host_slots)} host slots",
        )
        copy = Copy("write", self.n, set(pages), set(hosts))
        for page, host in zip(pages, hosts, strict=True):
            owner = self.device.owner.get(page)
            self._require(owner is not None, "X2", f"page {page} is copied to the host, and free")
            self._require(
                isinstance(self.host.owner.get(host), str),
                "H1",
                f"host page {host} is written; host {self.host.says(host)}",
            )
            if isinstance(owner, tuple):
                self._require(
                    owner not in self.host.cached,
                    "H1",
                    f"{show(owner)} is copied to host page {host}, and is in host page "
                    f"{self.host.cached.get(owner)} already",
                )
                self.host.adopt(owner, host)
        self._submit(call.id, copy)

    def _submit(self, number: int, copy: Copy) -> None:
        if (copy.kind, number) in self.copies:
            raise Undecidable(f"{copy.kind} {number} is submitted twice")
        self.copies[copy.kind, number] = copy

    def _load(self, call: f.Load) -> None:
        if call.slots is None:
            return
        pages, hosts = self._pages(call.slots), self._pages(call.host_slots)
        self._require(
            len(call.host_slots) == len(call.slots),
            "C1",
            f"{len(call.host_slots)} host slots are loaded to {len(call.slots)} slots",
        )
        for page, host in zip(pages, hosts, strict=True):
            prefix = self.host.owner.get(host)
            self._require(prefix is not None, "X1", f"host page {host} is loaded, and free")
            self._require(
                isinstance(self.device.owner.get(page), str),
                "P1",
                f"page {page} is loaded to; {self.device.says(page)}",
            )
            if isinstance(prefix, tuple):
                self._require(
                    prefix not in self.device.cached,
                    "C1",
                    f"{show(prefix)} is loaded to page {page}, and is in page "
                    f"{self.device.cached.get(prefix)} already",
                )
                self.device.adopt(prefix, page)
        self.loaded += call.slots
        self._submit(call.id, Copy("load", self.n, set(pages), set(hosts)))

    def _ack(self, call: f.Ack) -> None:
        for number in call.ids:
            if self.copies.pop((call.kind, number), None) is None:
                raise Undecidable(f"{call.kind} {number} is acknowledged, and was never submitted")

    def _init_load_back(self, call: f.InitLoadBack) -> None:
        hit = call.host_hit_length
        self._require(
            call.slots == self.loaded, "C1", f"load-back gave {call.slots}, loaded {self.loaded}"
        )
        over = call.mem_quota is not None and len(call.slots) > call.mem_quota
        self._require(
            len(call.slots) in (0, hit) and not over,
            "Q1",
            f"a load of {hit} tokens, quota {call.mem_quota}, gave {len(call.slots)}",
        )
        prefix = self._prefix_of(call.host_node)
        if not call.slots:
            prefix = self.device.longest(prefix)
        else:
            expected = self.device.slots(prefix)[-hit:] if self._is_cached(prefix) else None
            self._require(
                call.slots == expected,
                "C1",
                f"load-back of {show(prefix)} gave slots {call.slots}, expected {expected}",
            )
        self.nodes[call.node] = prefix

    def _evict_host(self, call: f.EvictHost) -> None:
        freed = len(self.host.freed) * self.page_size
        self._require(
            call.num_tokens_evicted == freed,
            "E1",
            f"evict_host returned {call.num_tokens_evicted}, it freed {freed} host slots",
        )

    def _poll(self, call: f.Poll) -> None:
        """Its acknowledgements are inner records."""

    def _start_loading(self, call: f.StartLoading) -> None:
        """The loads are in flight since they were submitted."""

    # ---- events ----------------------------------------------------------------------------------

    def _take_events(self, call: f.TakeEvents) -> None:
        for event in call.events:
            media = ["GPU", *self.events] if isinstance(event, AllBlocksCleared) else None
            for medium in dict.fromkeys(media or [getattr(event, "medium", None) or "GPU"]):
                self.events.setdefault(medium, EventReplay()).apply([event])
        if "GPU" in self.events:
            self.events["GPU"].check(self.device)

    # ---- after every record ----------------------------------------------------------------------

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
        size = self.page_size
        free, cached, host_free = (
            (now - then) * size for now, then in zip(self._counts(), before, strict=True)
        )
        self._require(
            after.available - known.available == free,
            "P1",
            f"available_size() went from {known.available} to {after.available}, but the pages "
            f"that were freed less those that were taken are {free} tokens",
        )
        if after.evictable is not None and after.protected is not None:
            grown = after.evictable + after.protected
            grown -= (known.evictable or 0) + (known.protected or 0)
            self._require(
                grown == cached,
                "A1",
                f"evictable_size() + protected_size() grew by {grown}, but {cached} more tokens "
                "are cached",
            )
        if after.host_available is not None and known.host_available is not None:
            grown = after.host_available - known.host_available
            self._require(
                grown == host_free,
                "H1",
                f"the free host slots grew by {grown}, but {host_free} were freed less those taken",
            )
        self._locks(line, known, after)
        if isinstance(line.call, f.Evict):
            self._evicted_enough(line.call, after)
        self.last = after

    def _locks(self, line: f.Line, known: f.Sizes, after: f.Sizes) -> None:
        call = line.call
        if isinstance(call, f.IncLockRef | f.DecLockRef) and call.delta is not None:
            grown = (after.evictable or 0) - (known.evictable or 0)
            self._require(
                call.delta == grown,
                "K1",
                f"{op_of(call)} returned {call.delta}, evictable_size() changed by {grown}",
            )
        if after.protected is None or self.header.excerpt:
            return
        locked = len(self.device.locked()) * self.page_size
        holders = self.device.holding or self.copies
        fits = after.protected >= locked if holders else after.protected == 0
        self._require(
            fits, "A2", f"protected_size() = {after.protected}, but holders lock {locked} tokens"
        )
