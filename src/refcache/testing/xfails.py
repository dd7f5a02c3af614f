"""Violations that are known and expected: the file of ``--xfails``.

One id a line: a suite (``tree.misuse``: whatever rule breaks), or a suite and a rule
(``tree.state:P1``: only that rule; another one is still a violation). ``#`` starts a comment, also
behind an id; blank lines are skipped.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from refcache.errors import InvalidArgument

if TYPE_CHECKING:
    from refcache.testing.run import SuiteResult

ID = re.compile(r"[a-z_]+\.[a-z_]+(:\w+)?")


@dataclass(frozen=True)
class Xfails:
    """The ids of a file, in its order."""

    ids: tuple[str, ...] = ()

    def of(self, suite: str) -> tuple[str, ...]:
        """The ids that speak of this suite."""
        return tuple(i for i in self.ids if i.partition(":")[0] == suite)

    def apply(self, result: "SuiteResult") -> "SuiteResult":
        """The row with its verdict as expected: *xfail* for a violation that an id covers, *xpass*
        for ok where an id says that the suite fails; any other row as it is.
        """
        ids = self.of(result.suite)
        if ids and result.verdict == "ok":
            return replace(result, verdict="xpass", reason=f"{', '.join(ids)} expected to fail")
        if result.failure is not None:
            covering = {result.suite, f"{result.suite}:{result.failure.rule}"} & {*ids}
            if covering:
                reason = f"{result.failure.rule}, expected by {min(covering)}"
                return replace(result, verdict="xfail", reason=reason)
        return result

    def unmatched(self, suites: Iterable[str]) -> list[str]:
        """The ids that speak of none of ``suites``, or of a rule that does not exist."""
        from refcache.oracle import SENTENCES

        suites = {*suites}
        parts = [(i, *i.partition(":")[::2]) for i in self.ids]
        return [
            i for i, suite, rule in parts if suite not in suites or rule not in {"", *SENTENCES}
        ]


def read_xfails(path: str | Path) -> Xfails:
    """Read a file of expected failures.

    Raises:
        InvalidArgument: it cannot be read, is not UTF-8, or a line is no id; names file and line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InvalidArgument(f"xfails {path}: cannot be read: {reason}") from None
    ids = []
    for number, line in enumerate(text.splitlines(), 1):
        found = line.partition("#")[0].strip()
        if found and not ID.fullmatch(found):
            raise InvalidArgument(
                f"xfails {path}:{number}: {found[:60]!r}: expected a suite such as tree.misuse, or "
                "a suite and a rule such as tree.state:P1"
            )
        if found:
            ids.append(found)
    return Xfails(tuple(dict.fromkeys(ids)))
