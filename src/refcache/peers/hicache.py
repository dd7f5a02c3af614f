"""SGLang's two-tier cache on trial: ``HiRadixCache`` and ``HiCacheController`` of a release, on the
simulated machine.

Real: the tree, the controller, its layer counter, both device pools and both host pools. Modelled:
the copy kernels and the device module (:mod:`refcache.peers.standins`), and the forward
pass, which the suites play through :class:`DevicePool`. The storage tier is off.

Host code runs at once, also where the engine's tensors would be on a device; only the copies and
the forwards wait in streams. A copy keeps its index tensors alive.
"""

import atexit
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from refcache.oracle.target.config import HiCacheConfig, HiCacheParts
from refcache.oracle.view.host import HostNodeView, HostView, TransferView
from refcache.oracle.view.tree import TreeView
from refcache.peers import copies, device
from refcache.peers.engine import Engine
from refcache.reference import Layout
from refcache.runtime import Region, Runtime

LAYERS = 2
BACKENDS = {"page_first": "kernel", "page_head": "kernel", "page_first_direct": "direct"}
"""The only I/O backend that the release has for a layout; ``layer_first`` has both."""


class Plane(NamedTuple):
    """``buffer[layer]`` is ``[slots, head_num, head_dim]``."""

    buffer: Any
    head_num: int
    head_dim: int


class DevicePool:
    """A device pool of the release, as forwards see it: every access is a launch.

    Getters are the release's own: they wait for the layer that is being loaded.
    """

    def __init__(self, inner: Any, runtime: Runtime) -> None:
        self.inner, self.runtime = inner, runtime
        self.layer_num = inner.layer_num
        buffers = [inner.kv_buffer] if hasattr(inner, "kv_buffer") else [
            inner.k_buffer, inner.v_buffer
        ]  # fmt: skip
        self.planes = tuple(Plane(b, b[0].shape[1], b[0].shape[2]) for b in buffers)
        copies.register(self, [plane.buffer for plane in self.planes])

    def region(self, plane: int, layer_id: int, slots: Any) -> Region:
        return Region(self, plane, layer_id, slots)

    def set_kv_buffer(self, layer_id: int, loc: torch.Tensor, *rows: torch.Tensor) -> None:
        """Write the rows of one layer, one tensor a plane."""

        def run() -> None:
            for plane, values in zip(self.planes, rows, strict=True):
                plane.buffer[layer_id][loc] = values

        regions = [self.region(plane, layer_id, loc) for plane in range(len(self.planes))]
        self.runtime.launch("set_kv_buffer", run, writes=regions)

    def get_kv_buffer(self, layer_id: int) -> Any:
        return self.inner.get_kv_buffer(layer_id)


def build(
    engine: Engine,
    config: HiCacheConfig,
    runtime: Runtime,
    allocator: Callable[[Any], Any],
    rows: Any,
    init_params: Callable[..., Any],
    tree_class: Callable[[Any], Any],
) -> HiCacheParts:
    """A fresh two-tier cache.

    Args:
        allocator: makes the wrapped allocator of a device pool.
        init_params, tree_class: see :class:`refcache.peers.sglang.SglangTarget`.
    """
    device.use(runtime)
    copies.forget()
    one_rank_group()
    inner, mla = device_pool(engine, config)
    pool = DevicePool(inner, runtime)
    wrapped = allocator(inner)
    base = engine.module("mem_cache.hiradix_cache").HiRadixCache
    tree = tree_class(base)(
        init_params(config, wrapped, rows), server_args=server_args(config)
    )  # fmt: skip
    atexit.unregister(tree.shutdown)  # it would keep every cache of a campaign alive
    tree.load_back_threshold = config.load_back_threshold
    host = tree.token_to_kv_pool_host
    planes = (host.kv_buffer,) if mla else tuple(host.kv_buffer)
    register_host(host, planes, config)
    controller = tree.cache_controller
    controller.write_stream.name, controller.load_stream.name = "write", "load"
    counter = controller.layer_done_counter
    return HiCacheParts(tree, wrapped, rows, pool, host, planes, counter)


def device_pool(engine: Engine, config: HiCacheConfig) -> tuple[Any, bool]:
    """A device pool of the release, and whether it is MLA's, which has fewer layouts."""
    mla = config.mla and config.layout in ("layer_first", "page_first")
    pools = engine.module("mem_cache.memory_pool")
    made, widths = (pools.MLATokenToKVPool, (2, 1)) if mla else (pools.MHATokenToKVPool, (1, 2))
    given = (config.size, config.page_size, torch.int64, *widths, LAYERS, "cpu", False)
    return made(*given), mla


def register_host(host: Any, planes: Sequence[torch.Tensor], config: HiCacheConfig) -> None:
    """Let the copy kernels find the rows of a host pool."""
    layouts = [Layout.of_buffer(config.layout, plane, config.page_size) for plane in planes]
    views = [
        [layout.rows(plane, layer) for layer in range(LAYERS)]
        for layout, plane in zip(layouts, planes, strict=True)
    ]
    copies.register(host, views, paged=True)


def server_args(config: HiCacheConfig) -> SimpleNamespace:
    """The server arguments that the cache reads."""
    return SimpleNamespace(
        hicache_ratio=(config.host_size - config.page_size / 2) / config.size,
        hicache_size=0,
        hicache_mem_layout=config.layout,
        hicache_io_backend=BACKENDS.get(config.layout, config.io_backend),
        hicache_write_policy=config.write_policy,
        hicache_storage_backend=None,
        hicache_storage_backend_extra_config=None,
        hicache_storage_prefetch_policy="best_effort",
        served_model_name=None,
        extra_metric_labels=None,
    )


def one_rank_group() -> None:
    """The default process group: one rank, gloo, no network."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )


def inspect_host(tree: Any, view: TreeView) -> HostView:
    """The host tier of a ``HiRadixCache``.

    The release protects the host slots of a running copy by the node's device residency and lock,
    not by a count; ``host_ref`` therefore counts the copies that cover a node on top of the
    release's own counter. Whether slots in flight keep their owner is rule X1's business.
    """
    controller = tree.cache_controller
    keeps_locks = controller.write_policy != "write_back"
    transfers = [
        TransferView("write", op, (node,), keeps_locks)
        for op, node in tree.ongoing_write_through.items()
    ] + [TransferView("load", op, (node,), True) for op, node in tree.ongoing_load_back.items()]
    uses: dict[Any, int] = {}
    for transfer in transfers:
        for handle in transfer.handles:
            uses[handle] = uses.get(handle, 0) + 1
    host = tree.token_to_kv_pool_host
    return HostView(
        size=host.size,
        free=host.free_slots,
        transfers=tuple(transfers),
        leaves=frozenset(tree.evictable_host_leaves),
        waiting=len(controller.load_queue),
        nodes={
            n.handle: HostNodeView(
                n.handle.host_ref_counter + uses.get(n.handle, 0), n.handle.hit_count
            )
            for n in view.nodes
        },
    )
