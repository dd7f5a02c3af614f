"""Drives what only streams and events order, on the simulated machine: suite ``hicache.streams``.

Two kinds of steps. ``edge`` runs the program of one ordering edge
(:mod:`refcache.oracle.drivers.streams.edges`) in
an order of its own: with every edge in place no order may be reported. ``serve`` runs the overlap
loop over a two-tier tree, copies and forwards in any legal order: no race, every row the right one,
every output the right one.

``without_edge`` takes one edge away everywhere: then its program must be reported, at once and by
its name. That is the control that shows the suite can see it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from refcache.engine import (
    ContentViolation,
    ModelConfig,
    RowCheck,
    SamplingParams,
    Scheduler,
    TokenizedGenerateReqInput,
    WrongContent,
)
from refcache.errors import NeverDone
from refcache.oracle.drivers.streams.edges import edge
from refcache.oracle.program.driver import Driver, step
from refcache.oracle.rules.check import check_sums
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.base import Target
from refcache.oracle.target.config import CacheConfig
from refcache.runtime import DeadIndex, RaceFound, SimulatedRuntime, Tracker, drawn
from refcache.tags import greedy
from refcache.types import ServerArgs

VOCAB = 3
MAX_STEPS = 400


@dataclass(frozen=True)
class StreamsConfig(CacheConfig):
    """``without_edge``: the edge that is taken away, or None."""

    without_edge: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.without_edge is not None:
            edge(self.without_edge)


class StreamsDriver(Driver):
    """See the module docstring. The programs are made of the target's ``streams`` capability."""

    needs = frozenset({"hicache", "streams"})
    Config = StreamsConfig
    config: StreamsConfig

    def __init__(self, target: Target, **config: Any) -> None:
        super().__init__(target, **config)
        self.races = 0

    @step
    def edge(self, name: str, choices: Sequence[int] = ()) -> None:
        """Run the program of an edge in one order."""
        chosen = edge(name)
        removed = self.config.without_edge == name
        machine = self.trial.call(chosen.run, drawn(choices), removed)
        for report in machine.tracker.reports if machine.tracker else ():
            missing = f"edge {name} ({chosen.sentence}): " if removed else ""
            raise Violation("X5", f"{missing}{report}")

    @step
    def every_order(self, name: str) -> None:
        """Run the program of an edge in every order its launches can have."""
        chosen = edge(name)
        removed = self.config.without_edge == name
        for reports in self.trial.call(chosen.orders, removed):
            if reports:
                missing = f"edge {name} ({chosen.sentence}): " if removed else ""
                raise Violation("X5", f"{missing}{reports[0]}")

    @step
    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        choices: Sequence[int] = (),
        write_policy: str = "write_through",
        page_size: int = 1,
        host_pages: int = 1,
        outputs: int = 3,
        retract_at: int = -1,
        size: int = 24,
        io_backend: str = "auto",
        failing_load: int = -1,
        apart: int = 0,
    ) -> None:
        """Serve prompts with the overlap loop over two tiers.

        ``apart``: steps from one request's coming to the next one's; 0: all come at the beginning.
        ``failing_load``: the copy engine fails behind the first layer of that load, counted from 0.
        What has read its rows must be computed again.
        """
        machine = SimulatedRuntime(drawn(choices), Tracker())
        args = ServerArgs(
            page_size=page_size,
            max_total_tokens=size,
            max_running_requests=2,
            context_length=32,
            chunked_prefill_size=4,
            enable_hierarchical_cache=True,
            hicache_ratio=1 + host_pages * page_size / size,
            hicache_write_policy=write_policy,
            hicache_io_backend=io_backend,
        )
        model = ModelConfig(num_hidden_layers=2, vocab_size=VOCAB)
        wrong: list[WrongContent] = []
        check = RowCheck() if failing_load < 0 else RowCheck(on_wrong=wrong.append)
        scheduler = self.trial.call(Scheduler, args, model, runtime=machine, check=check)
        scheduler.tree_cache.load_back_threshold = 1
        if failing_load >= 0:
            silent: Any = scheduler.observer
            silent.on_copy_failed = lambda error: None  # it is asked for, not logged
            _fail(scheduler.tree_cache.token_to_kv_pool_host, failing_load)
        coming = deque(enumerate(prompts))
        for number in range(MAX_STEPS):
            while coming and number >= coming[0][0] * apart:
                i, tokens = coming.popleft()
                sampling = SamplingParams(outputs)
                scheduler.submit(TokenizedGenerateReqInput(f"r{i}", tokens, sampling))
            if scheduler.is_idle() and not coming:
                break
            if number == retract_at:
                scheduler.force_retraction()
            if self._ordered(scheduler.step) is None:
                self._ordered(machine.synchronize)
        self._ordered(machine.synchronize)
        self.trial.require(
            scheduler.is_idle() and not coming,
            "PROGRESS",
            f"requests are left after {MAX_STEPS} steps",
        )
        tree, allocator = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        free, sizes = allocator.available_size(), (tree.evictable_size(), tree.protected_size())
        check_sums(free, *sizes, 0, size)
        for found in wrong:
            [req] = [r for r in scheduler.finished_reqs if r.rid == found.rid]
            self.trial.require(req.retraction_count > 0, "C-READ", f"after a failed load: {found}")
        for req in scheduler.finished_reqs:
            prompt = list(req.origin_input_ids)
            expected = prompt + greedy(prompt, outputs, VOCAB)
            seen = [*prompt, *req.output_ids]
            self.trial.require(
                seen == expected, "C-READ", f"{req.rid} answered {seen}, expected {expected}"
            )

    def _ordered(self, function: Any) -> Any:
        """A call in which a report of the tracker, or a wrong row, is the violation."""

        def call() -> Any:
            try:
                return function()
            except RaceFound as error:
                raise Violation("X5", str(error)) from error
            except DeadIndex as error:
                raise Violation("LIFE", str(error)) from error
            except ContentViolation as error:
                raise Violation("C-READ", str(error)) from error
            except NeverDone as error:
                raise Violation("PROGRESS", str(error)) from error

        return self.trial.call(call)

    def wind_down(self) -> None:
        """Every step ends what it began."""

    def describe(self) -> str:
        return f"edge taken away: {self.config.without_edge}"


def _fail(host: Any, number: int) -> None:
    """Let the copy engine of a host pool fail in load ``number``, behind its first layer."""
    load, raise_flag, loads = host.load_to_device_by_copy_engine, host.runtime.raise_flag, count()

    def load_to_device_by_copy_engine(*args: Any) -> None:
        def refuse(flags: Any, part: int) -> None:
            host.runtime.raise_flag = raise_flag
            raise OSError("the driver refused a copy")

        if next(loads) == number:
            host.runtime.raise_flag = refuse
        load(*args)

    host.load_to_device_by_copy_engine = load_to_device_by_copy_engine
