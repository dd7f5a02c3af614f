"""What a replay did over time: a row a step, as a figure and as a file that Perfetto opens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from refcache.engine.scheduling.scheduler import Scheduler
from refcache.errors import InvalidArgument
from refcache.oracle.view.scheduler import private_tokens
from refcache.replay.parts import Counts

POINTS = 2000  # of a curve: more are not seen


class Step(NamedTuple):
    """One step of the loop; sums are of the whole replay so far, the rest is in tokens.

    Attributes:
        time: when it ended: seconds of the trace, or without arrivals the number of the step.
        kind: "prefill" or "decode"; ``requests``: of the batch; ``computed``: in its prefills.
        requests_own, protected, evictable, free: who has the device; ``protected`` and
            ``evictable`` are the tree's. ``host``: tokens that the host tier holds.
        finished: requests that have ended; ``hits`` and ``prompts``: prompt tokens of those, found
            and in all.
    """

    time: float
    kind: str
    requests: int
    computed: int
    requests_own: int
    protected: int
    evictable: int
    free: int
    host: int
    finished: int
    hits: int
    prompts: int


def step_of(scheduler: Scheduler, counts: Counts, time: float) -> Step | None:
    """The step that has just been made; None where it launched nothing."""
    if counts.batch is None:
        return None
    kind, requests, computed = counts.batch
    tree = scheduler.tree_cache
    host = getattr(tree, "token_to_kv_pool_host", None)
    return Step(
        time=time,
        kind=kind,
        requests=requests,
        computed=computed,
        requests_own=private_tokens(scheduler),
        protected=tree.protected_size(),
        evictable=tree.evictable_size(),
        free=scheduler.token_to_kv_pool_allocator.available_size(),
        host=0 if host is None else host.size - host.available_size(),
        finished=counts.finished,
        hits=counts.hits,
        prompts=counts.prompts,
    )


def trace_events(steps: Sequence[Step], timed: bool) -> list[dict[str, Any]]:
    """Trace events: a slice a step on the track of its kind, and counters.

    Args:
        timed: times are seconds; else a step is a millisecond.
    """
    tracks = {"prefill": 1, "decode": 2}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
        for name, number in tracks.items()
    ]
    before = 0.0
    for number, step in enumerate(steps):
        end = step.time * (1e6 if timed else 1e3)
        about = {"step": number, "requests": step.requests, "computed": step.computed}
        begin = before if not timed else max(before, end - 1e6)
        events.append({
            "ph": "X", "name": f"{step.kind} of {step.requests}", "pid": 1,
            "tid": tracks[step.kind], "ts": begin, "dur": max(end - begin, 1), "args": about,
        })  # fmt: skip
        held = {
            "requests": step.requests_own, "protected": step.protected,
            "evictable": step.evictable, "free": step.free,
        }  # fmt: skip
        for name, values in (("device tokens", held), ("host tokens", {"held": step.host})):
            events.append({"ph": "C", "name": name, "pid": 1, "ts": end, "args": values})
        before = end
    return events


def plot(steps: Sequence[Step], path: str | Path, timed: bool) -> None:
    """Who has the device, and how much is found, over time.

    Raises:
        InvalidArgument: matplotlib is not installed, or nothing was served.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument("--plot: expected matplotlib (pip install refcache[bench])") from None
    if not steps:
        raise InvalidArgument("--plot: expected a trace with a request")
    matplotlib.rcParams["svg.hashsalt"] = "refcache"
    shown = steps[:: max(1, len(steps) // POINTS)]
    times = [step.time for step in shown]
    figure = Figure(figsize=(8, 6))
    above, below = figure.subplots(2, 1, sharex=True)
    names = {
        "requests_own": "requests' own", "protected": "cached, locked",
        "evictable": "cached, evictable", "free": "free",
    }  # fmt: skip
    colours = ("#f2b84b", "#245a8d", "#9ec5e8", "#eef0f3")
    stacks = [[getattr(step, name) / 1e6 for step in shown] for name in names]
    above.stackplot(times, stacks, labels=list(names.values()), colors=colours)
    if any(step.host for step in shown):
        held = [step.host / 1e6 for step in shown]
        above.plot(times, held, "k--", linewidth=1, label="on the host")
    above.set_ylabel("million tokens")
    above.legend(loc="lower right", fontsize=8)
    below.plot(
        times, [_percent(step.hits, step.prompts) for step in shown], label="since the start"
    )
    below.plot(times, list(_recent(shown)), linewidth=0.8, label="of the last tenth")
    below.set_ylabel("prompt tokens found, %")
    below.set_xlabel("seconds of the trace" if timed else "steps")
    below.set_ylim(bottom=0)
    below.legend(fontsize=8)
    below.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


def _recent(steps: Sequence[Step]) -> list[float]:
    """At each step, what the requests that ended in a tenth of the steps before it found."""
    span = max(1, len(steps) // 10)
    rates = []
    for index, step in enumerate(steps):
        first = steps[max(0, index - span)]
        rates.append(_percent(step.hits - first.hits, step.prompts - first.prompts))
    return rates
