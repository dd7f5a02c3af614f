"""The scopes: sizes that are small enough to be explored whole, or deep enough to be worth it."""

from typing import Any

from refcache.errors import UnknownName
from refcache.oracle.drivers.allocator import AllocatorDriver
from refcache.oracle.drivers.hicache.driver import HiCacheDriver
from refcache.oracle.drivers.tree.driver import TreeDriver
from refcache.oracle.explore.fingerprint import Vocabulary
from refcache.oracle.explore.moves import (
    allocator_moves,
    bare_moves,
    hicache_moves,
    request_moves,
)
from refcache.oracle.explore.search import Scope
from refcache.types import EVICTION_POLICIES, WRITE_POLICIES


def _allocator(name: str, page_size: int, **config: Any) -> Scope:
    size = {"page_size": page_size, "size": 4 * page_size}
    return Scope(
        f"allocator.{name}",
        AllocatorDriver,
        size | config,
        allocator_moves,
        f"4 pages of {page_size}",
    )


def _calls(name: str, page_size: int, **config: Any) -> Scope:
    size = {"page_size": page_size, "size": 3 * page_size, "max_requests": 1, "context_length": 16}
    policy = config.get("eviction_policy", "lru")
    return Scope(
        f"tree.{name}",
        TreeDriver,
        size | config,
        bare_moves,
        f"3 pages of {page_size}, 2 tokens, 2 namespaces beside none, single calls, {policy}",
    )


def _requests(name: str, page_size: int, pages: int, count: int) -> Scope:
    return Scope(
        f"tree.{name}",
        TreeDriver,
        {
            "page_size": page_size,
            "size": pages * page_size,
            "max_requests": count,
            "context_length": 16,
        },
        request_moves,
        f"{pages} pages of {page_size}, 2 tokens, 1 namespace beside none, {count} requests, lru",
        Vocabulary((0, 1), ("a",)),
    )


def _tiers(policy: str, requests: int = 1) -> Scope:
    return Scope(
        f"hicache.{policy}",
        HiCacheDriver,
        {
            "size": 3,
            "host_size": 4,
            "max_requests": requests,
            "context_length": 16,
            "write_policy": policy,
        },
        hicache_moves,
        f"3 pages and 4 host pages of 1, 2 tokens, {requests} request, copies in flight, {policy}",
        Vocabulary((0, 1), ()),
    )


SCOPES: dict[str, Scope] = {
    scope.name: scope
    for scope in (
        _allocator("tokens", 1),
        _allocator("pages", 2),
        _allocator("sorted", 2, need_sort=True),
        *(_calls(policy, 1, eviction_policy=policy) for policy in EVICTION_POLICIES),
        _calls("pages", 2),
        _requests("requests", 1, 2, 2),
        _requests("requests3", 1, 3, 2),
        _requests("requests_pages", 2, 2, 2),
        *map(_tiers, WRITE_POLICIES),
    )
}


def select(name: str | None = None) -> list[Scope]:
    """All scopes, those of a part (``tree``), or one by name (``tree.lru``).

    Raises:
        UnknownName: nothing is called so.
    """
    found = [s for s in SCOPES.values() if name in (None, s.name, s.name.split(".")[0])]
    if not found:
        parts = {scope.split(".")[0] for scope in SCOPES}
        raise UnknownName("scope", str(name), {*SCOPES, *parts})
    return found
