"""Suites and hunts side by side: one process a core, results in order.

A process of its own also keeps a planted bug, or a target that dies, away from everything else.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import Any, NamedTuple, Protocol

from refcache.cli.console import status
from refcache.testing.processes import begin, starting


class Run(NamedTuple):
    """One suite on a target, with a planted bug or without, exact suites under a profile, two-tier
    suites with one write policy or all."""

    suite: str
    target: str
    max_examples: int
    seed: int
    bug: str | None = None
    profile: str | None = None
    write_policy: str | None = None

    def __str__(self) -> str:
        return f"{self.suite} on {self.target}"

    @property
    def trusted(self) -> bool:
        """Whether it may run in this very process."""
        return self.target in ("refcache", "naive")

    def died(self) -> Any:
        from refcache.oracle import SENTENCES
        from refcache.testing.run import Failure, SuiteResult

        evidence = f"{self.target} ended the process that ran {self.suite}, or had it killed"
        sentence = SENTENCES["crash"]
        text = f"crash: {evidence}\n  rule: {sentence}"
        failure = Failure("crash", sentence, evidence, (), text)
        return SuiteResult(self.suite, 0, 0, "violation", failure)

    def work(self) -> Any:
        from contextlib import nullcontext

        from refcache.oracle import resolve
        from refcache.planted import find
        from refcache.testing import run_suite

        with find(self.bug).active() if self.bug else nullcontext():
            return run_suite(
                self.suite,
                resolve(self.target),
                max_examples=self.max_examples,
                seed=self.seed,
                profile=self.profile,
                write_policy=self.write_policy,
            )


class Hunt(NamedTuple):
    """One planted bug against its suite."""

    bug: str
    seed: int
    only_one: bool = False
    max_examples: int | None = None

    def __str__(self) -> str:
        return f"planted bug {self.bug}"

    @property
    def trusted(self) -> bool:
        return True

    def died(self) -> Any:
        from refcache.planted import find
        from refcache.testing.run import Caught

        return Caught(self.bug, "crash", find(self.bug).suite, 0, 0, True, 1, None)

    def work(self) -> Any:
        from refcache.planted import find
        from refcache.testing import hunt
        from refcache.testing.run import HUNT_EXAMPLES

        most = self.max_examples or HUNT_EXAMPLES
        return hunt(find(self.bug), seed=self.seed, only_one=self.only_one, max_examples=most)


class Task(Protocol):
    """What a process of its own can do; its string says what runs."""

    @property
    def trusted(self) -> bool:
        """Whether it may run in this very process."""
        ...

    def work(self) -> Any:
        """Do it."""
        ...

    def died(self) -> Any:
        """The result of a process that ended on the way."""
        ...


def in_order(tasks: Sequence[Task]) -> Iterator[Any]:
    """Yield what each task's ``work`` returns, in the order of ``tasks``.

    A target that ends its process is a result too: the tasks that are left then run one process
    each, and whose process dies has crashed.
    """
    if len(tasks) == 1 and tasks[0].trusted:
        with status(str(tasks[0])):
            result = tasks[0].work()
        yield result
        return
    done = 0
    try:
        for result in _pooled(tasks, os.cpu_count() or 1):
            yield result
            done += 1
    except BrokenProcessPool:
        for task in tasks[done:]:
            try:
                yield from _pooled([task], 1)
            except BrokenProcessPool:
                yield task.died()


def _pooled(tasks: Sequence[Task], workers: int) -> Iterator[Any]:
    with ProcessPoolExecutor(
        max_workers=min(len(tasks), workers),
        mp_context=get_context("spawn"),
        initializer=begin,
    ) as pool:
        with starting():
            pending = [pool.submit(task.work) for task in tasks]
        try:
            for task, future in zip(tasks, pending, strict=True):
                with status(str(task)):
                    result = future.result()
                yield result
        except BaseException:  # nobody waits for what they do
            for worker in active_children():
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)  # without waiting, the exit may trip over it
