"""The op ``load_per_layer``: schema and implementations.

Defined by :func:`refcache.reference.transfer.load_per_layer`. ``max_programs`` caps the programs of
the kernel (0: no cap). On CUDA, host memory that is not pinned goes through a copy that blocks the
caller.
"""

from collections.abc import Sequence

import torch

from refcache import reference
from refcache.reference.transfer import check_layers, check_programs
from refcache_ops._library import define, kernels
from refcache_ops.copy.plan import plan_transfer

SCHEMA = (
    "load_per_layer(Tensor(a!)[] device, Tensor[] host, Tensor host_indices, "
    "Tensor device_indices, SymInt layer_id, int page_size, str layout, int max_programs=0) -> ()"
)


def run_kernel(
    device: Sequence[torch.Tensor],
    host: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
    layout: str,
    max_programs: int = 0,
) -> None:
    """The kernel, on CUDA tensors (or on the CPU in Triton's interpreter); checks shapes first."""
    check_programs(max_programs)
    copy = kernels("copy")
    transfer = plan_transfer(
        host, device, host_indices, device_indices, page_size, layout, layer_id
    )
    check_layers(layer_id, 1, transfer.plan.layers)
    if not copy.reachable(host):
        reference.load_per_layer(
            device, host, host_indices, device_indices, layer_id, page_size, layout
        )
        return
    copy.run(transfer, host_indices, device_indices, layer_id, 1, max_programs, to_host=False)


define(SCHEMA, reference.load_per_layer, cuda=run_kernel)
