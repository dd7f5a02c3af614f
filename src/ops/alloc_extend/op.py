"""The op ``alloc_extend``: schema, implementations, fake.

Defined by :func:`refcache.reference.alloc.alloc_extend`, which is the CPU implementation. On CUDA
nothing is checked that would need a device synchronisation: the caller passes lengths that do not
shrink and their exact sum (the allocator does). If it does not, slots beyond
``extend_num_tokens`` are dropped, and a tail that no request covers stays uninitialised.
"""

import torch

from refcache import reference
from refcache.reference.alloc import check_alloc, check_total
from refcache_ops._library import define, kernels

_ARGUMENTS = (
    "Tensor prefix_lens, Tensor seq_lens, Tensor last_loc, Tensor free_pages, int page_size, "
    "SymInt extend_num_tokens"
)
SCHEMA = f"alloc_extend({_ARGUMENTS}) -> Tensor"
WITH_CURSOR = f"alloc_extend.cursor({_ARGUMENTS}, Tensor(a!) cursor) -> Tensor"


def run_kernel(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
    cursor: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel, on CUDA tensors (or on the CPU in Triton's interpreter); checks shapes first."""
    check_alloc(
        free_pages, page_size, cursor,
        prefix_lens=prefix_lens, seq_lens=seq_lens, last_loc=last_loc,
    )  # fmt: skip
    check_total(extend_num_tokens)
    tensors = (t.contiguous() for t in (prefix_lens, seq_lens, last_loc, free_pages))
    out: torch.Tensor = kernels("alloc_extend").run(*tensors, page_size, extend_num_tokens, cursor)
    return out


def _fake(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    page_size: int,
    extend_num_tokens: int,
    cursor: torch.Tensor | None = None,
) -> torch.Tensor:
    check_alloc(
        free_pages, page_size, cursor,
        prefix_lens=prefix_lens, seq_lens=seq_lens, last_loc=last_loc,
    )  # fmt: skip
    return seq_lens.new_empty(extend_num_tokens, dtype=torch.int64)


for schema in (SCHEMA, WITH_CURSOR):
    define(schema, reference.alloc_extend, cuda=run_kernel, fake=_fake)
