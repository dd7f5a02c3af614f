"""The op ``backup_all_layer``: schema and implementations.

Defined by :func:`refcache.reference.transfer.backup_all_layer`. ``max_programs`` caps the programs
of the kernel (0: no cap); it changes speed and nothing else.

On CUDA the host bytes arrive asynchronously: read them after a ``synchronize`` of the stream, and
not later in the same compiled graph. Host memory that is not pinned goes through a copy that
blocks the caller.
"""

from collections.abc import Sequence

import torch

from refcache import reference
from refcache.reference.transfer import check_programs
from refcache_ops._library import define, kernels
from refcache_ops.copy.plan import plan_transfer

SCHEMA = (
    "backup_all_layer(Tensor(a!)[] host, Tensor[] device, Tensor host_indices, "
    "Tensor device_indices, int page_size, str layout, int max_programs=0) -> ()"
)


def run_kernel(
    host: Sequence[torch.Tensor],
    device: Sequence[torch.Tensor],
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    page_size: int,
    layout: str,
    max_programs: int = 0,
) -> None:
    """The kernel, on CUDA tensors (or on the CPU in Triton's interpreter); checks shapes first."""
    check_programs(max_programs)
    copy = kernels("copy")
    transfer = plan_transfer(host, device, host_indices, device_indices, page_size, layout)
    if not copy.reachable(host):
        reference.backup_all_layer(host, device, host_indices, device_indices, page_size, layout)
        return
    copy.run(
        transfer, host_indices, device_indices, 0, transfer.plan.layers, max_programs, to_host=True
    )


define(SCHEMA, reference.backup_all_layer, cuda=run_kernel)
