"""What every Hypothesis state machine has: thin rules over one of the oracle's drivers.

A rule draws arguments and makes one call on a driver; the driver checks. Each machine class is made
for one target by :func:`machine_for`.
"""

from typing import Any, ClassVar

from hypothesis import reject
from hypothesis.stateful import RuleBasedStateMachine

from refcache.oracle import Driver, Target
from refcache.oracle.program.driver import Call
from refcache.oracle.program.trial import NotOffered


class Tally:
    """Counts what a run of a machine did, and keeps the driver that failed last.

    Attributes:
        faults: how often a call was made with an inner step raising; ``pairs``: which steps of
            which calls.
        not_offered: why the target could not be built with the last configuration that it refused.
    """

    def __init__(self) -> None:
        self.cases = 0
        self.steps = 0
        self.faults = 0
        self.pairs: set[tuple[str, str, int]] = set()
        self.failed: Driver | None = None
        self.not_offered = ""


class DriverMachine(RuleBasedStateMachine):
    """Base: owns a driver, winds it down at the end of a case, tells the tally."""

    target: ClassVar[Target]
    tally: ClassVar[Tally]
    make: ClassVar[type[Any]]
    """The driver whose steps the rules make."""
    d: Any
    driver: Driver | None = None
    profile: ClassVar[str | None] = None
    """Whose choices the target is held to."""
    opening: ClassVar[tuple[Call, ...]] = ()
    """A fixed program, with the default configuration, run once before the drawn ones."""
    steps: ClassVar[int] = 50
    """Of a case, at most."""

    def begin(self, **config: Any) -> None:
        """Make the driver of a case; none where the target does not offer the configuration."""
        try:
            self.d = self.driver = self.make(self.target, **config)
        except NotOffered as error:
            self.tally.not_offered = str(error)
            reject()
        self.tally.cases += 1

    def teardown(self) -> None:
        driver = self.driver
        if driver is None:
            return
        try:
            if driver.found is None:
                driver.wind_down()
        finally:
            self.tally.steps += driver.calls
            if driver.found is not None:
                self.tally.failed = driver


def machine_for(
    machine: type[DriverMachine], target: Target, tally: Tally | None = None, **attributes: Any
) -> type[DriverMachine]:
    """The machine class on one target; its runs are counted in ``tally``."""
    attributes |= {"target": target, "tally": tally or Tally()}
    return type(machine.__name__, (machine,), attributes)
