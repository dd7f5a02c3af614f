"""The model of a trace: what is known after the records so far, and the table of judging functions.

:func:`judges` registers a function for a kind of record: it compares the record with the model, and
makes it so.
"""

import re
from collections.abc import Callable, Iterable, Iterator
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


class Model:
    """What is known after the records so far.

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

    def require(self, holds: bool, rule: str, evidence: str) -> None:
        """Raise a violation of ``rule`` unless it holds."""
        if not holds:
            raise Violation(rule, evidence)

    def pages_of(self, slots: Iterable[int]) -> list[int]:
        """The pages of slots, each once."""
        return list(dict.fromkeys(slot // self.page_size for slot in slots))

    def file_written(self) -> None:
        """Host pages hold what their device pages are cached for, once the call has said what."""
        for page, host in list(self.written.items()):
            owner = self.device.owner.get(page)
            if isinstance(owner, tuple):
                self.require(
                    owner not in self.host.cached,
                    "H1",
                    f"{show(owner)} is copied to host page {host}, and is in host page "
                    f"{self.host.cached.get(owner)} already",
                )
                self.host.adopt(owner, host)
                del self.written[page]

    def prefix_of(self, node: int) -> Prefix:
        """The prefix that a node handle stands for."""
        if node not in self.nodes:
            raise Undecidable(f"node {node} is in no record before")
        return self.nodes[node]

    def is_cached(self, prefix: Prefix) -> bool:
        """Whether all of it is on the device."""
        return all(part in self.device.cached for part in self.device.prefixes(prefix))

    def elements(self, tokens: f.Tokens) -> tuple[Any, ...]:
        """What the tree files tokens under."""
        if self.header.is_eagle and tokens and isinstance(tokens[0], int):
            return tuple(pairwise(tokens))
        return tuple(tokens)

    def whole(self, tokens: f.Tokens, extra_key: str | None) -> Prefix:
        """The part that fills whole pages."""
        elements = self.elements(tokens)
        return extra_key, elements[: len(elements) // self.page_size * self.page_size]

    def counts(self) -> tuple[int, int, int]:
        """Free pages, cached pages, free host pages."""
        return self.device.free_count, len(self.device.cached), self.host.free_count


Judging = Callable[[Model, Any], None]
JUDGES: dict[type, Judging] = {}
"""From a kind of record to the function that judges it; without one it changes nothing."""


def judges(kind: type) -> Callable[[Judging], Judging]:
    """A decorator: the function judges records of this kind."""

    def add(judging: Judging) -> Judging:
        assert kind not in JUDGES, kind
        JUDGES[kind] = judging
        return judging

    return add
