"""Who decides what the simulated machine runs next: drivers, and all orders of a small program.

A driver answers one integer at each point where the machine may run something; see
:class:`~refcache.runtime.simulated.machine.SimulatedRuntime` for what the integers mean. 0 means
"run everything now", so a list of drawn integers shrinks towards a machine that delays nothing.
"""

from collections.abc import Callable, Iterable, Iterator

from refcache.errors import InvalidArgument
from refcache.runtime.simulated.machine import Driver, SimulatedRuntime

MAX_LAUNCHES = 6


def eager(machine: SimulatedRuntime, point: str) -> int:
    """Run everything at once: nothing is ever pending."""
    return 0


def lazy(machine: SimulatedRuntime, point: str) -> int:
    """Run nothing until the host waits for it, and then only that."""
    return 1


def drawn(choices: Iterable[int]) -> Driver:
    """Take the integers one by one; 0 when there are no more."""
    rest = iter(choices)
    return lambda machine, point: next(rest, 0)


def all_orders(
    program: Callable[[SimulatedRuntime], None],
    machine: Callable[[Driver], SimulatedRuntime] = SimulatedRuntime,
) -> Iterator[tuple[str, ...]]:
    """Run ``program`` once for every order in which its launches can run.

    Without a ``query`` these are the linear extensions of its happens-before order, each once; a
    query that finds its work not done is run for both answers.

    Args:
        program: issues at most ``MAX_LAUNCHES`` launches; everything pending is run after it.
        machine: makes the machine, given the driver.

    Yields:
        The names of the launches, in the order they ran, after each run.

    Raises:
        InvalidArgument: the program has more launches.
    """
    path: list[int] = []  # the branch taken at each fork, in depth-first order
    while True:
        widths: list[int] = []

        def choose(current: SimulatedRuntime, point: str, widths: list[int] = widths) -> int:
            if point == "call":
                return 1
            fork = len(widths)
            width = len(current.runnable()) + (point == "query")
            if not width:
                return 1
            widths.append(width)
            if fork == len(path):
                path.append(0)
            # The last branch of a query is the answer "not done yet".
            return 1 if path[fork] == len(current.runnable()) else 2 + path[fork]

        current = machine(choose)
        program(current)
        current.synchronize()
        order = tuple(a.name for a in current.history if a.actor.kind == "stream")
        if len(order) > MAX_LAUNCHES:
            raise InvalidArgument(
                f"{len(order)} launches: expected at most {MAX_LAUNCHES} to run all orders"
            )
        yield order
        while path and path[-1] + 1 == widths[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1
