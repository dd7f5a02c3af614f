"""The smallest program that still shows a broken rule.

Drivers are total, so every part of a failing log is a legal program: calls are left out in halves,
then one by one; then each argument, and the configuration, is replaced by simpler ones. A candidate
counts when the same rule breaks, and is tried once. Nothing is drawn, and what may be spent is
counted in calls: the result depends on the log only.
"""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any

from refcache.errors import InvalidArgument
from refcache.oracle.program.driver import Call, Driver
from refcache.oracle.rules.violation import Violation

BUDGET = 12_000
"""Calls that the programs that are tried make, at most; the start of each counts as ``START``."""
START = 3

Program = tuple[dict[str, Any], list[Call]]


def shrink(driver: Driver, budget: int = BUDGET) -> Driver:
    """A driver whose log is minimal; ``driver`` must have found a violation.

    Returns ``driver`` itself when its log does not fail again, which no deterministic target does.
    """
    if driver.found is None:
        return driver
    best = _Best(driver, budget)
    if not best.tries((best.config, best.calls)):
        return driver
    passes = (
        best.drop_calls,
        best.simplify_config,
        best.one_namespace,
        best.simplify_calls,
        best.drop_pairs,
        best.shrink_pool_and_prompt,
    )
    while any(better() for better in passes):
        continue
    return best.driver


class _Best:
    """The smallest failing program so far, and what may still be spent."""

    def __init__(self, driver: Driver, budget: int) -> None:
        assert driver.found is not None
        self.rule = driver.found.id
        self.driver, self.budget = driver, budget
        self.tried: set[str] = set()
        self._adopt(driver)

    def _adopt(self, driver: Driver) -> None:
        self.driver = driver
        config = driver.config
        self.config = {f.name: getattr(config, f.name) for f in fields(config)}
        self.calls = list(driver.call_log)

    def tries(self, program: Program) -> bool:
        """Run a candidate that was not tried before; keep it if the same rule breaks."""
        config, calls = program
        try:
            text = repr((self.driver.Config(**config), calls))
            if self.budget <= 0 or text in self.tried:
                return False
            self.tried.add(text)
            self.budget -= START
            candidate = type(self.driver)(self.driver.target, **config)
        except (InvalidArgument, Violation):
            return False
        try:
            for name, args in calls:
                getattr(candidate, name)(*args)
        except Violation as violation:
            if violation.id == self.rule:
                self._adopt(candidate)
                return True
        except Exception:
            pass  # no program: a simpler argument that the driver cannot take
        finally:
            self.budget -= candidate.calls
        return False

    def drop_calls(self) -> bool:
        dropped = False
        size = len(self.calls) // 2
        while size:
            start = len(self.calls) - size
            while start >= 0:
                if self.tries((self.config, self.calls[:start] + self.calls[start + size :])):
                    dropped = True
                start = min(start, len(self.calls)) - size
            size //= 2
        return dropped

    def drop_pairs(self) -> bool:
        """Leave out two calls that only make sense together, such as an admission and its end."""
        for i in range(len(self.calls)):
            for j in range(i + 1, len(self.calls)):
                rest = [c for k, c in enumerate(self.calls) if k not in (i, j)]
                if self.tries((self.config, rest)):
                    return True
        return False

    def simplify_config(self) -> bool:
        """Every setting at its default, or else smaller pages; then the smallest pool."""
        changed = False
        for f in fields(self.driver.config):
            if self.config[f.name] != f.default and f.name != "size":
                changed |= self.tries(({**self.config, f.name: f.default}, self.calls))
        changed |= self._simplify(self.config["page_size"], partial(self._put, "page_size"))
        while any(self.tries(self._put("size", size)) for size in self._smaller_sizes()):
            changed = True
        return changed

    def _put(self, name: str, value: Any) -> Program:
        return {**self.config, name: value}, self.calls

    def _smaller_sizes(self) -> tuple[int, int]:
        """Half the pages, and one page less."""
        size, page = self.config["size"], self.config["page_size"]
        return size // page // 2 * page, size - page

    def shrink_pool_and_prompt(self) -> bool:
        """A shortage stays one when the pool and a prompt shrink together."""
        size = self.config["size"] - self.config["page_size"]
        for i, (name, args) in enumerate(self.calls):
            for j, value in enumerate(args):
                for simple in simpler_values(value) if isinstance(value, tuple) else ():
                    call = (name, (*args[:j], simple, *args[j + 1 :]))
                    calls = [*self.calls[:i], call, *self.calls[i + 1 :]]
                    if len(simple) < len(value) and self.tries(
                        ({**self.config, "size": size}, calls)
                    ):
                        return True
        return False

    def one_namespace(self) -> bool:
        """All names in all calls left out at once: what shares a prefix still does."""
        calls = [
            (name, tuple(None if isinstance(v, str) else v for v in args))
            for name, args in self.calls
        ]
        return calls != self.calls and self.tries((self.config, calls))

    def simplify_calls(self) -> bool:
        changed = False
        i = 0
        while i < len(self.calls):
            for j, default in enumerate(self._defaults(self.calls[i][0])):
                if i >= len(self.calls) or j >= len(self.calls[i][1]):
                    break
                value, put = self.calls[i][1][j], self._put_argument(i, j)
                if value != default:
                    known = default is not Parameter.empty
                    changed |= (known and self.tries(put(default))) or self._simplify(value, put)
            i += 1
        return changed

    def _defaults(self, name: str) -> list[Any]:
        method = getattr(type(self.driver), name)
        return [p.default for p in signature(method).parameters.values()][1:]

    def _put_argument(self, i: int, j: int) -> Callable[[Any], Program]:
        """From a value to the program with that value as argument ``j`` of call ``i``."""

        def put(value: Any) -> Program:
            calls = list(self.calls)
            name, args = calls[i]
            calls[i] = (name, (*args[:j], value, *args[j + 1 :]))
            return self.config, calls

        return put

    def _simplify(self, value: Any, put: Callable[[Any], Program]) -> bool:
        """Replace a value by simpler ones for as long as one does."""
        changed = False
        while (simpler := self._first(value, put)) is not None:
            value, changed = simpler[0], True
        return changed

    def _first(self, value: Any, put: Callable[[Any], Program]) -> tuple[Any] | None:
        for candidate in simpler_values(value):
            if self.tries(put(candidate)):
                return (candidate,)
        return None


