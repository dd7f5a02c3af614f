"""Forwards of a model with window layers: they also write and read the window pool."""

from collections.abc import Callable, Sequence

from refcache.oracle.drivers.tree.forwards import PlayedForwards, Row
from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.program.trial import Trial

Mapped = Callable[[Sequence[int]], list[int]]
"""Window slots of full slots."""


class WindowForwards(PlayedForwards):
    """``swa``: what each window slot holds, a namespace and the tokens up to the slot's own."""

    def __init__(self, trial: Trial, window: int, mapped: Mapped) -> None:
        super().__init__(trial)
        self.window, self.mapped = window, mapped
        self.swa: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    def run(
        self, row: list[int], start: int, tokens: tuple[int, ...], extra_key: str | None
    ) -> None:
        super().run(row, start, tokens, extra_key)
        for position, slot in enumerate(self.mapped(row[start:]), start):
            self.swa[slot] = (extra_key, tokens[: position + 1])

    def read(self, req: Request, row: Row) -> None:
        """C-READ; SW5 for the last window of tokens."""
        super().read(req, row)
        start = max(0, req.computed - self.window)
        slots = row(req)[start : req.computed]
        for position, slot in enumerate(self.mapped(slots), start):
            expected = (req.extra_key, req.tokens[: position + 1])
            self.trial.require(
                slot > 0 and self.swa.get(slot) == expected,
                "SW5",
                f"{req.rid} reads the window of token {position} from slot {slot}, which holds "
                f"that of {self.swa.get(slot) if slot > 0 else 'nothing'}; expected {expected}",
            )

    def forget(self) -> None:
        super().forget()
        self.swa.clear()
