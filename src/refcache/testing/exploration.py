"""Explores a target's small programs over processes; what ``refcache explore`` calls.

The search itself is in :mod:`refcache.oracle.explore`. Here states are handed to processes, and
what these find is entered in the order in which the states were found: the result does not depend
on how many processes there are. A process that dies is a crash of the program that it went on from.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from refcache.errors import InvalidArgument
from refcache.oracle import SENTENCES, resolve
from refcache.oracle.explore.journal import InUse, Journal
from refcache.oracle.explore.scopes import SCOPES
from refcache.oracle.explore.search import (
    NO_LIMITS,
    Expansion,
    Limits,
    Search,
    Searcher,
    broken,
    entered,
    expansions,
    goes_on,
)
from refcache.oracle.program.driver import Call
from refcache.oracle.rules.violation import without_rules
from refcache.planted import find
from refcache.testing.processes import begin, starting
from refcache.testing.registry import EXPLORED
from refcache.testing.run import MAX_EXAMPLES, Failure, SuiteResult, explain


class Task(NamedTuple):
    """What is explored: a scope of a target, perhaps with a planted bug, or without some rules."""

    scope: str
    target: str
    planted: str | None = None
    without: tuple[str, ...] = ()

    def searcher(self) -> Searcher:
        return Searcher(SCOPES[self.scope], resolve(self.target))

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """In the block the bug is planted and the rules are switched off."""
        bug = find(self.planted).active() if self.planted else nullcontext()
        with bug, without_rules(*self.without):
            yield


def explore(
    task: Task, *, limits: Limits = NO_LIMITS, workers: int = 1, journal: Path | None = None
) -> Iterator[Search]:
    """Explore one scope; yields the search when it has begun and after each state.

    Args:
        workers: processes; with 1 it is this one.
        journal: a file; what it has is not explored again, and what is found is added.

    Raises:
        InvalidArgument: fewer than one worker; no such target; a file that is something else.
        UnknownName: no such planted bug.
    """
    if workers < 1:
        raise InvalidArgument(f"{workers=}: expected at least 1")
    with task.conditions(), ExitStack() as stack:
        searcher, state = task.searcher(), Search(SCOPES[task.scope])
        state.begin(searcher)
        book = None
        if journal is not None:
            book = stack.enter_context(closing(Journal(journal, task.target, state)))
            book.enter_all()
        yield state
        found = expansions(searcher, state, limits)
        if workers > 1:
            found = _in_processes(task, state, limits, workers)
        for _, expansion in entered(state, searcher, found):
            if book is not None:
                book.add(expansion)
            yield state


def _in_processes(task: Task, state: Search, limits: Limits, workers: int) -> Iterator[Expansion]:
    """The same, of several processes; states are handed out a little ahead."""
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(task,)
    )
    waiting: deque[tuple[list[Call], Future[Expansion]]] = deque()
    ahead = state.next
    try:
        while goes_on(state, limits):
            ahead = max(ahead, state.next)
            while ahead < len(state.states) and len(waiting) < 4 * workers:
                if ahead not in state.ended:
                    program = state.program(ahead)
                    with starting():
                        waiting.append((program, pool.submit(_expand, program)))
                ahead += 1
            program, future = waiting.popleft()
            try:
                found = future.result()
            except BrokenProcessPool:
                found = _alone(task, program)
                waiting.clear()
                ahead = state.next + 1
                pool.shutdown(cancel_futures=True)
                pool = ProcessPoolExecutor(
                    workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(task,)
                )
            yield found
    finally:
        pool.shutdown(cancel_futures=True)


_SEARCHER: list[Searcher] = []
_CONDITIONS = ExitStack()  # of a worker, for as long as it lives


def _begin(task: Task) -> None:
    begin()
    _CONDITIONS.enter_context(task.conditions())
    _SEARCHER.append(task.searcher())


def _expand(program: list[Call]) -> Expansion:
    return _SEARCHER[0].expand(program)


def _alone(task: Task, program: list[Call]) -> Expansion:
    """Go on from one state in a process of its own; if that dies too, the program crashes."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_begin, initargs=(task,)
    ) as pool:
        try:
            with starting():
                future = pool.submit(_expand, program)
            return future.result()
        except BrokenProcessPool:
            return Expansion([], 0, True, False, program, died=True)


def failure_of(task: Task, state: Search) -> Failure:
    """The rule that the failing program breaks, explained as any suite's failure."""
    program = state.failing or []
    if state.died:
        evidence = f"{task.target} ended the process that went on from {program}"
        sentence = SENTENCES["crash"]
        return Failure("crash", sentence, evidence, (), f"crash: {evidence}\n  rule: {sentence}")
    with task.conditions():
        return explain(*broken(SCOPES[task.scope], resolve(task.target), program))


def explore_on(suite: str, target: str, folder: Path, max_examples: int) -> SuiteResult:
    """One share more of the first scope of a suite that is not explored whole; for campaigns.

    Args:
        folder: keeps the searches, a file a scope; a scope that another process has is passed over.
        max_examples: the share, as in :func:`refcache.testing.run_suite`.
    """
    for scope, most in EXPLORED[suite].programs.items():
        task, share = Task(scope, target), max(1, most * max_examples // MAX_EXAMPLES)
        before: tuple[int, int] | None = None
        try:
            for state in explore(task, journal=folder / f"{scope}.jsonl"):
                before = before or (len(state.states), state.programs)
                if state.programs - before[1] >= share:
                    break
        except InUse:
            continue
        assert before is not None
        states, programs = len(state.states) - before[0], state.programs - before[1]
        if state.failing is not None:
            return SuiteResult(suite, states, programs, "violation", failure_of(task, state))
        if state.parted:
            return SuiteResult(suite, states, programs, "unknown", reason=str(state))
        if programs:
            return SuiteResult(suite, states, programs, "ok", reason=str(state))
    return SuiteResult(suite, 0, 0, "ok", reason="nothing is left that nobody goes on with")