def simpler_values(value: Any) -> Iterator[Any]:
    """Values that are simpler than this one, simplest first.

    >>> list(simpler_values((2, 1)))
    [(), (1,), (2,), (0, 1), (1, 1), (2, 0)]
    >>> list(simpler_values("a")), list(simpler_values(None))
    ([None], [])
    """
    if isinstance(value, bool):
        yield from [False] * value
    elif isinstance(value, int):
        yield from sorted({0, value // 2, value - 1} - {value}) if value > 0 else ()
    elif hasattr(value, "simpler"):
        yield from value.simpler()
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            now = getattr(value, f.name)
            if now == f.default:
                continue  # nothing is simpler: it is not printed
            if f.default is not MISSING:
                yield from _changed(value, f.name, f.default)
            for simple in simpler_values(now):
                yield from _changed(value, f.name, simple)
    elif isinstance(value, str):
        yield None
    elif isinstance(value, tuple):
        if len(value) > 1:
            yield ()
        for i in range(len(value)):
            yield value[:i] + value[i + 1 :]
        for i, item in enumerate(value):
            for simple in simpler_values(item):
                yield (*value[:i], simple, *value[i + 1 :])


def _changed(case: Any, name: str, value: Any) -> Iterator[Any]:
    """The case with another value of one field, if that is a valid case."""
    try:
        yield replace(case, **{name: value})
    except (TypeError, ValueError):
        return
