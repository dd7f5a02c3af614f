"""Campaigns: suites on one target with seed after seed, over processes, for as long as time allows.

A campaign lives in a folder: ``campaign.json`` (what is run), ``journal.jsonl`` (one line a run, in
the order in which they finished) and ``failures/`` (one folder a distinct failure, as
:mod:`refcache.testing.report` writes it). A failure's folder is there before its line in the
journal, and both appear whole or not at all; so a campaign can be killed at any moment and started
again with the same call: what is in the journal is not run again, what was running is.

Two failures are one if the same rule breaks with the same minimal steps. A process that dies (a
crash of the interpreter, a kernel that reads out of bounds) is a result too: the seed is run once
more, alone, and if that dies again the run is ``unknown`` with the reason.
"""

import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import count
from multiprocessing import connection
from pathlib import Path
from typing import Any

from refcache.errors import InvalidArgument
from refcache.oracle.target.resolve import resolve
from refcache.testing.processes import begin, starting
from refcache.testing.registry import EXPLORED, list_suites, needs_of

EXAMPLES = 25
"""Cases a run: a second or so, which is what a kill can lose."""


@dataclass(frozen=True)
class Plan:
    """What a campaign runs; a folder belongs to one plan."""

    target: str
    suites: tuple[str, ...]
    first_seed: int = 0
    max_examples: int = EXAMPLES


@dataclass(frozen=True)
class Run:
    """A finished run. ``failure`` names a folder below ``failures/``, or is empty."""

    suite: str
    seed: int
    verdict: str
    cases: int = 0
    steps: int = 0
    rule: str = ""
    failure: str = ""
    reason: str = ""


@dataclass
class Campaign:
    """The state of a campaign, read from its folder.

    Attributes:
        runs: every finished run, in order; ``new``: how many of them this process made.
    """

    folder: Path
    plan: Plan
    runs: list[Run] = field(default_factory=list)
    new: int = 0

    @property
    def failures(self) -> dict[str, list[Run]]:
        """The runs that showed each distinct failure."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.failure:
                found.setdefault(run.failure, []).append(run)
        return found


def plan_for(target: str, suites: list[str] | None, **options: Any) -> Plan:
    """A plan for the suites that ``suites`` select and the target can take.

    Raises:
        UnknownName: no suite of such a name. InvalidArgument: no such target, or nothing to run.
    """
    wanted: list[str | None] = [*suites] if suites else [None]
    names = [name for part in wanted for name in list_suites(part)]
    known = resolve(target)
    able = tuple(n for n in dict.fromkeys(names) if not known.lacks(needs_of(n)))
    if not able:
        raise InvalidArgument(f"target {target!r} lacks what {', '.join(names)} need")
    return Plan(target, able, **options)


def refuse_what_is_no_campaign(folder: Path) -> None:
    """Refuse a file, and a folder that has something else in it.

    Raises:
        InvalidArgument: it does.
    """
    try:
        known = not folder.exists() or (folder / "campaign.json").exists()
        if not known and any(p for p in folder.iterdir() if not p.name.endswith(".part")):
            raise InvalidArgument(f"{folder}: not empty, and no campaign")
    except OSError as error:
        raise InvalidArgument(f"{folder}: {error.strerror}") from None


def open_campaign(folder: str | Path, plan: Plan) -> Campaign:
    """Start a campaign in a new folder, or go on with the one that is there.

    Raises:
        InvalidArgument: the folder is something else, or belongs to another plan.
    """
    folder = Path(folder)
    refuse_what_is_no_campaign(folder)
    about = folder / "campaign.json"
    wanted = json.dumps(asdict(plan), indent=2) + "\n"
    try:
        if not about.exists():
            (folder / "failures").mkdir(parents=True, exist_ok=True)
            part = folder / "campaign.json.part"
            part.write_text(wanted, encoding="utf-8")
            part.rename(about)
        if about.read_text(encoding="utf-8") != wanted:
            raise InvalidArgument(f"{folder}: a campaign with other settings, see {about}")
        for part in (folder / "failures").glob(".*.part"):  # what a kill left half written
            shutil.rmtree(part, ignore_errors=True)
        return Campaign(folder, plan, _read_journal(folder / "journal.jsonl"))
    except OSError as error:
        raise InvalidArgument(f"{folder}: {error.strerror}") from None


def _read_journal(path: Path) -> list[Run]:
    """The whole lines; a torn one at the end, from a kill, is cut off."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if whole != raw:
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    return [Run(**json.loads(line)) for line in whole.splitlines()]


