"""The op ``alloc_decode``: schema, implementations, fake.

Defined by :func:`refcache.reference.alloc.alloc_decode`, which is the CPU implementation.
"""

import torch

from refcache import reference
from refcache_ops._library import check_slots, define, kernels

SCHEMA = (
    "alloc_decode(Tensor seq_lens, Tensor last_loc, Tensor free_pages, int page_size) -> Tensor"
)


def run_kernel(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The kernel, on CUDA tensors (or on the CPU in Triton\'s interpreter); checks shapes first."""
    seq_lens, last_loc, free_pages = check_slots(seq_lens, last_loc, free_pages)
    out: torch.Tensor = kernels("alloc_decode").run(seq_lens, last_loc, free_pages, page_size)
    return out


def _fake(
    seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
) -> torch.Tensor:
    return torch.empty_like(seq_lens, dtype=torch.int64)


define(SCHEMA, cpu=reference.alloc_decode, cuda=run_kernel, fake=_fake)
