"""Breadth first over every step, from the empty cache: the first failing program is the shortest.

A state is known by its fingerprint (:mod:`refcache.oracle.explore.fingerprint`) and kept as the
program that leads to it. A :class:`Searcher` goes on from one state: it makes the state once, then
every move from a copy of it (:mod:`refcache.oracle.explore.snapshot`), and sees that everything can
be ended from there (``wind_down``). A :class:`Search` knows the states that were found and which of
them are left; who goes on from them does not matter to it, so several processes can.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from refcache.errors import InvalidArgument
from refcache.oracle.explore.fingerprint import (
    Move,
    Names,
    Vocabulary,
    beyond,
    fingerprint,
    translated,
)
from refcache.oracle.explore.moves import Moves
from refcache.oracle.explore.snapshot import CannotCopy, Frozen, freeze
from refcache.oracle.program.driver import Call, Driver
from refcache.oracle.rules.catalog import SENTENCES
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.base import Target

TWO = Vocabulary((0, 1), ("a", "b"))
KEPT_BYTES = 64 << 20
"""Of copies that one searcher keeps; a state without one is replayed."""
REPLAYED = 251
"""One move in so many is also made by a replay, and must lead to the same state."""
COMPARED = 499
"""One merge in so many is checked: both states go on with the same moves and must stay alike."""
END: Move = (("wind_down", ()),)
WALKS, WALK = 4, 3
"""How: so many walks of so many steps."""


@dataclass(frozen=True)
class Scope:
    """What is explored: a driver with a configuration, its moves, and the names that they use.

    ``says``: the size, for people.
    """

    name: str
    driver: type[Driver]
    config: dict[str, Any]
    moves: Moves
    says: str
    every: Vocabulary = TWO

    def start(self, target: Target) -> Driver:
        return self.driver(target, **self.config)

    @property
    def needs(self) -> frozenset[str]:
        """The driver's capabilities; of a tree also ``inspect``, which tells states apart."""
        needs: frozenset[str] = self.driver.needs
        return needs | {"inspect"} if "tree" in needs else needs


class Child(NamedTuple):
    """A state that one move leads to. ``ends``: it is not gone on from."""

    move: Move
    digest: bytes
    ends: bool


class Expansion(NamedTuple):
    """Where the moves of one state lead.

    Attributes:
        programs: how many were run.
        whole: the target shows all that decides.
        copied: the moves were made from copies.
        failing: the first program that breaks a rule; None when none does.
        died: it ended the process that ran it.
    """

    children: list[Child]
    programs: int
    whole: bool
    copied: bool
    failing: list[Call] | None
    died: bool = False


