"""Bugs planted in what only streams and events order: who waits for a load."""

from collections.abc import Callable
from typing import Any

from refcache.planted.bug import PlantedBug

Function = Callable[..., Any]


def _all_but_the_last(original: Function) -> Function:
    def wait_all(self: Any) -> None:
        if self.num_layers > 1:
            self.events[self.producer_index].wait(self.num_layers - 2)

    return wait_all


def _no_consumer(original: Function) -> Function:
    return lambda self, consumer_index: original(self, -1)


def _flags_first(original: Function) -> Function:
    def load_to_device_by_copy_engine(self: Any, *how: Any) -> None:
        raise_flag = self.runtime.raise_flag
        for layer_id in range(self.layer_num):
            raise_flag(how[-1], layer_id)
        self.runtime.raise_flag = lambda flags, part: None
        try:
            original(self, *how)
        finally:
            self.runtime.raise_flag = raise_flag

    return load_to_device_by_copy_engine


def _not_promised(original: Function) -> Function:
    return lambda self: self.runtime.Event()


def _nobody_raises(original: Function) -> Function:
    return lambda self, error, flags: original(self, error, None)


def _protects_what_was_there(original: Function) -> Function:
    def _load_back(self: Any, req: Any) -> None:
        before = req.cache_protected_len
        original(self, req)
        if req.retraction_count:
            req.cache_protected_len = before

    return _load_back


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
    PlantedBug(
        "flag-before-the-last-copy",
        "slip",
        "the copy engine's stream raises a layer's flag before the layer's copies",
        "refcache.pool.host_copies:HostCopies.load_to_device_by_copy_engine",
        _flags_first,
        "hicache.streams",
    ),
    PlantedBug(
        "list-of-a-freed-layer",
        "slip",
        "the lists that copies were made of are given back before the copies ran",
        "refcache.controller.copy_thread:CopyThread._keep",
        lambda original: lambda self, *indices: None,
        "hicache.streams",
    ),
    PlantedBug(
        "event-not-recorded-is-done",
        "slip",
        "a copy counts as done before its thread has recorded the event behind it",
        "refcache.controller.copy_thread:CopyThread._promised",
        _not_promised,
        "hicache.streams",
    ),
    PlantedBug(
        "failing-thread-raises-no-flag",
        "slip",
        "a thread that fails leaves the streams that wait for its flags waiting",
        "refcache.controller.copy_thread:CopyThread._fail",
        _nobody_raises,
        "hicache.streams",
    ),
    PlantedBug(
        "failing-thread-is-believed",
        "slip",
        "what was computed of a load that failed is handed out",
        "refcache.engine.scheduling.recovery:failed_copy",
        lambda original: lambda scheduler: None,
        "hicache.streams",
    ),
    PlantedBug(
        "retracted-load-unprotected",
        "slip",
        "a request that was retracted counts what is loaded for it as its own, not the tree's",
        "refcache.engine.scheduling.schedule_policy:PrefillAdder._load_back",
        _protects_what_was_there,
        "hicache.streams",
    ),
)
