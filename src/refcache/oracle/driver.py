"""What all drivers share: a log that is a program, guarded calls on the target, checks after each.

A driver performs one call on the target at a time, the way an engine does, and keeps a ledger of
who owns what from public observations only. Its methods are total: an index is taken modulo what
exists, and a call that makes no sense now does nothing. So any sequence of calls is legal, any
subsequence of a failing one may be tried, and the log of a failure is a program that runs::

    d = TreeDriver(resolve("refcache"), page_size=2, size=8)
    d.admit((0, 1, 1))
    d.finish(0)
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Concatenate, ParamSpec, TypeVar

from refcache.oracle.exact import PROFILES, difference, on_the_reference
from refcache.oracle.target import CacheConfig, Target, resolve
from refcache.oracle.torch_settings import TorchSettings, put_back, torch_settings
from refcache.oracle.violation import Violation, switched_off

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D", bound="Driver")
Call = tuple[str, tuple[Any, ...]]
"""A logged call: a method's name and its arguments, without those that are the default."""


class Driver:
    """Base of the drivers. ``calls`` counts the logged calls; ``log`` is the program. ``stopped``:
    a rule that is switched off was broken and nothing can follow; further steps do nothing."""

    needs: frozenset[str] = frozenset()
    stopped = False
    Config: type[CacheConfig] = CacheConfig

    def __init__(self, target: Target, **config: Any) -> None:
        self.target = target
        self.config = self.Config(**config)
        given = "".join(
            f", {f.name}={getattr(self.config, f.name)!r}"
            for f in fields(self.Config)
            if getattr(self.config, f.name) != f.default
        )
        self.log = [f"d = {type(self).__name__}(resolve({target.named()!r}){given})"]
        self.call_log: list[Call] = []
        self.found: Violation | None = None
        self._noted: Violation | None = None
        self._settings: TorchSettings | None = None  # when the step that runs began
        self.reference = self._reference()

    def _reference(self) -> "Driver | None":
        """The same driver over the reference that the configuration's profile names."""
        if self.config.profile is None:
            return None
        config = {f.name: getattr(self.config, f.name) for f in fields(self.Config)}
        with on_the_reference():
            return type(self)(resolve(PROFILES[self.config.profile]), **config | {"profile": None})

    @property
    def calls(self) -> int:
        return len(self.call_log)

    def note(self, rule: str, evidence: str) -> None:
        """Remember the first violation seen inside a call; it is raised when the call is over."""
        if self._noted is None and not switched_off(rule):
            self._noted = Violation(rule, evidence)

    def require(self, holds: bool, rule: str, evidence: str) -> None:
        if not holds and not switched_off(rule):
            raise Violation(rule, evidence)

    def on_target(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Make one legal call on the target; an exception of it is the violation ``crash``.

        What the ledger noted during the call comes first: it is the cause, an exception (or a
        result) is the consequence. So is what comes of a setting of torch that the call changed;
        it is put back.
        """
        before = self._settings or torch_settings()
        try:
            result = function(*args, **kwargs)
        except (Violation, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._settings_kept(function, before)
            raise Violation("crash", f"{_name(function)} raised {error!r}") from error
        self._settings_kept(function, before)
        return result

    def _settings_kept(self, function: Callable[..., Any], before: TorchSettings) -> None:
        """After a call, with what was noted in it first."""
        changed = put_back(before)
        self.raise_noted()
        self.require(not changed, "GLOBAL", f"{_name(function)} changed torch's {changed}")

    def raise_noted(self) -> None:
        noted, self._noted = self._noted, None
        if noted is not None:
            raise noted

    def check(self) -> None:
        """Every rule about the state as it is now."""

    def wind_down(self) -> None:
        """End everything that runs and see that nothing is left over; a step."""
        raise NotImplementedError

    def choices(self) -> dict[str, Any]:
        """Everything the target was free to choose and that can be seen, by name."""
        return {}

    def _follow(self, name: str, args: tuple[Any, ...]) -> None:
        """Make the step on the reference too, and compare the choices."""
        if self.reference is None:
            return
        with on_the_reference():
            getattr(self.reference, name)(*args)
        evidence = difference(self.choices(), self.reference.choices())
        self.require(evidence is None, "DIFF", evidence or "")

    def describe(self) -> str:
        """The state as the ledger has it, one line an owner."""
        return ""

    def program(self) -> list[str]:
        """The log as a program that runs as it stands; refcache's names are the public ones."""
        name, module = type(self).__name__, type(self).__module__
        if module.startswith("refcache.oracle."):
            return [f"from refcache.oracle import {name}, resolve", *self.log]
        return [f"from {module} import {name}", "from refcache.oracle import resolve", *self.log]

    def replay(self, steps: int) -> "Driver":
        """A fresh driver after the first ``steps`` calls of this one's log."""
        fresh = type(self)(
            self.target, **{f.name: getattr(self.config, f.name) for f in fields(self.Config)}
        )
        for name, args in self.call_log[:steps]:
            getattr(fresh, name)(*args)
        return fresh


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


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
        self._settings = torch_settings()
        try:
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
        finally:
            self._settings = None

    functools.update_wrapper(logged, method)
    return logged
