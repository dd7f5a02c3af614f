"""What a storage backend is told and what it answers: configuration, pools, hits.

A hybrid model caches more than KV: its state layers have pages of their own, in a pool of their
own. A :class:`PoolTransfer` names such a pool and how much of a prefix it must cover, and
:func:`usable_prefix` says how many leading pages are of use when every pool is asked.

Names are SGLang 0.5.10's. Two answers differ on purpose: pool names are text on every version of
Python (a state's file name must not depend on it), and ``prefix_keys`` is None by default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch


@dataclass(frozen=True)
class HiCacheStorageConfig:
    """Who stores: a rank's place, the model, and the backend's own options (``extra_config``)."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    extra_config: dict[str, Any] | None = None


@dataclass
class HiCacheStorageExtraInfo:
    """What a caller may add to a batch: the hashes of the pages before it, and anything else."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(StrEnum):
    """The pools that have a name of their own."""

    KV = "kv"
    MAMBA = "mamba"


class PoolHitPolicy(StrEnum):
    """Which pages of a prefix a pool must have: every one, or its last ``len(keys)`` only."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


@dataclass
class PoolTransfer:
    """Pages of one pool: ``keys`` in storage, ``host_indices`` the slots of all of them, in order.

    Attributes:
        host_indices: int64 ``[pages * page size of the pool]``.
        device_indices: for transfers between the tiers above; storage does not read it.
    """

    name: str
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    """How many leading pages are of use, and how many each pool has of its own."""

    kv_hit_pages: int = 0
    extra_pool_hit_pages: dict[str, int] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> "PoolTransferResult":
        return cls()

    def update_kv_hit_pages(self, kv_hit_pages: int) -> None:
        """Note the hit of one more batch of a prefix; the longest counts."""
        self.kv_hit_pages = max(self.kv_hit_pages, kv_hit_pages)

    def update_extra_pool_hit_pages(self, results: dict[str, list[bool]]) -> None:
        """Note how many pages of each pool were moved."""
        self.extra_pool_hit_pages |= {name: sum(moved) for name, moved in results.items()}


def pool_name(name: str) -> str:
    """A pool's name as plain text, also from an enumeration of another library."""
    return str(getattr(name, "value", name))


def component_key(key: str, pool: str) -> str:
    """The key of a pool's page: the KV page's own, or with the pool's name behind it.

    >>> component_key("34fb", PoolName.KV), component_key("34fb", PoolName.MAMBA)
    ('34fb', '34fb.mamba')
    """
    return key if pool == PoolName.KV else f"{key}.{pool_name(pool)}"


def usable_prefix(
    keys: Sequence[str], transfers: Sequence[PoolTransfer], exists: Callable[[str], bool]
) -> PoolTransferResult:
    """The longest prefix of ``keys`` whose KV pages exist and that every pool covers.

    Hits of a pool are counted within the KV hit; a pool without any is left out, and none is asked
    once no page is of use.

    >>> stored = {"a", "b", "c", "d", "b.mamba"}
    >>> state = PoolTransfer("mamba", keys=["b"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    >>> usable_prefix("abcd", [state], stored.__contains__)
    PoolTransferResult(kv_hit_pages=2, extra_pool_hit_pages={'kv': 4, 'mamba': 2})
    """
    pages = leading(keys, exists)
    hits: dict[str, int] = {pool_name(PoolName.KV): pages} if pages else {}
    usable = pages
    for transfer in transfers:
        if not usable:
            break
        has = [exists(component_key(key, transfer.name)) for key in keys[:pages]]
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            covered = leading(has, bool)
        else:
            last = max(1, len(transfer.keys or ()))
            ends = range(pages, 0, -1)
            covered = next((end for end in ends if all(has[max(0, end - last) : end])), 0)
        if covered:
            hits[pool_name(transfer.name)] = covered
        usable = min(usable, covered)
    return PoolTransferResult(usable, hits)


def leading(items: Sequence[Any], good: Callable[[Any], bool]) -> int:
    """How many items there are before the first that is not ``good``."""
    return next((i for i, item in enumerate(items) if not good(item)), len(items))
