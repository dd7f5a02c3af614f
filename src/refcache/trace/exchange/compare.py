"""Two traces of one workload: where do they tell something else for the first time?

Record by record, what was asked and what was answered is compared. Which free page an allocation
gives is the allocator's own choice: pages of the one trace are paired with those of the other when
they are handed out, and slots are compared under that pairing. The order of a free does not matter.
Everything else does, also what is legal on both sides: another victim, another split.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from refcache.trace.file import TraceReader
from refcache.trace.format import Header

SAME = ("page_size", "size", "host_size", "is_eagle", "write_policy")
DEVICE = ("slots", "row", "new_row", "last_loc")
GIVES = {
    "alloc": "slots", "alloc_extend": "slots", "alloc_decode": "slots", "load": "slots",
    "host_alloc": "slots", "write": "host_slots",
}  # fmt: skip
"""Operation: which of its fields are slots that it hands out."""
RESULTS = frozenset({
    "slots", "host_slots", "node", "host_node", "host_hit_length", "prefix_len", "delta",
    "num_tokens_evicted", "new_row", "new_protected_len", "new_node", "index", "events", "state",
    "error",
})  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """What comparing comes to.

    Attributes:
        records: how many tell the same.
        n, op: the first record that does not; 0 and "" when the headers differ, or none does.
        what: what differs in it; "" if nothing. ``a``, ``b``: how it is in either.
        damage: why the rest was not compared.
    """

    records: int
    n: int = 0
    op: str = ""
    what: str = ""
    a: str = ""
    b: str = ""
    damage: str | None = None

    @property
    def verdict(self) -> str:
        """``ok``, ``violation`` (they differ) or ``unknown``."""
        return "violation" if self.what else "unknown" if self.damage else "ok"

    def __str__(self) -> str:
        told = f"{self.records:,} records tell the same"
        if self.what:
            where = f"record {self.n}, {self.op}" if self.n else "header"
            return f"differ: {told}\n{where}: {self.what}\n  A: {self.a}\n  B: {self.b}"
        return (
            f"{told}\nthe rest was not compared: {self.damage}" if self.damage else f"same: {told}"
        )


class Pairing:
    """Pages of A beside pages of B, per tier; slots of A in B's numbers."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[bool, dict[int, int]] = {False: {}, True: {}}

    def pair(self, host: bool, a: list[int], b: list[int]) -> None:
        """These slots were handed out for the same tokens."""
        size = self.page_size
        self.pages[host] |= {x // size: y // size for x, y in zip(a, b, strict=False)}

    def slots(self, host: bool, slots: list[int]) -> list[int]:
        size, pages = self.page_size, self.pages[host]
        return [pages.get(slot // size, slot // size) * size + slot % size for slot in slots]

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """A call of A in B's numbers."""
        on_host = call["op"].startswith("host_")
        found = dict(call)
        for field in (*DEVICE, "host_slots"):
            if found.get(field):
                found[field] = self.slots(on_host or field == "host_slots", found[field])
        return found


def compare_traces(a: str | Path, b: str | Path) -> Comparison:
    """Compare two trace files up to their first difference, their end, or damage.

    Raises:
        InvalidTrace: one cannot be opened, or has no header.
    """
    first, second = TraceReader(a), TraceReader(b)
    for name in SAME:
        left, right = getattr(first.header, name), getattr(second.header, name)
        if left != right:
            return Comparison(0, what=f"{name} differs", a=repr(left), b=repr(right))
    return _compared(first.header, first, second)


def _compared(header: Header, first: TraceReader, second: TraceReader) -> Comparison:
    pairing, records = Pairing(header.page_size), 0
    for left, right in zip_longest(first, second):
        damage = first.damage or second.damage
        if (left is None or right is None) and damage:
            return Comparison(records, damage=damage)
        if left is None or right is None:
            line, ended = (left, "B") if right is None else (right, "A")
            op = type(line.call).__struct_config__.tag
            shown = {"A": "ends here", "B": "ends here"} | {"AB".replace(ended, ""): f"has {op}"}
            return Comparison(
                records, line.n, str(op), f"{ended} has fewer", shown["A"], shown["B"]
            )
        for what, x, y in _differences(
            msgspec.to_builtins(left), msgspec.to_builtins(right), pairing
        ):
            op = str(type(left.call).__struct_config__.tag)
            return Comparison(records, left.n, op, what, _short(x), _short(y))
        records += 1
    damage = first.damage or second.damage
    return Comparison(records, damage=damage)


def _differences(
    a: dict[str, Any], b: dict[str, Any], pairing: Pairing
) -> Iterator[tuple[str, Any, Any]]:
    """What differs between two records: what was asked first, then what happened, then answers."""
    left, right = a["call"], b["call"]
    asked = {k: v for k, v in pairing.call(left).items() if k not in RESULTS}
    wanted = {k: v for k, v in right.items() if k not in RESULTS}
    if asked != wanted:
        yield "was asked something else", left, right
    inner_a, inner_b = a.get("inner", []), b.get("inner", [])
    for x, y in zip_longest(inner_a, inner_b):
        if x is None or y is None:
            yield "something more happened inside", x or "nothing", y or "nothing"
            return
        yield from _answers(x, y, pairing, f"inside it, {x['op']}: ")
    yield from _answers(left, right, pairing, "")
    if a.get("after") != b.get("after"):
        yield (
            "free, evictable, protected, free on the host afterwards",
            a.get("after"),
            b.get("after"),
        )


def _answers(
    a: dict[str, Any], b: dict[str, Any], pairing: Pairing, where: str
) -> Iterator[tuple[str, Any, Any]]:
    if a["op"] != b["op"]:
        yield f"{where}another call", a, b
        return
    gives = GIVES.get(a["op"])
    given = [call.get(gives) for call in (a, b)] if gives else [None, None]
    if given[0] and given[1] and len(given[0]) == len(given[1]):
        on_host = a["op"] in ("host_alloc", "write")
        pairing.pair(on_host, given[0], given[1])
    renamed = pairing.call(a)
    for field in sorted({*renamed, *b}):
        x, y = renamed.get(field), b.get(field)
        if a["op"] in ("free", "host_free") and field == "slots":
            x, y = sorted(renamed[field]), sorted(b[field])
        if x != y:
            yield f"{where}{field}", a.get(field), b.get(field)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:150]}... ({len(text):,} characters)"
