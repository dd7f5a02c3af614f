"""What every rule about traces builds on: the model, what a call may free, and small helpers."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, get_args

from refcache.oracle.ledger.ledger import Prefix
from refcache.oracle.rules.violation import Violation
from refcache.trace import format as f
from refcache.trace.events.residency import Residency
from refcache.trace.model import History, show

SHOWN_PAGES = 4
TAGS: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in get_args(f.AnyCall)}


def op_of(call: f.AnyCall) -> str:
    """The name of a call, as the format has it."""
    return TAGS[type(call)]


class Undecidable(Exception):
    """A record that the records before do not suffice to judge."""


@dataclass
class Copy:
    """A copy from submission to acknowledgement: what it reads and writes, page by page."""

    kind: str
    n: int
    device: set[int]
    host: set[int]
    prefixes: list[Prefix | None] = field(default_factory=list)


class Rules:
    """The model of a trace, and what the calls may do to it.

    Attributes:
        device, host: who owns the pages of each tier.
        nodes: the prefix that each node handle stands for.
        copies: those that are not acknowledged, by kind and number.
        written, loaded: host pages and device slots of the copies of the record in progress.
        last: the sizes after the last record that had them.
        totals: how much is free or cached may be judged. An excerpt lacks owners, so there it may
            not, except at the failing record if that says what was before.
    """

    def __init__(self, header: f.Header) -> None:
        self.header = header
        self.page_size = header.page_size
        self.device = History(header.size // header.page_size, header.page_size)
        host = header.host_size or 0
        self.host = History(host // header.page_size, header.page_size, "host ")
        self.nodes: dict[int, Prefix] = {0: (None, ())}
        self.copies: dict[tuple[str, int], Copy] = {}
        self.states: dict[int, tuple[dict[int, Any], dict[Prefix, int]]] = {}
        self.events = Residency()
        self.written: dict[int, int] = {}
        self.loaded: list[int] = []
        self.totals = True
        self.records = 0
        self.n = 0
        self.last = f.Sizes(
            header.size, 0, 0, header.host_size if header.host_size is not None else None
        )

    def argument(self, rule: str, evidence: str) -> Iterator[str]:
        """The past of each page that the evidence names; for locks, who has them."""
        if rule == "A2":
            yield from self.device.lock_story()
        for tier, history in (("", self.device), ("host ", self.host)):
            pattern = r"(?<!host )pages? \[?(\d+)" if not tier else r"host pages? \[?(\d+)"
            pages = dict.fromkeys(int(p) for p in re.findall(pattern, evidence))
            yield from history.story(list(pages)[:SHOWN_PAGES])

    def _require(self, holds: bool, rule: str, evidence: str) -> None:
        if not holds:
            raise Violation(rule, evidence)

    def pages_of(self, slots: Iterable[int]) -> list[int]:
        return list(dict.fromkeys(slot // self.page_size for slot in slots))

    def _permit(self, call: f.AnyCall) -> None:
        """Say what this call may free, before its inner records are judged."""
        device, host = self.device, self.host
        device.may_free = device.only(set())
        host.may_free = self._host_may_free
        if isinstance(call, f.Evict | f.InitLoadBack):
            device.may_free = self._unless_copied(device.only_unlocked)
        elif isinstance(call, f.CacheUnfinishedReq | f.CacheFinishedReq):
            device.may_free = self._unless_copied(device.only(self.due(call)))
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

    def _file_written(self) -> None:
        """Host pages hold what their device pages are cached for, once the call has said what."""
        for page, host in list(self.written.items()):
            owner = self.device.owner.get(page)
            if isinstance(owner, tuple):
                self._require(
                    owner not in self.host.cached,
                    "H1",
                    f"{show(owner)} is copied to host page {host}, and is in host page "
                    f"{self.host.cached.get(owner)} already",
                )
                self.host.adopt(owner, host)
                del self.written[page]

    def _prefix_of(self, node: int) -> Prefix:
        if node not in self.nodes:
            raise Undecidable(f"node {node} is in no record before")
        return self.nodes[node]

    def _is_cached(self, prefix: Prefix) -> bool:
        return all(part in self.device.cached for part in self.device.prefixes(prefix))

    def _elements(self, tokens: f.Tokens) -> tuple[Any, ...]:
        if self.header.is_eagle and tokens and isinstance(tokens[0], int):
            return tuple(pairwise(tokens))
        return tuple(tokens)

    def _whole(self, tokens: f.Tokens, extra_key: str | None) -> Prefix:
        elements = self._elements(tokens)
        return extra_key, elements[: len(elements) // self.page_size * self.page_size]

    def due(self, call: f.CacheUnfinishedReq | f.CacheFinishedReq) -> set[int]:
        """The pages that a call has to free."""
        raise NotImplementedError
