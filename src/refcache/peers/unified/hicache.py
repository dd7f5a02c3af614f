"""The two-tier cache of SGLang 0.5.23 on the simulated machine: ``UnifiedRadixCache`` with its
``HybridCacheController``, ``L2TransferEngine`` and host pools, over either tree core.

As in :mod:`refcache.peers.hicache`, the copy kernels and the device module are modelled. On
a CPU the release's host pools do not import the names of the copy kernels at all: they are put
where the import for a GPU would put them. The kernels that it compiles at run time need a GPU, so
the copies are those it falls back to. The controller's fences are set to the forward stream, as
its scheduler does.
"""

import atexit
from types import ModuleType
from typing import Any

from refcache.oracle.target.config import HiCacheConfig, HiCacheParts
from refcache.peers import copies, device, hicache
from refcache.runtime import Runtime

KERNELS = {
    "mha": (
        "transfer_kv_all_layer",
        "transfer_kv_all_layer_direct_lf_pf",
        "transfer_kv_all_layer_lf_pf",
        "transfer_kv_all_layer_lf_ph",
        "transfer_kv_direct",
        "transfer_kv_per_layer",
        "transfer_kv_per_layer_direct_pf_lf",
        "transfer_kv_per_layer_pf_lf",
        "transfer_kv_per_layer_ph_lf",
    ),
    "mla": (
        "transfer_kv_all_layer_direct_lf_pf",
        "transfer_kv_all_layer_mla",
        "transfer_kv_all_layer_mla_lf_pf",
        "transfer_kv_direct",
        "transfer_kv_per_layer_direct_pf_lf",
        "transfer_kv_per_layer_mla",
        "transfer_kv_per_layer_mla_pf_lf",
    ),
}
"""By module of ``sglang.srt.mem_cache.pool_host``: what it imports on a GPU."""


def bind_kernels(pools: dict[str, ModuleType]) -> None:
    """Give the host pools the kernels that they import on a GPU only."""
    for name, module in pools.items():
        for kernel in KERNELS[name]:
            if not hasattr(module, kernel):
                setattr(module, kernel, copies.kernel(kernel))
    pools["mla"].maybe_dcp_kernel_indices = _of_one_rank  # type: ignore[attr-defined]


def _of_one_rank(indices: Any, dcp_size: int, dcp_rank: int) -> Any:
    """What this function of the model layers gives when one rank has the whole context."""
    return indices


def build(
    target: Any, config: HiCacheConfig, runtime: Runtime, forward: Any, wrap: Any
) -> HiCacheParts:
    """A fresh two-tier cache; arguments as of
    :meth:`refcache.oracle.target.base.Target.hicache`."""
    device.use(runtime)
    copies.forget()
    hicache.one_rank_group()
    engine = target.engine
    bind_kernels({name: engine.module(f"mem_cache.pool_host.{name}") for name in KERNELS})
    server_args = target.configure(**_known(vars(hicache.server_args(config))))
    inner, mla = hicache.device_pool(engine, config)
    pool = hicache.DevicePool(inner, runtime)
    allocator = wrap(target.make_allocator(config, inner))
    rows = target.req_to_token_pool(config)
    params = target.init_params(config, allocator, rows)
    tree = target.unified(params)
    tree.init_hicache(server_args, params)
    share_host_pools(tree)
    atexit.unregister(tree.shutdown)
    tree.load_back_threshold = config.load_back_threshold
    controller = tree.cache_controller
    copier = controller.l2_transfer_engine
    copier.device_to_host_stream.name, copier.host_to_device_stream.name = "write", "load"
    controller.load_fence_stream = controller.write_fence_stream = forward
    host = tree.host_pool_group.anchor_entry.host_pool
    planes = (host.kv_buffer,) if mla else tuple(host.kv_buffer)
    hicache.register_host(host, planes, config)
    return HiCacheParts(tree, allocator, rows, pool, host, planes, controller.layer_done_counter)


def _known(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != "extra_metric_labels"}


def share_host_pools(tree: Any) -> None:
    """A Python core beside the leading one has components of its own: they get what the release
    gave to the cache's."""
    shown = getattr(tree.tree_core, "shown", None)
    if shown is not None:
        for kind, component in shown.components_by_type.items():
            component._full_kv_pool_host = tree.components[kind]._full_kv_pool_host
