"""Forward passes, as a bench makes them: they write the KV of new tokens and read the whole row.

On one tier a forward is played at once, with a table of what each slot holds; for two tiers see
:mod:`refcache.oracle.drivers.hicache.forwards`.
"""

from collections.abc import Callable
from typing import Protocol

from refcache.oracle.drivers.tree.request import Request
from refcache.oracle.program.trial import Trial

Row = Callable[[Request], list[int]]


class Forwards(Protocol):
    """What a bench and its requests ask of forwards."""

    def run(
        self, row: list[int], start: int, tokens: tuple[int, ...], extra_key: str | None
    ) -> None:
        """Write the KV of tokens ``start ...`` into the slots of ``row``; C-READ when it reads."""

    def read(self, req: Request, row: Row) -> None:
        """C-READ: each slot with KV holds the request's own prefix, where that is known now."""

    def wait(self) -> None:
        """The host waits for the results of the last forward."""

    def forget(self) -> None:
        """After a reset no slot holds anything."""


class PlayedForwards:
    """One tier. ``kv``: what each slot holds, a namespace and the tokens up to the slot's own."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.kv: dict[int, tuple[str | None, tuple[int, ...]]] = {}

    def run(
        self, row: list[int], start: int, tokens: tuple[int, ...], extra_key: str | None
    ) -> None:
        for position in range(start, len(row)):
            self.kv[row[position]] = (extra_key, tokens[: position + 1])

    def read(self, req: Request, row: Row) -> None:
        tokens = req.tokens
        for position, slot in enumerate(row(req)[: req.computed]):
            expected = (req.extra_key, tokens[: position + 1])
            self.trial.require(
                self.kv.get(slot) == expected,
                "C-READ",
                f"{req.rid} reads token {position} from slot {slot}, which holds the KV of "
                f"{self.kv.get(slot)}; expected {expected}",
            )

    def wait(self) -> None: ...

    def forget(self) -> None:
        self.kv.clear()
