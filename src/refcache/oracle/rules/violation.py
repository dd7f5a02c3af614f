"""What a check reports: one broken rule, with its evidence.

The message has one shape: the rule's id and what was seen (where, and what it should have been),
the rule as a sentence, and the call after which it was seen.

:func:`without_rules` switches rules off, to see what the others would have caught.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from refcache.oracle.rules.catalog import sentence


class Violation(AssertionError):
    """A rule of :mod:`refcache.oracle.rules.catalog` does not hold.

    Attributes:
        id: of the rule, such as ``"P1"``; ``"crash"`` for an exception on a legal call.
        evidence: what was seen, where, and what was expected.
        call: the call after which it was seen, as code; empty until a driver adds it.
        steps: the program that leads here, as lines of code; empty until a driver adds it.
    """

    def __init__(self, rule: str, evidence: str) -> None:
        self.id = rule
        self.evidence = evidence
        self.call = ""
        self.steps: tuple[str, ...] = ()
        super().__init__(rule, evidence)

    @property
    def sentence(self) -> str:
        return sentence(self.id)

    def __str__(self) -> str:
        where = f"\n  after {self.call}" if self.call else ""
        return f"{self.id}: {self.evidence}\n  rule: {self.sentence}{where}"


_OFF: list[str] = []


@contextmanager
def without_rules(*rules: str) -> Iterator[None]:
    """In the block these rules are not checked. Where one is part of a call, and what follows from
    the call makes no sense, the driver stops for good instead of reporting.
    """
    _OFF.extend(rules)
    try:
        yield
    finally:
        del _OFF[len(_OFF) - len(rules) :]


def switched_off(rule: str | None = None) -> bool:
    """Whether ``rule`` is not checked now; without an argument, whether any is not."""
    return rule in _OFF if rule else bool(_OFF)
