"""The sweeps of ``refcache replay``: replays of one trace side by side, as rows and a figure."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from refcache.cli.workers import in_order
from refcache.readers import RequestTrace
from refcache.replay.config import ReplayConfig


class Replayed(NamedTuple):
    """One replay, in a process of its own."""

    trace: RequestTrace
    config: ReplayConfig

    def __str__(self) -> str:
        return f"{_cache(self.config)}, {self.config.device_tokens} tokens"

    @property
    def trusted(self) -> bool:
        return ":" not in self.config.policy and self.config.target is None

    def died(self) -> Any:
        from refcache.replay.sweep import Point

        return Point(self.config, None, "crash: the process ended", None)

    def work(self) -> Any:
        from refcache.oracle import Violation
        from refcache.replay.bounds import optimal_hits
        from refcache.replay.loop import replay
        from refcache.replay.sweep import Point

        requests, config = self.trace.requests, self.config
        try:
            result = replay(requests, config)
        except Violation as violation:
            told = f"{violation.id}: {violation.evidence} ({violation.call})"
            return Point(config, None, told, None)
        optimal = optimal_hits(requests, config.page_size, config.device_tokens)
        return Point(config, result, None, optimal)


def sweep(
    trace: RequestTrace, configs: Sequence[ReplayConfig], plot_to: Path | None, as_json: bool
) -> int:
    """Replay ``trace`` as each of ``configs`` says; print a row each, draw the figure.

    Returns:
        The exit code: 1 if a replay broke a rule.
    """
    from refcache.replay.bounds import optimal_hits
    from refcache.replay.sweep import plot, rows

    points = []
    if not as_json:
        print("cache          device tokens  page  host    hits  optimal")
    for point in in_order([Replayed(trace, config) for config in configs]):
        points.append(point)
        if not as_json:
            print(_line(point, rows([point])[0]), flush=True)
    total = sum(request.input_length for request in trace.requests)
    free = optimal_hits(trace.requests, min(c.page_size for c in configs), None)
    unlimited = None if free is None else free / max(1, total)
    if as_json:
        told = {"format": trace.format, "block_size": trace.block_size, "notes": trace.notes}
        answer = {"points": rows(points), "unlimited_hit_rate": unlimited, "trace": told}
        print(json.dumps(answer, indent=2))
    elif unlimited is not None:
        print(f"no bound on the device: {100 * unlimited:.2f} %")
    if plot_to is not None:
        plot(points, unlimited, plot_to)
        if not as_json:
            print(plot_to)
    return int(any(point.violation is not None for point in points))


def _cache(config: ReplayConfig) -> str:
    return config.policy if config.target is None else config.target


def _line(point: Any, row: Any) -> str:
    config = point.config
    size = "unlimited" if config.device_tokens is None else f"{config.device_tokens:,}"
    host = "-" if config.host_ratio is None else f"{config.host_ratio:g}"
    head = f"{_cache(config):<14} {size:>13} {config.page_size:>5} {host:>5}"
    if point.violation is not None:
        return f"{head}  {point.violation}"
    optimal = row["optimal_hit_rate"]
    best = "-" if optimal is None else f"{100 * optimal:.2f} %"
    return f"{head} {100 * row['hit_rate']:5.2f} % {best:>8}"