def run_campaign(
    campaign: Campaign,
    *,
    minutes: float,
    workers: int = 1,
    max_runs: int | None = None,
    executor: Callable[[int], Executor] | None = None,
) -> Iterator[Run]:
    """Go on until the time is over; yields each run when it is in the journal.

    Args:
        minutes: no run is started later; those that run are waited for.
        workers: processes.
        max_runs: start at most so many.
        executor: makes the pool; processes by default.

    Raises:
        InvalidArgument: minutes below 0, fewer than one worker.
    """
    if minutes < 0 or workers < 1:
        raise InvalidArgument(f"{minutes=}, {workers=}: expected 0 or more, and at least 1")
    make = executor or _processes
    end = time.monotonic() + 60 * minutes
    todo = _todo(campaign, max_runs)
    pool = make(workers)
    running: dict[Future[Run], tuple[str, int]] = {}
    again: list[tuple[str, int]] = []
    try:
        while True:
            while len(running) < workers and time.monotonic() < end:
                task = next(todo, None)
                if task is None:
                    break
                with starting():
                    future = pool.submit(one_run, campaign.plan, str(campaign.folder), *task)
                running[future] = task
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task = running.pop(future)
                try:
                    run = future.result()
                except BrokenProcessPool:
                    again.append(task)
                    continue
                yield _enter(campaign, run)
            if again:  # a broken pool takes all its runs with it: find out which one it was
                again += running.values()
                running.clear()
                for task in again:
                    yield _enter(campaign, _alone(campaign, make, task))
                again = []
                pool.shutdown(cancel_futures=True)
                pool = make(workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _todo(campaign: Campaign, max_runs: int | None) -> Iterator[tuple[str, int]]:
    done = {(run.suite, run.seed) for run in campaign.runs}
    started = count()
    for seed in count(campaign.plan.first_seed):
        for suite in campaign.plan.suites:
            if (suite, seed) not in done:
                if max_runs is not None and next(started) >= max_runs:
                    return
                yield suite, seed


def _alone(campaign: Campaign, make: Callable[[int], Executor], task: tuple[str, int]) -> Run:
    with make(1) as pool:
        try:
            with starting():
                future = pool.submit(one_run, campaign.plan, str(campaign.folder), *task)
            return future.result()
        except BrokenProcessPool:
            return Run(*task, "unknown", reason="the process died, twice")


def _enter(campaign: Campaign, run: Run) -> Run:
    """Write a run into the journal."""
    with open(campaign.folder / "journal.jsonl", "ab") as file:
        file.write(json.dumps(asdict(run)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    campaign.runs.append(run)
    campaign.new += 1
    return run


def one_run(plan: Plan, folder: str, suite: str, seed: int) -> Run:
    """One suite with one seed, in a worker; a failure is written before this returns."""
    from refcache.testing.exploration import explore_on
    from refcache.testing.report import failure_name, write_failure
    from refcache.testing.run import run_suite

    if suite in EXPLORED:
        result = explore_on(suite, plan.target, Path(folder) / "explore", plan.max_examples)
    else:
        result = run_suite(suite, resolve(plan.target), max_examples=plan.max_examples, seed=seed)
    run = Run(suite, seed, result.verdict, result.cases, result.steps, reason=result.reason)
    if result.failure is None:
        return run
    name = failure_name(suite, result.failure.rule, result.failure.steps)
    target = Path(folder) / "failures" / name
    if not target.exists():
        try:
            write_failure(target, suite, result.failure.steps)
        except InvalidArgument:
            if not target.exists():  # else another worker was faster with the same failure
                raise
    return Run(suite, seed, result.verdict, result.cases, result.steps, result.failure.rule, name)


def _processes(workers: int) -> Executor:
    return ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_begin
    )


def _begin() -> None:
    """Begin a worker; it ends when the process that started it is gone, however that ended."""
    begin()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
