"""Bugs planted in what only streams and events order: who waits for a load."""

from collections.abc import Callable
from typing import Any

from refcache.oracle.planted.bug import PlantedBug

Function = Callable[..., Any]


def _all_but_the_last(original: Function) -> Function:
    def wait_all(self: Any) -> None:
        if self.num_layers > 1:
            self.events[self.producer_index].wait(self.num_layers - 2)

    return wait_all


def _no_consumer(original: Function) -> Function:
    return lambda self, consumer_index: original(self, -1)


BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "decode-does-not-wait",
        "tokenspeed#370",
        "a decode right after a load, which has no waits by layer, does not wait for all of it",
        "refcache.controller.layer_events:LayerDoneCounter.wait_all",
        _all_but_the_last,
        "hicache.streams",
    ),
    PlantedBug(
        "batch-loses-its-load",
        "slip",
        "a batch is run without the number of the load that it reads",
        "refcache.engine.tp_worker:TpModelWorker.set_hicache_consumer",
        _no_consumer,
        "hicache.streams",
    ),
)
