"""What all drivers share: a log that is a program, and checks after each of its steps.

A driver makes steps, the way an engine does, on a *bench*: the components on trial, a ledger of who
owns what from public observations only, the single calls and the checks. Its methods are total: an
index is taken modulo what exists, and a call that makes no sense now does nothing. So any sequence
of calls is legal, any subsequence of a failing one may be tried, and the log of a failure is a
program that runs::

    d = TreeDriver(resolve("refcache"), page_size=2, size=8)
    d.admit((0, 1, 1))
    d.finish(0)
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

from refcache.oracle.program.exact import difference, on_the_reference
from refcache.oracle.program.trial import Trial
from refcache.oracle.rules.violation import Violation, switched_off
from refcache.oracle.target.base import Target
from refcache.oracle.target.config import PROFILES, CacheConfig
from refcache.oracle.target.resolve import resolve

P = ParamSpec("P")
D = TypeVar("D", bound="Driver")
Call = tuple[str, tuple[Any, ...]]
"""A logged call: a method's name and its arguments, without those that are the default."""


class Bench(Protocol):
    """What a driver drives: the components on trial with their ledger, and the checks of both."""

    @property
    def subject(self) -> Any:
        """The component whose calls a trace records; None when none stays."""

    def check(self) -> None:
        """Every rule about the state as it is now."""

    def choices(self) -> dict[str, Any]:
        """Everything the target was free to choose and that can be seen, by name."""

    def describe(self) -> str:
        """The state as the ledger has it, one line an owner."""


class EmptyBench:
    """A :class:`Bench` on which nothing stays from one step to the next."""

    subject = None

    def __init__(self, trial: Trial, config: CacheConfig) -> None:
        self.trial, self.config = trial, config

    def check(self) -> None: ...

    def choices(self) -> dict[str, Any]:
        return {}

    def describe(self) -> str:
        return ""


class Driver:
    """Base of the drivers: the log of a program, over a bench.

    Attributes:
        trial: makes the calls on the target; ``bench``: made by ``bench_type(trial, config)``.
        calls: counts the logged calls; ``log`` is the program.
        found: the violation that ended it.
        stopped: a rule that is switched off was broken and nothing can follow; further steps do
            nothing.
        reference: the same driver over the reference that the configuration's profile names.
    """

    needs: frozenset[str] = frozenset()
    stopped = False
    Config: type[CacheConfig] = CacheConfig
    bench_type: ClassVar[type[Any]] = EmptyBench
    bench: Bench

    def __init__(self, target: Target, **config: Any) -> None:
        self.target = target
        self.config = self.Config(**config)
        self.trial = Trial(target)
        given = "".join(
            f", {f.name}={getattr(self.config, f.name)!r}"
            for f in fields(self.Config)
            if getattr(self.config, f.name) != f.default
        )
        self.log = [f"d = {type(self).__name__}(resolve({target.named()!r}){given})"]
        self.call_log: list[Call] = []
        self.found: Violation | None = None
        self.reference: Driver | None = None
        profile = self.config.profile
        if profile is not None:
            with on_the_reference():
                self.reference = self._again(resolve(PROFILES[profile]), profile=None)
        self.bench = self.bench_type(self.trial, self.config)

    def _again(self, target: Target, **changed: Any) -> "Driver":
        """A fresh driver of the same kind and configuration, but for what is changed."""
        config = {f.name: getattr(self.config, f.name) for f in fields(self.Config)}
        return type(self)(target, **config | changed)

    @property
    def calls(self) -> int:
        return len(self.call_log)

    @property
    def subject(self) -> Any:
        """The component whose calls a trace records; None when none stays."""
        return self.bench.subject

    def check(self) -> None:
        """Every rule about the state as it is now; runs after each step."""
        self.bench.check()

    def describe(self) -> str:
        """The state as the ledger has it, one line an owner."""
        return self.bench.describe()

    def wind_down(self) -> None:
        """End everything that runs and see that nothing is left over; a step."""
        raise NotImplementedError

    def _follow(self, name: str, args: tuple[Any, ...]) -> None:
        """Make the step on the reference too, and compare the choices."""
        if self.reference is None:
            return
        with on_the_reference():
            getattr(self.reference, name)(*args)
        evidence = difference(self.bench.choices(), self.reference.bench.choices())
        self.trial.require(evidence is None, "DIFF", evidence or "")

    def program(self) -> list[str]:
        """The log as a program that runs as it stands; refcache's names are the public ones."""
        name, module = type(self).__name__, type(self).__module__
        if module.startswith("refcache.oracle."):
            return [f"from refcache.oracle import {name}, resolve", *self.log]
        return [f"from {module} import {name}", "from refcache.oracle import resolve", *self.log]

    def replay(self, steps: int) -> "Driver":
        """A fresh driver after the first ``steps`` calls of this one's log."""
        fresh = self._again(self.target)
        for name, args in self.call_log[:steps]:
            getattr(fresh, name)(*args)
        return fresh


def step(
    method: Callable[Concatenate[D, P], None],
) -> Callable[Concatenate[D, P], None]:
    """Make a driver's method a step: logged as code, then checked, its violation explained."""

    signature = inspect.signature(method)
    defaults = [p.default for p in signature.parameters.values()][1:]

    def logged(self: D, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.stopped:
            return
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()  # `args` would end at the first one that was left out
        given = bound.args[1:]
        while given and given[-1] == defaults[len(given) - 1]:
            given = given[:-1]
        line = f"d.{method.__name__}({', '.join(map(repr, given))})"
        self.log.append(line)
        self.call_log.append((method.__name__, given))
        try:
            with self.trial.step():
                method(self, *args, **kwargs)
                self.check()
                self._follow(method.__name__, given)
        except Violation as violation:
            if switched_off(violation.id):
                self.stopped = True
                return
            violation.call = line
            violation.steps = tuple(self.log)
            self.found = violation
            raise
        except Exception:
            if not switched_off():
                raise
            self.stopped = True  # the ledger met what a rule would have reported

    functools.update_wrapper(logged, method)
    return logged
