"""The op ``alloc_decode``: schema, implementations, fake.

Defined by :func:`refcache.reference.alloc.alloc_decode`, which is the CPU implementation. With a
cursor it is an overload: an op that may write an argument, and is not given one, is more than
inductor takes.
"""

import torch

from refcache import reference
from refcache.reference.alloc import check_alloc
from refcache_ops._library import define, kernels

SCHEMA = (
    "alloc_decode(Tensor seq_lens, Tensor last_loc, Tensor free_pages, int page_size) -> Tensor"
)
WITH_CURSOR = (
    "alloc_decode.cursor(Tensor seq_lens, Tensor last_loc, Tensor free_pages, int page_size, "
    "Tensor(a!) cursor) -> Tensor"
)


def run_kernel(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    cursor: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel, on CUDA tensors (or on the CPU in Triton's interpreter); checks shapes first."""
    check_alloc(free_pages, page_size, cursor, seq_lens=seq_lens, last_loc=last_loc)
    out: torch.Tensor = kernels("alloc_decode").run(
        seq_lens.contiguous(), last_loc.contiguous(), free_pages.contiguous(), page_size, cursor
    )
    return out


def _fake(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    cursor: torch.Tensor | None = None,
) -> torch.Tensor:
    check_alloc(free_pages, page_size, cursor, seq_lens=seq_lens, last_loc=last_loc)
    return torch.empty_like(seq_lens, dtype=torch.int64)


for schema in (SCHEMA, WITH_CURSOR):
    define(schema, reference.alloc_decode, cuda=run_kernel, fake=_fake)
