"""Drives the ranks of a tensor-parallel group, each as :class:`HiCacheDriver` drives one cache.

Every rank gets the same calls. What differs is when its copies finish: a rank's machine runs each
launch at once, or leaves it until the program makes it run (``work`` advances one rank alone).
After each step all ranks must have given the same answers and hold the same prefixes on the same
tiers; during it they must have made the same collective calls in the same order
(:mod:`refcache.oracle.drivers.ranks.group`).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.oracle.drivers.hicache.driver import HiCacheDriver
from refcache.oracle.drivers.ranks.group import RankGroup
from refcache.oracle.program.driver import Driver, step
from refcache.oracle.program.trial import Trial
from refcache.oracle.target.config import HiCacheConfig


@dataclass(frozen=True)
class RanksConfig(HiCacheConfig):
    """``delays``: for each rank whether its launches wait (as ``delay``, which is not used)."""

    delays: tuple[bool, ...] = (True, True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delays:
            raise InvalidArgument("delays=(): expected one entry a rank, at least one")


class Rank:
    """One rank. ``answers``: what every call on the cache gave since they were compared, without
    slots."""

    def __init__(self, driver: HiCacheDriver) -> None:
        self.driver = driver
        self.answers: list[tuple[str, Any]] = []
        driver.trial.answered = lambda name, result: self.answers.append((name, answer(result)))

    def decisions(self) -> dict[str, Any]:
        """Everything that a rank has decided and that the other ranks rely on, by name."""
        bench = self.driver.bench
        found: dict[str, Any] = {}
        view = bench.target.inspect(bench.tree)
        for index, names in view.pages(bench.page_size):
            node = view.nodes[index]
            tiers = (node.device is not None, node.host is not None)
            found.update({f"on the device and on the host, page {page}": tiers for page in names})
        for req in bench.requests:
            found[req.rid] = (req.cache_protected_len, req.computed, req.allocated)
        found["copies in flight"] = [(t.kind, len(t.handles)) for t in bench.host().transfers]
        for number, (name, given) in enumerate(self.answers):
            found[f"call {number} of the step, {name}"] = given
        self.answers.clear()
        return found


def answer(result: Any) -> Any:
    """What a call decided: numbers as they are, of slots how many."""
    if isinstance(result, int | None):
        return result
    if isinstance(result, torch.Tensor):
        return len(result)
    if isinstance(result, tuple):
        return tuple(answer(part) for part in result)
    return getattr(result, "num_tokens_evicted", type(result).__name__)


class RanksBench:
    """The ranks, and what they must agree on.

    Attributes:
        group: where the ranks meet; ``ranks``: in order.
    """

    subject = None

    def __init__(self, trial: Trial, config: RanksConfig) -> None:
        self.trial = trial
        c = {f.name: getattr(config, f.name) for f in fields(HiCacheConfig)}
        self.group = RankGroup(len(config.delays))

        def rank(number: int, delay: bool) -> Callable[[], Rank]:
            more = {"delay": delay, "tp_group": self.group.member(number)}
            return lambda: Rank(HiCacheDriver(trial.target, **c | more))

        self.ranks = self.group.together([rank(i, d) for i, d in enumerate(config.delays)])
        self.check()

    def check(self) -> None:
        """Z2: every rank has decided the same."""
        first, *others = [rank.decisions() for rank in self.ranks]
        for number, decisions in enumerate(others, start=1):
            for name in (*first, *decisions):
                mine, theirs = first.get(name), decisions.get(name)
                self.trial.require(
                    mine == theirs, "Z2", f"{name}: {mine} on rank 0, {theirs} on rank {number}"
                )

    def choices(self) -> dict[str, Any]:
        """None: ranks are compared with each other."""
        return {}

    def describe(self) -> str:
        """The state of each rank."""
        return "\n".join(f"rank {i}:\n{r.driver.describe()}" for i, r in enumerate(self.ranks))


def _on_every_rank(name: str) -> Callable[..., None]:
    """The step of that name, made by every rank at the same time."""

    @functools.wraps(getattr(HiCacheDriver, name))
    def call(self: "RanksDriver", *args: Any, **kwargs: Any) -> None:
        steps = [getattr(rank, name) for rank in self.ranks]
        self.bench.group.together([functools.partial(one, *args, **kwargs) for one in steps])

    return step(call)


class RanksDriver(Driver):
    """See the module docstring."""

    needs = HiCacheDriver.needs | {"ranks"}
    Config = RanksConfig
    config: RanksConfig
    bench_type = RanksBench
    bench: RanksBench

    @property
    def ranks(self) -> list[HiCacheDriver]:
        """The driver of each rank."""
        return [rank.driver for rank in self.bench.ranks]

    @property
    def requests(self) -> list[Any]:
        return self.ranks[0].requests

    @property
    def holds(self) -> list[Any]:
        return self.ranks[0].holds

    admit = _on_every_rank("admit")
    proceed = _on_every_rank("proceed")
    cache = _on_every_rank("cache")
    decode = _on_every_rank("decode")
    finish = _on_every_rank("finish")
    abort = _on_every_rank("abort")
    retract = _on_every_rank("retract")
    match = _on_every_rank("match")
    insert = _on_every_rank("insert")
    evict = _on_every_rank("evict")
    hold = _on_every_rank("hold")
    unhold = _on_every_rank("unhold")
    reset = _on_every_rank("reset")
    load_back = _on_every_rank("load_back")
    readmit = _on_every_rank("readmit")
    fill = _on_every_rank("fill")
    reload = _on_every_rank("reload")
    start_loads = _on_every_rank("start_loads")
    poll = _on_every_rank("poll")
    settle = _on_every_rank("settle")
    wind_down = _on_every_rank("wind_down")

    @step
    def work(self, rank: int, choices: Sequence[int]) -> None:
        """The machine of one rank runs a few launches; the others do not."""
        one = self.bench.ranks[rank % len(self.ranks)]
        one.driver.work(choices)
        one.answers.clear()  # its own checks afterwards: the others were not asked
