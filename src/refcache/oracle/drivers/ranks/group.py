"""Ranks of one group as threads of this process, which meet at every collective call.

Each rank has its own cache on its own machine and shares nothing with the others but the values it
reduces; so whatever the threads' timing, every rank sees the same. A step runs one function a rank;
the end of a step is a meeting as well, so ranks that do not make the same calls in the same order
are told apart at once and by name, where a real group would hang, or take one call's answer for
another's.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from refcache.oracle.rules.violation import Violation

T = TypeVar("T")


class Call(NamedTuple):
    """A collective call: who makes it, and how many values it reduces."""

    where: str
    values: tuple[int, ...]

    def __str__(self) -> str:
        return f"reduces {len(self.values)} value(s) in {self.where}" if self.where else "is done"


END = Call("", ())


class RankGroup:
    """See the module docstring.

    Attributes:
        calls: for each rank where its collective calls were made, in order.
    """

    def __init__(self, size: int) -> None:
        self.calls: list[list[str]] = [[] for _ in range(size)]
        self._arrived = [END] * size
        self._barrier = threading.Barrier(size)

    def member(self, rank: int) -> "RankMember":
        """What that rank is given as its group."""
        return RankMember(self, rank)

    def together(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Run one function a rank; their results.

        Raises:
            Violation: ``Z2`` when the ranks do not make the same collective calls.
            Exception: what a rank raised on its own, the first rank's first.
        """
        results: dict[int, T] = {}
        errors: dict[int, BaseException] = {}

        def run(rank: int) -> None:
            try:
                results[rank] = functions[rank]()
            except BaseException as error:
                errors[rank] = error
            while any(call.where for call in self._meet(rank, END)):
                pass  # somebody is in a call that this rank does not make: it is told, and ends

        threads = [
            threading.Thread(target=run, args=(rank,), daemon=True)
            for rank in range(len(functions))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            own = [r for r, e in errors.items() if not (isinstance(e, Violation) and e.id == "Z2")]
            raise errors[min(own or errors)]
        return [results[rank] for rank in range(len(functions))]

    def reduce(self, rank: int, call: Call) -> list[int]:
        """The smallest of each value over the ranks."""
        self.calls[rank].append(call.where)
        arrived = self._meet(rank, call)
        for other, theirs in enumerate(arrived):
            if (theirs.where, len(theirs.values)) != (call.where, len(call.values)):
                raise Violation("Z2", f"rank {rank} {call}, rank {other} {theirs}")
        return [min(column) for column in zip(*(c.values for c in arrived), strict=True)]

    def _meet(self, rank: int, call: Call) -> list[Call]:
        """Wait until every rank has come, with what it came for."""
        self._arrived[rank] = call
        self._barrier.wait()
        arrived = list(self._arrived)
        self._barrier.wait()  # everyone has read it
        return arrived


class RankMember:
    """One rank's side of a :class:`RankGroup`; a :class:`refcache.tree.consensus.Consensus`."""

    def __init__(self, group: RankGroup, rank: int) -> None:
        self.group, self.rank = group, rank

    def all_reduce_min(self, values: list[int]) -> list[int]:
        caller = sys._getframe(1)
        names = [caller.f_code.co_name]
        if caller.f_back is not None:
            names.insert(0, caller.f_back.f_code.co_name)
        return self.group.reduce(self.rank, Call(" > ".join(names), tuple(values)))
