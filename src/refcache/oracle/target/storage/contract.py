"""The contract ``storage``: the methods of ``HiCacheStorage``, and nothing but them.

A backend is made over a directory, where another one, or an earlier one of its own kind, may have
been. What it is asked is what SGLang's cache controller asks: pages under keys, one by one, in
batches, straight from a pool (*v1*) or from several (*v2*). A key stands for one page of one engine
(model, rank, layout): two engines that share a directory use the same keys for other bytes.

====================  ==============================================================================
call                  what it must do
====================  ==============================================================================
``set``               True: the page is stored, and stays so until ``clear``. False: it is not
``get``               the page in the target, or None. Whatever is missing, damaged, of another
                      size or another engine's is None
``exists``            whether the page is stored
``batch_*``           the same for each key; ``batch_exists`` counts the leading keys that exist
``batch_*_v1``        the same with slots of the registered pool; slots of a miss stay as they were
``batch_*_v2``        the same for several pools; ``batch_exists_v2`` gives the longest prefix that
                      every pool covers, by its hit policy
``clear``             this engine's pages are gone; every other file of the directory stays
====================  ==============================================================================

With the capability ``durable`` it also outlives a crash: a page that ``set`` has acknowledged is
there, one that it has not is whole or a miss, and a restart leaves no file that belongs to no page.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from refcache.oracle.target.config import CacheConfig

if TYPE_CHECKING:
    import torch

TOKEN_BYTES = 16
"""Of one token in the pools of the suites."""
ENGINES: tuple[Mapping[str, Any], ...] = (
    {"model_name": "org/m"},
    {"model_name": "org/m", "tp_rank": 1, "tp_size": 2},
    {"model_name": "org/n"},
    {"model_name": "org/m", "layout": "page_first"},
)
"""Who shares a directory: two ranks, another model, another layout of the pool."""


@dataclass(frozen=True)
class StorageTraits:
    """What a backend says of itself.

    Attributes:
        v1, v2: it has those calls; in SGLang's base class they are not implemented.
        no_target: ``get`` makes a tensor of its own when it is given none.
        bounded: it keeps the bound ``max_bytes``; then acknowledged pages may go for others.
        files: how many files it keeps beside one for each page.
    """

    v1: bool = True
    v2: bool = True
    no_target: bool = True
    bounded: bool = False
    files: int = 0


@dataclass(frozen=True)
class StorageConfig(CacheConfig):
    """How backends under test are built: pages of ``page_size`` tokens.

    ``max_pages``: a backend that can (``bounded``) keeps no more; 0: no bound.
    """

    max_pages: int = 0


class RowsPool:
    """A host pool of bytes, ``[slots, TOKEN_BYTES]``: what a backend asks of one.

    Its pages are flat copies; ``layout`` is only a name here, as the bytes of a page are drawn.
    """

    size_per_token = TOKEN_BYTES

    def __init__(self, page_size: int, slots: int, layout: str) -> None:
        import torch  # answers that need no tensor do not import it

        self.dtype = torch.uint8
        self.page_size = page_size
        self.size = slots
        self.layout = layout
        self.rows = torch.zeros(slots, TOKEN_BYTES, dtype=torch.uint8)

    def get_data_page(self, index: int, flat: bool = True) -> "torch.Tensor":
        page = self.rows[int(index) : int(index) + self.page_size]
        return page.flatten().clone() if flat else page

    def get_dummy_flat_data_page(self) -> "torch.Tensor":
        return self.rows.new_zeros(self.page_size * TOKEN_BYTES)

    def set_from_flat_data_page(self, index: int, data_page: "torch.Tensor") -> None:
        self.rows[int(index) : int(index) + self.page_size] = data_page.view(-1, TOKEN_BYTES)
