"""The op ``load_layers``: schema and implementations.

Defined by :func:`refcache.reference.transfer.load_layers`: small loads are bound by launches, so
all layers go in one, and a layer's arrival is a flag in device memory instead of an event. On CUDA
a stream waits for the flag with :func:`refcache_ops.driver.wait_flag`. Host memory that is not
pinned goes through a copy that blocks the caller.
"""

from collections.abc import Sequence

import torch

from refcache import reference
from refcache.errors import InvalidArgument
from refcache.reference.transfer import check_flags, check_layers, check_programs
from refcache_ops._library import define, kernels
from refcache_ops.copy.plan import plan_transfer

SCHEMA = (
    "load_layers(Tensor(a!)[] device, Tensor[] host, Tensor host_indices, "
    "Tensor device_indices, Tensor(b!) layer_flags, SymInt first_layer, SymInt layer_num, "
    "int page_size, str layout, int max_programs=0) -> ()"
)


def run_kernel(
    device: Sequence[torch.Tensor],
    host: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_flags: torch.Tensor,
    first_layer: int,
    layer_num: int,
    page_size: int,
    layout: str,
    max_programs: int = 0,
) -> None:
    """The kernel, on CUDA tensors (or on the CPU in Triton's interpreter); checks shapes first."""
    check_programs(max_programs)
    copy = kernels("copy")
    transfer = plan_transfer(host, device, host_indices, device_indices, page_size, layout)
    check_layers(first_layer, layer_num, transfer.plan.layers)
    check_flags(layer_flags, transfer.plan.layers)
    if layer_flags.device != device[0].device:
        raise InvalidArgument(f"layer_flags on {layer_flags.device}: expected {device[0].device}")
    if not copy.reachable(host):
        reference.load_layers(
            device, host, host_indices, device_indices, layer_flags, first_layer, layer_num,
            page_size, layout,
        )  # fmt: skip
        return
    copy.run(
        transfer, host_indices, device_indices, first_layer, layer_num, max_programs,
        to_host=False, flags=layer_flags,
    )  # fmt: skip


define(SCHEMA, reference.load_layers, cuda=run_kernel)
