"""Which KV each (page, offset) holds, known from what was written there and from nothing else.

An *origin* names KV: a namespace in one of its generations, and the tokens up to and with its own.
Where a target has real bytes they are written and compared as well, by tags (:mod:`refcache.tags`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from refcache.tags import kv_row, prefix_tags

Place = tuple[int, int, int]
"""A group of layers, a page, an offset in it."""


class Origin(NamedTuple):
    """Whose KV it is. ``epoch``: how often the namespace had been invalidated when it was made."""

    namespace: str | None
    epoch: int
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        space = "" if self.namespace is None else f" in {self.namespace!r}"
        return f"the KV of {list(self.tokens)}{space}"


@dataclass
class Running:
    """A running sequence.

    Attributes:
        prompt: how many of ``tokens`` it began with.
        granted: tokens there is room for; ``launched``: tokens written; ``computed``: those whose
            result the cache was told.
        tables: its pages as they were seen last, one list a group.
    """

    number: int
    namespace: str | None
    epoch: int
    tokens: list[int]
    prompt: int
    granted: int = 0
    launched: int = 0
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"sequence {self.number}"


class Contents:
    """What is written where.

    Attributes:
        origins: by place; a place without one was never written.
        told: the origins whose result the cache was told; they may be found.
    """

    def __init__(self, page_size: int, eagle: bool, kv: Callable[[int, int], Any] | None) -> None:
        self.page_size, self.ahead, self.kv = page_size, int(eagle), kv
        self.origins: dict[Place, Origin] = {}
        self.told: set[Origin] = set()
        self._pages: dict[tuple[int, Origin], set[int]] = {}
        self._made: dict[tuple[Origin, int], Any] = {}

    def origin(self, seq: Running, position: int) -> Origin:
        """Of a token of a sequence; with pairs of tokens the next one is part of it."""
        tokens = seq.tokens[: position + 1 + self.ahead]
        return Origin(seq.namespace, seq.epoch, tuple(tokens))

    def place(self, seq: Running, group: int, position: int) -> Place | None:
        """Where a token's KV is; None when the table does not say."""
        index, offset = divmod(position, self.page_size)
        table = seq.tables[group]
        return (group, table[index], offset) if index < len(table) else None

    def write(self, seq: Running, start: int, end: int) -> None:
        """A launch writes the KV of tokens ``start`` to ``end``."""
        known = [position for position in range(start - self.ahead, start) if position >= 0]
        for group in range(len(seq.tables)):
            for position in (*known, *range(start, end)):
                place, origin = self.place(seq, group, position), self.origin(seq, position)
                if place is None:
                    continue
                before = self.origins.get(place)
                if position < start and (before is None or len(before.tokens) > position + 1):
                    continue  # its pair is known
                self.origins[place] = origin
                self._pages.setdefault((group, origin), set()).add(place[1])
                self._write_rows(place, origin)

    def doubled(self, seq: Running, position: int) -> bool:
        """Whether the KV of a token was ever written to two pages of a group."""
        origin = self.origin(seq, position)
        return any(len(self._pages.get((g, origin), ())) > 1 for g in range(len(seq.tables)))

    def tell(self, seq: Running, end: int) -> None:
        """The cache is told of the result of the first ``end`` tokens."""
        self.told.update(self.origin(seq, position) for position in range(end))

    def copy(self, group: int, source: int, to: int) -> None:
        """The engine copies a page."""
        for offset in range(self.page_size):
            origin = self.origins.get((group, source, offset))
            self.origins.pop((group, to, offset), None)
            if origin is not None:
                self.origins[group, to, offset] = origin
                for row, given in zip(
                    self._rows(to, offset), self._rows(source, offset), strict=True
                ):
                    row.copy_(given)

    def recognize(self, seq: Running, group: int, position: int) -> None:
        """What a cache has brought back from elsewhere is known by its bytes."""
        place = self.place(seq, group, position)
        if (
            place is None
            or self.kv is None
            or self.origins.get(place) == self.origin(seq, position)
        ):
            return
        for epoch in range(seq.epoch + 1):
            origin = self.origin(seq, position)._replace(epoch=epoch)
            if not self._wrong_rows(place, origin):
                self.origins[place] = origin

    def wrong(self, seq: Running, group: int, position: int) -> str:
        """What a read of a token finds instead of its own KV; "" when it finds that."""
        place = self.place(seq, group, position)
        if place is None:
            return f"token {position} is in no page of the table"
        held, own = self.origins.get(place), self.origin(seq, position)
        where = f"token {position} is read from page {place[1]}, offset {place[2]}"
        if held is None:
            return f"{where}: nothing was written there"
        if held.tokens != own.tokens[: len(held.tokens)] or len(held.tokens) <= position:
            return f"{where}: it holds {held}, expected {own}"
        if held.namespace != own.namespace:
            return f"{where}: it holds {held}, expected {own}"
        if held.epoch != own.epoch:
            return f"{where}: it holds {held} from before it was invalidated"
        if self._wrong_rows(place, held):
            return f"{where}: its bytes are not those of {held}"
        return ""

    # ---- real bytes ------------------------------------------------------------------------------

    def _rows(self, page: int, offset: int) -> Iterable[Any]:
        return () if self.kv is None else self.kv(page, offset)

    def _expected(self, origin: Origin, layer: int, row: Any) -> Any:
        if (origin, layer) not in self._made:
            tags = prefix_tags(origin.tokens, f"{origin.namespace}, {origin.epoch}")[-1:]
            self._made[origin, layer] = kv_row(tags, layer, 0, row.numel()).reshape(row.shape)
        return self._made[origin, layer]

    def _write_rows(self, place: Place, origin: Origin) -> None:
        for layer, row in enumerate(self._rows(*place[1:])):
            row.copy_(self._expected(origin, layer, row))

    def _wrong_rows(self, place: Place, origin: Origin) -> bool:
        rows = enumerate(self._rows(*place[1:]))
        return any(not row.equal(self._expected(origin, layer, row)) for layer, row in rows)
