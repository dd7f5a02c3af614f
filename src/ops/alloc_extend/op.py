"""The op ``alloc_extend``: schema, implementations, fake.

Defined by :func:`refcache.reference.alloc.alloc_extend`, which is the CPU implementation. On CUDA
nothing is checked that would need a device synchronisation: the caller passes lengths that do not
shrink and their exact sum (the allocator does). If it does not, slots beyond
``extend_num_tokens`` are dropped, and a tail that no request covers stays uninitialised.
"""

import torch

from refcache import reference
from refcache_ops._library import check_slots, define, kernels

SCHEMA = (
    "alloc_extend(Tensor prefix_lens, Tensor seq_lens, Tensor last_loc, Tensor free_pages, "
    "int page_size, SymInt extend_num_tokens) -> Tensor"
)


def run_kernel(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
) -> torch.Tensor:
    """The kernel, on CUDA tensors (or on the CPU in Triton\'s interpreter); checks shapes first."""
    prefix_lens, seq_lens, last_loc, free_pages = check_slots(
        prefix_lens, seq_lens, last_loc, free_pages
    )
    out: torch.Tensor = kernels("alloc_extend").run(
        prefix_lens, seq_lens, last_loc, free_pages, page_size, extend_num_tokens
    )
    return out


def _fake(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
) -> torch.Tensor:
    return seq_lens.new_empty(extend_num_tokens, dtype=torch.int64)


define(SCHEMA, cpu=reference.alloc_extend, cuda=run_kernel, fake=_fake)
