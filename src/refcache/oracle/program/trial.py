"""A trial: legal calls on the target, guarded. Every bench and every driver makes its calls here.

What is noticed while a call runs is noted, and raised when the call is over: the note is the cause,
an exception or a wrong result is the consequence. A call must also leave torch's settings as they
were (:mod:`refcache.oracle.program.torch_settings`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from refcache.oracle.program.crash import told
from refcache.oracle.program.torch_settings import TorchSettings, put_back, torch_settings
from refcache.oracle.rules.violation import Violation, switched_off
from refcache.oracle.target.base import Target

R = TypeVar("R")


class NotOffered(Exception):
    """The target raised NotImplementedError for a configuration: that is a skip, and its reason."""


class Trial:
    """See the module docstring.

    Attributes:
        explained: the violation that an exception inside a call stands for, where that is none of
            ``crash``: a report of the simulated machine's tracker.
        answered: is told the name and the result of every call.
        made: makes each call; what tries out its faults takes its place.
        misused: makes a call that breaks the contract, and says what must come of it.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.explained: Callable[[BaseException], Violation | None] = lambda error: None
        self.answered: Callable[[str, Any], None] = lambda name, result: None
        self.made: Callable[..., Any] = lambda function, *args, **kwargs: function(*args, **kwargs)
        self.misused: Callable[..., None] = self.must_refuse
        self._noted: Violation | None = None
        self._settings: TorchSettings | None = None  # when the step that runs began

    def has(self, capability: str) -> bool:
        """Whether the target declares it."""
        return capability in self.target.capabilities

    def note(self, rule: str, evidence: str) -> None:
        """Remember the first violation seen inside a call; it is raised when the call is over."""
        if self._noted is None and not switched_off(rule):
            self._noted = Violation(rule, evidence)

    def raise_noted(self) -> None:
        """Raise what was noted, if anything was."""
        noted, self._noted = self._noted, None
        if noted is not None:
            raise noted

    def require(self, holds: bool, rule: str, evidence: str) -> None:
        """Raise a violation of ``rule`` unless it holds, or is switched off."""
        if not holds and not switched_off(rule):
            raise Violation(rule, evidence)

    def call(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Make one legal call on the target; an exception of it is the violation ``crash``.

        What was noted during the call comes first. So is what comes of a setting of torch that the
        call changed; it is put back.
        """
        before = self._settings or torch_settings()
        try:
            result: R = self.made(function, *args, **kwargs)
        except (Violation, KeyboardInterrupt):
            raise
        except BaseException as error:
            explained = self.explained(error)
            if explained is not None:
                raise explained from error
            self._settings_kept(function, before)
            raise Violation("crash", f"{_name(function)} raised {told(error)}") from error
        self._settings_kept(function, before)
        self.answered(getattr(function, "__name__", ""), result)
        return result

    def must_refuse(self, what: str, function: Callable[..., Any], *args: Any) -> None:
        """Make a call that breaks the contract; it must raise one of the target's errors."""
        expected = self.target.errors
        try:
            function(*args)
        except expected:
            self.raise_noted()
            return
        except Exception as error:
            raise Violation("REFUSE", f"{what}: raised {error!r}, expected {expected}") from error
        self.raise_noted()
        raise Violation("REFUSE", f"{what}: was accepted, expected an error")

    def make(self, function: Callable[..., R], *args: Any) -> R:
        """Make what is on trial, as :meth:`call` does.

        Raises:
            NotOffered: the target has no such thing for this configuration.
        """
        try:
            return self.call(function, *args)
        except Violation as violation:
            error = violation.__cause__
            if type(error) is not NotImplementedError:
                raise
            reason = str(error) or f"{_name(function)} is not implemented"
            raise NotOffered(reason) from error

    def _settings_kept(self, function: Callable[..., Any], before: TorchSettings) -> None:
        """After a call, with what was noted in it first."""
        changed = put_back(before)
        self.raise_noted()
        self.require(not changed, "GLOBAL", f"{_name(function)} changed torch's {changed}")

    @contextmanager
    def step(self) -> Iterator[None]:
        """The block is one step: torch's settings are looked at once, when it begins."""
        self._settings = torch_settings()
        try:
            yield
        finally:
            self._settings = None


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
