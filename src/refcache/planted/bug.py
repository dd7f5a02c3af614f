"""Planted bugs: what the suites must catch, so that their silence means something.

A :class:`PlantedBug` is one patch: an attribute of a reference module or class, and what replaces
it. The reference has no flag for it. Half model a public bug report of an engine; the others are
one-line slips of the same kind. A bug counts when a fixed smoke test of 20 calls still passes with
it (:mod:`refcache.planted.smoke`), the patched code is executed, and a named rule catches
it, not an exception.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from refcache.errors import InvalidArgument
from refcache.oracle.program.exact import reference_turn
from refcache.oracle.target.base import Target


@dataclass
class Use:
    """How often the patched code was executed."""

    count: int = 0


@dataclass(frozen=True)
class PlantedBug:
    """One patch.

    Attributes:
        name: what the command line calls it.
        report: the public report it models, or "slip" for a one-line slip.
        summary: what goes wrong, in one line.
        where: what is patched, ``module:attribute`` or ``module:Class.attribute``.
        replacement: the new function, made from the original one.
        suite: the suite that must catch it.
        target: what it is planted in, by name.
    """

    name: str
    report: str
    summary: str
    where: str
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
    suite: str
    target: str = "refcache"

    def smoke(self, target: Target) -> None:
        """The calls that must not see the bug; raises if they do."""
        from refcache.planted.smoke import smoke

        smoke(target)

    def owner(self) -> tuple[Any, str]:
        """The module or class that is patched, and the attribute's name."""
        module_name, _, path = self.where.partition(":")
        *classes, attribute = path.split(".")
        owner: Any = importlib.import_module(module_name)
        for name in classes:
            owner = getattr(owner, name)
        if isinstance(owner, ModuleType):
            getattr(owner, attribute, None)  # a name that its package imports at first use
        if attribute not in vars(owner):
            raise InvalidArgument(f"planted bug {self.name}: {self.where} does not exist")
        return owner, attribute

    @contextmanager
    def active(self) -> Iterator[Use]:
        """Patch for the time of a ``with`` block; yields the count of executions."""
        owner, attribute = self.owner()
        original = vars(owner)[attribute]
        changed, use = self.replacement(original), Use()

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if reference_turn():
                return original(*args, **kwargs)
            use.count += 1
            return changed(*args, **kwargs)

        setattr(owner, attribute, counted)
        _ACTIVE.append(self)
        try:
            yield use
        finally:
            _ACTIVE.remove(self)
            setattr(owner, attribute, original)


_ACTIVE: list[PlantedBug] = []


def active_bugs() -> tuple[PlantedBug, ...]:
    """The bugs that are patched in now."""
    return tuple(_ACTIVE)
