"""The bytes of a two-tier cache: what forwards write and read, and what each tier holds at rest."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from refcache.oracle.rules.violation import Violation
from refcache.oracle.view.state import State
from refcache.reference import Layout
from refcache.runtime import DeadIndex, RaceFound
from refcache.tags import element_code, explain, prefix_tags

Note = Callable[[str, str], None]


class HostContent:
    """Writes and compares the rows of one device pool and its host pool (int64 elements).

    Rows name their origin (:mod:`refcache.tags`): a tag for the prefix, a code for layer, plane and
    column. ``layout`` and ``page_size`` say how the host planes are to be read.
    """

    def __init__(self, pool: Any, host_planes: Any, layout: str, page_size: int) -> None:
        self.pool, self.host_planes = pool, host_planes
        self.layout, self.page_size = layout, page_size
        self.layers = pool.layer_num
        self.codes = [
            [
                torch.tensor(
                    [element_code(layer, p, c) for c in range(plane.head_num * plane.head_dim)]
                ).reshape(plane.head_num, plane.head_dim)
                for p, plane in enumerate(pool.planes)
            ]
            for layer in range(self.layers)
        ]

    def forward(
        self,
        machine: Any,
        row: list[int],
        start: int,
        tokens: tuple[int, ...],
        extra_key: str | None,
        note: Note,
    ) -> None:
        """Launch a forward: write the rows of tokens ``start ...``, read all of ``row``."""
        pool, slots = self.pool, torch.tensor(row, dtype=torch.int64)
        tags = prefix_tags(tokens[: len(row)], extra_key)
        for layer in range(self.layers):
            rows = [tags[start:, None, None] + code for code in self.codes[layer]]
            kv = getattr(pool, "kv_planes", len(pool.planes))  # an engine's pool has no others
            pool.set_kv_buffer(layer, slots[start:], *rows[:kv])
            buffers = list(pool.get_kv_buffer(layer)[:kv])
            for plane, new in list(zip(pool.planes, rows, strict=True))[kv:]:
                pool.set_plane_buffer(plane.name, layer, slots[start:], new)
                buffers.append(pool.get_plane_buffer(plane.name, layer))
            reads = [pool.region(plane, layer, slots) for plane in range(len(pool.planes))]

            def attend(layer: int = layer, buffers: Any = buffers) -> None:
                for plane, buffer in enumerate(buffers):
                    wrong = self._wrong(buffer[slots], tags, layer, plane)
                    if wrong is not None:
                        at, holds = wrong
                        note(
                            "C-READ",
                            f"token {at} is read from device slot {row[at]}, layer {layer}, plane "
                            f"{plane}: it holds {holds}",
                        )

            machine.launch("attention", attend, reads=reads)

    def compare(self, state: State) -> Iterator[Violation]:
        """C1 and C2: every node's rows on both tiers, when nothing is running."""
        for index, _ in state.view.paths():
            node = state.view.nodes[index]
            tags = prefix_tags(self.tokens(state, index), node.extra_key)
            end = self._end(state, index)
            tags = tags[end - len(node.key) : end]
            for tier, slots in (("device", node.device), ("host", node.host)):
                if slots is None:
                    continue
                for layer in range(self.layers):
                    for plane in range(len(self.pool.planes)):
                        rows = self._rows(tier, layer, plane)[slots]
                        wrong = self._wrong(rows, tags, layer, plane)
                        if wrong is not None:
                            at, holds = wrong
                            yield Violation(
                                "C1" if tier == "device" else "C2",
                                f"{state.name(index)}, element {at}, {tier} slot {int(slots[at])}, "
                                f"layer {layer}, plane {plane}: it holds {holds}",
                            )

    def longest(self, state: State, extra_key: str | None, elements: tuple[Any, ...]) -> int:
        """Elements in the longest common prefix, in whole pages, with any node on any tier."""
        best = 0
        for index, prefix in state.view.paths():
            if state.view.nodes[index].extra_key != extra_key:
                continue
            common = 0
            for mine, theirs in zip(elements, prefix, strict=False):
                if mine != theirs:
                    break
                common += 1
            best = max(best, common // self.page_size * self.page_size)
        return best

    def as_violation(self, error: BaseException) -> Violation | None:
        """The violation that a report of the tracker stands for."""
        if isinstance(error, RaceFound):
            return Violation("X5", str(error))
        if isinstance(error, DeadIndex):
            return Violation("LIFE", str(error))
        return None

    def _rows(self, tier: str, layer: int, plane: int) -> torch.Tensor:
        """``[slots, heads, dim]`` of one (layer, plane) of a tier, whatever its layout."""
        if tier == "device":
            buffer: torch.Tensor = self.pool.planes[plane].buffer[layer]
            return buffer
        host = self.host_planes[plane]
        rows = Layout.of_buffer(self.layout, host, self.page_size).rows(host, layer)
        return rows.flatten(0, 1)

    def _wrong(
        self, rows: torch.Tensor, tags: torch.Tensor, layer: int, plane: int
    ) -> tuple[int, str] | None:
        """The first row that does not hold its tag, and what it holds; None without one."""
        expected = tags[:, None, None] + self.codes[layer][plane]
        if torch.equal(rows, expected):
            return None
        at = int((rows != expected).flatten(1).any(1).nonzero()[0])
        known = {int(tag): f"token {i} of the same prefix" for i, tag in enumerate(tags.tolist())}
        width = self.codes[layer][plane].numel()
        value = int(rows[at].flatten()[0])
        return at, explain(value, known, layers=self.layers, planes=len(self.codes[0]), width=width)

    @staticmethod
    def tokens(state: State, index: int) -> list[int]:
        """The tokens from the root to the end of a node (a pair key has one more than elements)."""
        keys = []
        while index >= 0:
            keys.append(state.view.nodes[index].key)
            index = state.view.nodes[index].parent
        tokens: list[int] = []
        for key in reversed(keys):
            ids = list(key.raw_token_ids())
            tokens += ids[1:] if key.is_bigram and tokens else ids
        return tokens

    @staticmethod
    def _end(state: State, index: int) -> int:
        end = 0
        while index >= 0:
            end += len(state.view.nodes[index].key)
            index = state.view.nodes[index].parent
        return end
