"""SGLang's one-tier cache on trial: allocators and ``RadixCache`` of a published release.

The adapter makes objects and translates data; it decides nothing. Requests are given the lists of
token ids that the release's own ``Req`` has, and nodes are shown with refcache's keys.
"""

from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.oracle.peers import guard
from refcache.oracle.peers.engine import VERSIONS, Engine, load, unpacked
from refcache.oracle.target import CacheConfig, Target
from refcache.oracle.view import TreeView, inspect_radix
from refcache.oracle.violation import Violation


class SglangTarget(Target):
    """Releases before the unified tree: 0.5.10 and 0.5.12."""

    capabilities = frozenset({"allocator", "tree", "inspect", "events", "minimal_evict"})

    def __init__(self, version: str, name: str | None = None) -> None:
        self.engine: Engine = load(version)
        self.name = name or f"sglang:{version}"
        params = self.engine.params
        self.RadixKey = self.engine.radix_cache.RadixKey
        self.MatchPrefixParams = params.MatchPrefixParams
        self.InsertParams = params.InsertParams
        self.EvictParams = params.EvictParams
        self.InitLoadBackParams = params.InitLoadBackParams
        self._paged_class = watched(self.engine.allocator.PagedTokenToKVPoolAllocator)
        self._tree_class = with_lists(self.engine.radix_cache.RadixCache)

    def allocator(self, config: CacheConfig) -> Any:
        return self.make_allocator(config, None)

    def make_allocator(self, config: CacheConfig, pool: Any) -> Any:
        if config.page_size == 1:
            return self.engine.allocator.TokenToKVPoolAllocator(
                config.size, torch.int64, "cpu", pool, config.need_sort
            )
        return self._paged_class(
            config.size, config.page_size, torch.int64, "cpu", pool, config.need_sort
        )

    def init_params(self, config: CacheConfig, allocator: Any, rows: Any, **more: Any) -> Any:
        return self.engine.module("mem_cache.cache_init_params").CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=config.page_size,
            is_eagle=config.is_eagle,
            eviction_policy=config.eviction_policy,
            enable_kv_cache_events=config.enable_kv_cache_events,
            **more,
        )

    def tree(self, config: CacheConfig, allocator: Any, req_to_token_pool: Any) -> Any:
        stop_watching(allocator)
        return self._tree_class(self.init_params(config, allocator, req_to_token_pool))

    def inspect(self, tree: Any) -> TreeView:
        return inspect_radix(tree, tree.get_child_key_fn)


def watched(base: type) -> type:
    """``base`` whose kernels' reads are watched: one past the free list is a violation of AL2.

    A tree's suites are about the tree: they call :func:`stop_watching`, and such a read gives 0.
    """

    class Allocator(base):  # type: ignore[misc]
        watching = True

        def stop_watching(self) -> None:
            self.watching = False

        def alloc_extend(self, *args: Any, **kwargs: Any) -> Any:
            return self._watch(super().alloc_extend, *args, **kwargs)

        def alloc_decode(self, *args: Any, **kwargs: Any) -> Any:
            return self._watch(super().alloc_decode, *args, **kwargs)

        def _watch(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            free = len(self.free_pages)
            with guard.reads_outside() as reads:
                result = function(*args, **kwargs)
            if reads and self.watching:
                raise Violation("AL2", f"{reads[0]}; {free} pages were free")
            return result

    Allocator.__qualname__ = Allocator.__name__ = base.__name__
    return Allocator


def stop_watching(allocator: Any) -> None:
    """See :func:`watched`; page size 1 has no kernels."""
    getattr(allocator, "stop_watching", lambda: None)()


def with_lists(base: type) -> type:
    """``base`` for requests whose tokens are arrays: its own ``Req`` has lists.

    The methods below only turn the three fields into lists; the work is the release's own.
    """

    class Tree(base):  # type: ignore[misc]
        def cache_unfinished_req(self, req: Any, chunked: bool = False) -> Any:
            return super().cache_unfinished_req(_listed(req), chunked=chunked)

        def cache_finished_req(self, req: Any, is_insert: bool = True) -> Any:
            return super().cache_finished_req(_listed(req), is_insert=is_insert)

    Tree.__qualname__ = Tree.__name__ = base.__name__
    return Tree


def _listed(req: Any) -> Any:
    for field in ("origin_input_ids", "output_ids", "fill_ids"):
        setattr(req, field, list(getattr(req, field)))
    return req


def peer_target(spec: str) -> Target:
    """The target named ``sglang``, ``sglang:VERSION`` or ``sglang:VERSION+VARIANT``.

    Raises:
        InvalidArgument: another form, or a release that the adapters do not know.
        MissingExtra: the release is not unpacked.
    """
    engine, _, rest = spec.partition(":")
    version, _, _ = rest.partition("+")
    if not version:
        version = (unpacked() or VERSIONS)[-1]
    if engine != "sglang" or version not in VERSIONS:
        raise InvalidArgument(
            f"target {spec!r}: expected sglang or sglang:VERSION, VERSION one of "
            f"{', '.join(VERSIONS)}"
        )
    return SglangTarget(version)
