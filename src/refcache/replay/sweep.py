"""Sweeps: one trace replayed over a grid of sizes and policies, as rows and as a figure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from refcache.errors import InvalidArgument, UnknownName
from refcache.replay.config import ReplayConfig, ReplayResult

AXES = {
    "device-tokens": "device_tokens",
    "page-size": "page_size",
    "policy": "policy",
    "host-ratio": "host_ratio",
    "write-policy": "write_policy",
    "target": "target",
}
"""What can be swept: the option's name, and the field of ``ReplayConfig``."""

SUFFIXES = {"K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True)
class Point:
    """One replay of a sweep.

    Attributes:
        config: what was replayed.
        result: what came out, or None after a violation.
        violation: the rule and evidence, or None.
        optimal: hit tokens of the optimal cache of the device's size, or None if not computed.
    """

    config: ReplayConfig
    result: ReplayResult | None
    violation: str | None
    optimal: int | None


def grid(base: ReplayConfig, axes: Sequence[str]) -> list[ReplayConfig]:
    """Every combination of ``axes``, each ``NAME=VALUE,VALUE,...``; the first varies slowest.

    Raises:
        InvalidArgument: an axis or a value that is none; UnknownName: no such axis or policy.
    """
    values: dict[str, list[Any]] = {}
    for axis in axes:
        name, sign, texts = axis.partition("=")
        if name not in AXES:
            raise UnknownName("axis", name, AXES)
        if not sign or not all(texts.split(",")):
            raise InvalidArgument(f"--sweep {axis}: expected {name}=VALUE,VALUE,...")
        if AXES[name] in values:
            raise InvalidArgument(f"--sweep {axis}: {name} is swept twice")
        values[AXES[name]] = [_value(axis, name, text) for text in texts.split(",")]
    return [
        replace(base, **dict(zip(values, chosen, strict=True)))
        for chosen in product(*values.values())
    ]


def _value(axis: str, name: str, text: str) -> Any:
    if name in ("policy", "write-policy"):
        return text
    if name == "target":
        return None if text == "refcache" else text
    if name == "device-tokens" and text == "unlimited":
        return None
    factor = SUFFIXES.get(text[-1:].upper(), 1)
    try:
        number = float(text[:-1] if factor > 1 else text) * factor
        if name == "host-ratio":
            return number
        if number != int(number) or not 1 <= number < 2**31:
            raise ValueError
    except (ValueError, OverflowError):
        raise InvalidArgument(f"--sweep {axis}: got {text!r}: expected a whole number") from None
    return int(number)


def rows(points: Sequence[Point]) -> list[Mapping[str, Any]]:
    """The points as data: the swept fields, hits, bounds and the verdict."""
    return [
        {
            **{name: getattr(point.config, field) for name, field in AXES.items()},
            "verdict": "ok" if point.violation is None else "violation",
            "violation": point.violation,
            "hit_rate": hit_rate(point),
            "optimal_hit_rate": _share(point, point.optimal),
            "result": None if point.result is None else asdict(point.result),
        }
        for point in points
    ]


def hit_rate(point: Point) -> float | None:
    """Hit tokens of all prompt tokens, 0 to 1."""
    return _share(point, None if point.result is None else point.result.hit_tokens)


def _share(point: Point, tokens: int | None) -> float | None:
    if tokens is None or point.result is None:
        return None
    return tokens / max(1, point.result.prompt_tokens)


def _told(config: ReplayConfig, field: str) -> str:
    value = getattr(config, field)
    return "refcache" if field == "target" and value is None else str(value)


def check_figure(path: str | Path) -> None:
    """Refuses a figure's name before the work.

    Raises:
        InvalidArgument: an ending other than .svg and .png, a folder, or no folder to write in.
    """
    if Path(path).suffix not in (".svg", ".png"):
        raise InvalidArgument(f"--plot {path}: expected a name that ends in .svg or .png")
    if Path(path).is_dir() or not Path(path).parent.is_dir():
        raise InvalidArgument(f"--plot {path}: cannot be written: expected a file in a folder")


def plot(points: Sequence[Point], unlimited: float | None, path: str | Path) -> None:
    """Hit rate against the size of the device, a curve for each combination of what else varies.

    Args:
        unlimited: the hit rate of a cache without a bound, drawn as a line.
        path: ends in .svg or .png.

    Raises:
        InvalidArgument: a name that :func:`check_figure` refuses, no point with a bound, or
            matplotlib is not installed.
    """
    check_figure(path)
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidArgument("--plot: expected matplotlib (pip install refcache[bench])") from None
    matplotlib.rcParams["svg.hashsalt"] = "refcache"
    curves: dict[str, list[tuple[int, float]]] = {}
    best: dict[int, float] = {}
    varied = [
        field
        for field in AXES.values()
        if field != "device_tokens" and len({getattr(p.config, field) for p in points}) > 1
    ]
    for point in points:
        rate, size = hit_rate(point), point.config.device_tokens
        if rate is None or size is None:
            continue
        label = ", ".join(_told(point.config, field) for field in varied) or "refcache"
        curves.setdefault(label, []).append((size, rate))
        optimal = _share(point, point.optimal)
        if optimal is not None and point.config.host_ratio is None:
            best[size] = max(optimal, best.get(size, 0.0))
    if not curves:
        raise InvalidArgument("--plot: expected a replay with a bound on the device")
    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    for label, curve in curves.items():
        sizes, rates = zip(*sorted(curve), strict=True)
        axes.plot(sizes, [100 * rate for rate in rates], marker="o", label=label)
    if best:
        sizes = tuple(sorted(best))
        optimum = [100 * best[size] for size in sizes]
        axes.plot(sizes, optimum, "k--", label="optimal (future known)")
    if unlimited is not None:
        axes.axhline(100 * unlimited, color="gray", linestyle=":", label="no bound on the device")
    axes.set_xscale("log")
    axes.set_xlabel("device tokens")
    axes.set_ylabel("prompt tokens found, %")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix == ".svg" else None)
