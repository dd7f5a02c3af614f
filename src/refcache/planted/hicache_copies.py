"""Bugs planted below the tree over two tiers: the controller, the host pool, the copies."""

from collections.abc import Callable
from functools import partial
from typing import Any

from refcache.planted.bug import PlantedBug

CONTROLLER = "refcache.controller.hicache_controller:HiCacheController"
COPIES = "refcache.pool.host_copies:HostCopies"
SLOTS = "refcache.pool.host_slots:HostSlots"
Function = Callable[..., Any]
_bug = partial(PlantedBug, suite="hicache.state")


def _no_fence(original: Function) -> Function:
    return lambda self, stream: None if stream is self.load_stream else original(self, stream)


def _write_not_fenced(original: Function) -> Function:
    return lambda self, stream: None if stream is self.write_stream else original(self, stream)


def _start_not_awaited(original: Function) -> Function:
    def start_writing(self: Any) -> None:
        start = self.write_stream.wait_event
        self.write_stream.wait_event = lambda event: None
        try:
            original(self)
        finally:
            self.write_stream.wait_event = start

    return start_writing


def _last_layer_skipped(original: Function) -> Function:
    def _copy_function(self: Any, name: str, *how: Any) -> Function:
        copy: Function = original(self, name, *how)

        def load_per_layer(*arguments: Any) -> None:
            if arguments[4] < self.layer_num - 1:  # layer_id
                copy(*arguments)

        return load_per_layer if name == "load_per_layer" else copy

    return _copy_function


def _launch_missing(original: Function) -> Function:
    def load_to_device_per_layer(
        self: Any, pool: Any, host: Any, device: Any, layer_id: int, *how: Any
    ) -> None:
        if how[0] != "kernel" or layer_id < self.layer_num - 1:
            original(self, pool, host, device, layer_id, *how)

    return load_to_device_per_layer


def _side_reversed(original: Function) -> Function:
    def merge_ops(ops: Any) -> Any:
        merged = original(ops)
        if len(ops) > 1:
            merged.device_indices = merged.device_indices.flip(0)
        return merged

    return merge_ops


def _first_plane_only(original: Function) -> Function:
    def backup_all_layer(host: Any, device: Any, *rest: Any) -> None:
        planes = len(host)
        original(host[:1], device[: len(device) // planes], *rest)

    return backup_all_layer


def _last_page_lost(original: Function) -> Function:
    def backup_all_layer(
        host: Any, device: Any, host_slots: Any, device_slots: Any, size: int, layout: str
    ) -> None:
        keep = len(host_slots) - size if len(host_slots) > 2 * size else len(host_slots)
        original(host, device, host_slots[:keep], device_slots[:keep], size, layout)

    return backup_all_layer


def _copies_left(original: Function) -> Function:
    return lambda self: None


def _page_not_freed(original: Function) -> Function:
    def evict_host(self: Any, host_indices: Any, backup_only: bool = True) -> int:
        keep = self.page_size if len(host_indices) > self.page_size else 0
        original(self, host_indices[: len(host_indices) - keep], backup_only)
        return len(host_indices)

    return evict_host


def _page_handed_out_again(original: Function) -> Function:
    import torch

    def alloc(self: Any, need_size: int) -> Any:
        slots = original(self, need_size)
        if slots is not None and need_size > self.page_size:
            self.free_slots = torch.cat([self.free_slots, slots[-self.page_size :]])
        return slots

    return alloc


def _page_freed_twice(original: Function) -> Function:
    import torch

    def free(self: Any, indices: Any) -> int:
        count = int(original(self, indices))
        if count > self.page_size:
            self.free_slots = torch.cat([self.free_slots, indices[-self.page_size :]])
        return count

    return free


def _middle_lost(original: Function) -> Function:
    def merge_ops(ops: Any) -> Any:
        merged = original(ops)
        if len(ops) == 3:
            kept = original([ops[0], ops[2]])
            merged.host_indices, merged.device_indices = kept.host_indices, kept.device_indices
        return merged

    return merge_ops


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "load-not-fenced",
        "sglang#36738",
        "a load does not wait for the forward that may still write its device slots",
        f"{CONTROLLER}._wait_for_forward",
        _no_fence,
    ),
    _bug(
        "write-not-fenced",
        "slip",
        "a write does not wait for the forward that still computes the rows it copies",
        f"{CONTROLLER}._wait_for_forward",
        _write_not_fenced,
        suite="hicache.streams",
    ),
    _bug(
        "write-start-not-awaited",
        "sglang#20611",
        "a write does not wait for what its caller's stream was doing",
        f"{CONTROLLER}.start_writing",
        _start_not_awaited,
    ),
    _bug(
        "getters-do-not-wait",
        "sglang#22811",
        "reading a layer's buffer does not wait for the load of that layer",
        "refcache.pool.kv_cache:KVCache._wait",
        lambda original: lambda self, layer_id: None,
    ),
    _bug(
        "last-layer-not-loaded",
        "sglang#37870, #31745",
        "the last layer's event fires, its rows are not copied",
        f"{COPIES}._copy_function",
        _last_layer_skipped,
    ),
    _bug(
        "last-layer-not-launched",
        "slip",
        "of a load with one kernel a layer, the last layer's is not launched",
        f"{COPIES}.load_to_device_per_layer",
        _launch_missing,
    ),
    _bug(
        "merge-reverses-a-side",
        "sglang#28544",
        "merging two loads reverses the device slots",
        "refcache.controller.operation:CacheOperation.merge_ops",
        _side_reversed,
    ),
    _bug(
        "second-plane-not-copied",
        "sglang#17085, #39893",
        "only the first of a pool's planes is backed up",
        "refcache.reference:backup_all_layer",
        _first_plane_only,
    ),
    _bug(
        "last-page-not-copied",
        "sglang#30736",
        "a backup of three pages and more leaves out the last",
        "refcache.reference:backup_all_layer",
        _last_page_lost,
    ),
    _bug(
        "reset-leaves-copies",
        "sglang#26009",
        "reset does not wait for running copies",
        f"{CONTROLLER}.wait_for_copies",
        _copies_left,
    ),
    _bug(
        "host-page-leaked",
        "sglang#9601, #15439",
        "evicting several host pages frees all but the last",
        f"{CONTROLLER}.evict_host",
        _page_not_freed,
    ),
    _bug(
        "host-page-owned-twice",
        "sglang#13483, #29310",
        "a host page stays in the free list after it was handed out",
        f"{SLOTS}.alloc",
        _page_handed_out_again,
    ),
    _bug(
        "host-page-freed-twice",
        "sglang#13483, #13501, #27010",
        "freeing several host pages puts the last into the free list twice",
        f"{SLOTS}.free",
        _page_freed_twice,
    ),
    _bug(
        "merge-loses-the-middle",
        "slip",
        "of three loads that are merged, the second is not copied",
        "refcache.controller.operation:CacheOperation.merge_ops",
        _middle_lost,
    ),
)
