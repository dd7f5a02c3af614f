"""KV events: what a router is told about which pages a cache holds, tier by tier.

Replaying the events of a tier into an empty set must give exactly the pages the tree holds there,
at every quiescent point (invariant N2). One event a page; a parent is stored before its child.
"""

from dataclasses import dataclass
from typing import Any

MEDIUM_GPU = "GPU"
MEDIUM_CPU = "CPU_PINNED"


@dataclass(frozen=True)
class BlockStored:
    """Pages became resident on ``medium``.

    Attributes:
        block_hashes: :func:`refcache.keys.hash_str_to_int64` of each page.
        parent_block_hash: of the page before the first one; None at the root of a namespace.
        token_ids: tokens of the pages, in order (elements for a bigram key).
        block_size: tokens a page.
        lora_id: always None; the namespace is inside the hashes.
        medium: the tier; the trees here always name it.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


@dataclass(frozen=True)
class BlockRemoved:
    """Pages left ``medium``."""

    block_hashes: list[int]
    medium: str | None = None


@dataclass(frozen=True)
class AllBlocksCleared:
    """The cache was reset: nothing is resident on any tier."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