class Searcher:
    """Goes on from states. Deterministic: the same program, the same answer."""

    def __init__(self, scope: Scope, target: Target) -> None:
        self.scope, self.target = scope, target
        self.copies = True
        self._kept: OrderedDict[Move, Frozen] = OrderedDict()
        self._bytes = 0
        self._known: set[bytes] = set()

    def replay(self, program: Iterable[Call]) -> Driver:
        """A driver after ``program``."""
        driver = self.scope.start(self.target)
        for name, args in program:
            getattr(driver, name)(*args)
        return driver

    def expand(self, program: Sequence[Call]) -> Expansion:
        """Make every move of the state that ``program`` leads to, then ``wind_down``.

        Where copies turn out not to be faithful, they are given up and all is made by replays.
        """
        program = tuple(program)
        if self.copies:
            try:
                return self._expand(program, self._copier(program))
            except CannotCopy:
                self.copies = False
                self._kept.clear()
        return self._expand(program, lambda: self.replay(program))

    def _expand(self, program: Move, again: Callable[[], Driver]) -> Expansion:
        """Every move from the end of a program: where each leads, or which one fails."""
        driver = again()
        start = fingerprint(driver)
        moves = [*self.scope.moves(driver, start.names, self.scope.every), END]
        children: dict[bytes, Child] = {}
        for number, move in enumerate(moves):
            driver = again()
            try:
                _make(driver, move)
            except Violation:
                failing = driver.call_log
                self._must_fail(failing)
                return Expansion(
                    list(children.values()), number + 1, start.whole, self.copies, failing
                )
            if driver.stopped:  # by a rule that is switched off: nothing follows
                if self.copies and not self.replay([*program, *move]).stopped:
                    raise CannotCopy(f"{move} fails in a copy and not in a replay")
                continue
            if move is END:
                break
            found = fingerprint(driver)
            if self.copies and (len(program) + number) % REPLAYED == 0:
                replayed = fingerprint(self.replay([*program, *move]))
                if replayed.digest != found.digest:
                    raise CannotCopy(f"a copy and a replay of {move} differ")
            if found.digest != start.digest and found.digest not in children:
                ends = beyond(driver)
                children[found.digest] = Child(move, found.digest, ends)
                if not ends:
                    self._keep((*program, *move), found.digest, driver)
        return Expansion(list(children.values()), len(moves), start.whole, self.copies, None)

    def _must_fail(self, program: list[Call]) -> None:
        """What fails in a copy fails in a replay, or the copy is at fault."""
        if not self.copies:
            return
        try:
            self.replay(program)
        except Violation:
            return
        raise CannotCopy(f"{program[-1]} fails in a copy and not in a replay")

    def _copier(self, program: Move) -> Callable[[], Driver]:
        """What makes a driver at the end of a program: a copy that was kept, or a replay."""
        frozen = self._kept.pop(program, None)
        if frozen is None:
            frozen = freeze(self.replay(program))
        else:
            self._bytes -= frozen.size
        return frozen.thaw

    def _keep(self, program: Move, digest: bytes, driver: Driver) -> None:
        """Keep a copy of a new state's driver; the oldest go when the room is used up."""
        if not self.copies or digest in self._known:
            return
        self._known.add(digest)
        frozen = self._kept[program] = freeze(driver)
        self._bytes += frozen.size
        while self._bytes > KEPT_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].size

    def alike(self, program: Sequence[Call], other: Sequence[Call]) -> str:
        """Go on from two states that were merged; says where they part, or nothing."""
        for walk in range(WALKS):
            made = self._walk(program, walk, None)
            again = self._walk(other, walk, made)
            for one, two in zip(made, again, strict=False):
                if one.end != two.end:
                    return f"{_text(program)} and {_text(other)} part at {_text(two.move)}"
        return ""

    def _walk(
        self, program: Sequence[Call], walk: int, as_in: "list[_Pace] | None"
    ) -> "list[_Pace]":
        """A few moves from where ``program`` leads: chosen by number, or those of another walk."""
        driver, paces = self.replay(program), []
        found, end = fingerprint(driver), ""
        for number in range(WALK):
            names = found.names
            if as_in is None:
                moves = list(self.scope.moves(driver, names, self.scope.every))
                move = moves[(walk * len(moves) // WALKS + 7 * number) % len(moves)]
            elif number < len(as_in):
                theirs = as_in[number]
                move = translated(driver, theirs.move, theirs.names, names, self.scope.every)
            else:
                break
            try:
                _make(driver, move)
                found = fingerprint(driver)
                end = found.digest.hex()
            except Violation as violation:
                end = violation.id
            paces.append(_Pace(move, names, end))
            if end in SENTENCES:
                break
        return paces


class _Pace(NamedTuple):
    """A move, the names before it, and the state or the broken rule that it led to."""

    move: Move
    names: Names
    end: str


def _make(driver: Driver, move: Move) -> None:
    for name, args in move:
        getattr(driver, name)(*args)


def _text(program: Iterable[Call]) -> str:
    return "; ".join(f"{name}({', '.join(map(repr, args))})" for name, args in program) or "start"


@dataclass
class Search:
    """The states that were found, in the order in which they were.

    A state is ``(index of the state before, move, digest)``; those from ``next`` on are left. With
    what ``record`` is given after each state, :meth:`enter` makes the same search again.

    Attributes:
        programs, merges: programs run; how many of them led to a state that was known.
        ended: indices of states that are not gone on from.
        failing: the first program that breaks a rule; ``died``: it ended its process.
        parted: evidence that two merged states are not alike; "" as long as there is none.
    """

    scope: Scope
    states: list[tuple[int, Move, bytes]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    next: int = 0
    programs: int = 0
    merges: int = 0
    compared: int = 0
    whole: bool = True
    copied: bool = True
    failing: list[Call] | None = None
    died: bool = False
    parted: str = ""
    _index: dict[bytes, int] = field(default_factory=dict)

    def begin(self, searcher: Searcher) -> None:
        """The empty cache."""
        if self.states:
            return
        try:
            self._add(-1, (), fingerprint(searcher.replay(())).digest)
        except Violation:
            self.failing = []

    def _add(self, before: int, move: Move, digest: bytes) -> int:
        index = self._index[digest] = len(self.states)
        self.states.append((before, move, digest))
        self.depths.append(0 if before < 0 else self.depths[before] + 1)
        return index

    def program(self, index: int) -> list[Call]:
        """The steps that lead to a state."""
        calls: list[Call] = []
        while index >= 0:
            index, move, _ = self.states[index]
            calls[:0] = move
        return calls

    def enter(self, found: Expansion) -> list[tuple[list[Call], list[Call]]]:
        """What going on from state ``next`` has found; the merged pairs that are to be checked."""
        index, pairs = self.next, []
        self.next += 1
        self.programs += found.programs
        self.whole &= found.whole
        self.copied &= found.copied
        self.failing, self.died = found.failing, found.died
        for move, digest, ends in found.children:
            known = self._index.get(digest)
            if known is None:
                new = self._add(index, move, digest)
                if ends:
                    self.ended.add(new)
                continue
            self.merges += 1
            if self.merges % COMPARED == 1 and self.whole:
                pairs.append((self.program(known), [*self.program(index), *move]))
        while self.next in self.ended:
            self.next += 1
        return pairs

    @property
    def left(self) -> int:
        return len(self.states) - self.next - sum(index >= self.next for index in self.ended)

    @property
    def complete(self) -> bool:
        """Every reachable state was gone on from, and the merges are trusted."""
        return not self.left and self.whole and not self.parted and self.failing is None

    @property
    def depth(self) -> int:
        """Every program of so many moves was run, up to names; all there are, when none is left."""
        return self.depths[self.next] if self.left else max(self.depths, default=0) + 1

    def __str__(self) -> str:
        """What was done, in one line."""
        size = f"{len(self.states):,} states, {self.programs:,} programs"
        if self.complete:
            bound = f", but {len(self.ended):,} are not gone on from" if self.ended else ""
            return f"every reachable state of {self.scope.says}: {size}, complete{bound}"
        if self.left:
            how = f"every program of {self.depth} moves, {self.left:,} states left"
        else:
            how = "all"
        why = ""
        if self.parted:
            why = f"; not complete: merged states differ: {self.parted}"
        elif not self.whole:
            why = "; never complete: the target does not show all that decides"
        return f"{self.scope.says}: {size}, {how}{why}"


class Limits(NamedTuple):
    """When to stop: after so many programs, or all programs of so many steps. None: no bound."""

    programs: int | None = None
    depth: int | None = None


NO_LIMITS = Limits()


def goes_on(state: Search, limits: Limits) -> bool:
    """Whether something is left to do."""
    if not state.left or state.failing is not None:
        return False
    if limits.programs is not None and state.programs >= limits.programs:
        return False
    return limits.depth is None or state.depths[state.next] < limits.depth


def expansions(searcher: Searcher, state: Search, limits: Limits) -> Iterator[Expansion]:
    """What going on from each state finds; each is to be entered before the next is asked for."""
    while goes_on(state, limits):
        yield searcher.expand(state.program(state.next))


def entered(
    state: Search, searcher: Searcher, found: Iterable[Expansion]
) -> Iterator[tuple[Search, Expansion]]:
    """Enter what going on from each state finds, and check a sample of the merges."""
    for expansion in found:
        for one, other in state.enter(expansion):
            state.compared += 1
            state.parted = state.parted or searcher.alike(one, other)
        yield state, expansion


def explored(scope: Scope, target: Target, limits: Limits = NO_LIMITS) -> Search:
    """Explore in this process, until nothing is left, a rule breaks, or a limit is reached."""
    searcher, state = Searcher(scope, target), Search(scope)
    state.begin(searcher)
    for _ in entered(state, searcher, expansions(searcher, state, limits)):
        pass
    return state


def broken(
    scope: Scope, target: Target, program: Iterable[Call]
) -> tuple[Violation, Driver | None]:
    """The violation of a failing program, and its driver; None where none could be made.

    Raises:
        InvalidArgument: the program breaks no rule.
    """
    driver: Driver | None = None
    try:
        driver = scope.start(target)
        for name, args in program:
            getattr(driver, name)(*args)
    except Violation as violation:
        return violation, driver
    raise InvalidArgument(f"{_text(program)}: breaks no rule when it is run again")
