"""SGLang's one-tier cache on trial: allocators and ``RadixCache`` of a published release.

The adapter makes objects and translates data; it decides nothing. Requests are given the lists of
token ids that the release's own ``Req`` has, and nodes are shown with refcache's keys.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from refcache.keys import RadixKey
from refcache.oracle.rules.violation import Violation
from refcache.oracle.target.base import Target
from refcache.oracle.target.config import (
    CacheConfig,
    HiCacheConfig,
    HiCacheParts,
    MambaConfig,
    MambaParts,
    SWAConfig,
)
from refcache.oracle.view.component import (
    ComponentView,
    inspect_full,
    inspect_states,
    inspect_window,
)
from refcache.oracle.view.host import HostView
from refcache.oracle.view.tree import TreeView, inspect_radix
from refcache.peers import guard, hicache, hybrid
from refcache.peers.engine import Engine, load
from refcache.peers.releases import VARIANTS

CAPABILITIES = frozenset(
    {"allocator", "tree", "inspect", "minimal_evict", "hicache", "mamba", "swa"}
)


class SglangTarget(Target):
    """Releases before the unified tree: 0.5.10 and 0.5.12."""

    def __init__(self, version: str, variant: str = "") -> None:
        """``variant``: a capability more than the release is known to keep; see ``VARIANTS``."""
        self.capabilities = CAPABILITIES | VARIANTS[variant]
        self.engine: Engine = load(version)
        self.kernels = variant == "kernels"
        self.name = f"sglang:{version}{variant and f'+{variant}'}"
        params = self.engine.params
        self.RadixKey = self.engine.radix_cache.RadixKey
        self.MatchPrefixParams = params.MatchPrefixParams
        self.InsertParams = params.InsertParams
        self.EvictParams = params.EvictParams
        self.DecLockRefParams = params.DecLockRefParams
        self.InitLoadBackParams = load_back_params(params.InitLoadBackParams)
        self._paged_class = watched(self.engine.allocator.PagedTokenToKVPoolAllocator)
        self._rows_class = readable(self.engine.module("mem_cache.memory_pool").ReqToTokenPool)
        self._tree_class = with_lists(self.engine.radix_cache.RadixCache)

    def allocator(self, config: CacheConfig) -> Any:
        return self.make_allocator(config, None)

    def make_allocator(self, config: CacheConfig, pool: Any) -> Any:
        if config.page_size == 1:
            return self.engine.allocator.TokenToKVPoolAllocator(
                config.size, torch.int64, "cpu", pool, config.need_sort
            )
        made = self._paged_class(
            config.size, config.page_size, torch.int64, "cpu", pool, config.need_sort
        )
        made.use_triton_kernels = self.kernels
        return made

    def init_params(self, config: CacheConfig, allocator: Any, rows: Any, **more: Any) -> Any:
        return self.engine.module("mem_cache.cache_init_params").CacheInitParams(
            **config.init_params(allocator, rows), **more
        )

    def tree(self, config: CacheConfig, allocator: Any, req_to_token_pool: Any) -> Any:
        stop_watching(allocator)
        return self._tree_class(self.init_params(config, allocator, req_to_token_pool))

    def req_to_token_pool(self, config: CacheConfig) -> Any:
        return self._rows_class(config.max_requests, config.context_length, "cpu", False)

    def inspect(self, tree: Any) -> TreeView:
        own = getattr(tree, "get_child_key_fn", None)
        child_key = own or (lambda key: key.child_key(tree.page_size))
        look = inspect_full if hasattr(tree, "full_lru_list") else inspect_radix
        view, eagle = look(tree, child_key), getattr(tree, "is_eagle", False)
        nodes = [replace(n, key=_refcache_key(n.key, eagle)) for n in view.nodes]
        return replace(view, nodes=tuple(nodes))

    def hicache(
        self,
        config: HiCacheConfig,
        runtime: Any,
        forward_stream: Any,
        wrap: Callable[[Any], Any],
    ) -> HiCacheParts:
        def allocator(pool: Any) -> Any:
            made = wrap(self.make_allocator(config, pool))
            stop_watching(made)
            return made

        return hicache.build(
            self.engine,
            config,
            runtime,
            allocator,
            self.req_to_token_pool(config),
            self.init_params,
            with_lists,
        )

    def mamba(
        self, config: MambaConfig, wrap: Callable[[Any], Any], states: Callable[[Any], Any]
    ) -> MambaParts:
        inner = self.make_allocator(config, None)
        stop_watching(inner)
        return hybrid.mamba(
            self.engine, config, inner, wrap, states, self.init_params, readable, with_lists
        )

    def swa(self, config: SWAConfig, wrap: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
        rows = self.req_to_token_pool(config)
        return hybrid.swa(self.engine, config, rows, wrap, self.init_params, with_lists)

    def inspect_component(self, tree: Any) -> ComponentView:
        look = inspect_window if tree.supports_swa() else inspect_states
        return look(tree, self.inspect(tree))

    def inspect_host(self, tree: Any) -> HostView:
        return hicache.inspect_host(tree, self.inspect(tree))

    def host_pool(self, tree: Any) -> Any:
        """The host slots of a two-tier tree, with the release's ``alloc`` and ``free``."""
        return tree.token_to_kv_pool_host

    def pin_on_host(self, tree: Any, handle: Any) -> None:
        """Pin a node's host slots, as a write to storage does."""
        handle.protect_host()


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
            """An allocation; a read past the free list is a violation, if that is watched."""
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

    The methods below only turn the three fields into lists, and say how much a host eviction freed,
    which the release does not return; the work is the release's own.
    """

    class Tree(base):  # type: ignore[misc]
        def cache_unfinished_req(self, req: Any, chunked: bool = False) -> Any:
            return super().cache_unfinished_req(_listed(req), chunked=chunked)

        def cache_finished_req(self, req: Any, is_insert: bool = True) -> Any:
            return super().cache_finished_req(_listed(req), is_insert=is_insert)

        def evict_host(self, num_tokens: int) -> int:
            before = self.token_to_kv_pool_host.available_size()
            super().evict_host(num_tokens)
            return int(self.token_to_kv_pool_host.available_size() - before)

    Tree.__qualname__ = Tree.__name__ = base.__name__
    return Tree


def load_back_params(base: type) -> Any:
    """The release's parameters; from 0.5.11 on the node has another name."""
    names = [field.name for field in fields(base)]

    def make(last_host_node: Any, host_hit_length: int, mem_quota: int | None = None) -> Any:
        return base(**{names[0]: last_host_node, names[1]: host_hit_length, "mem_quota": mem_quota})

    return make


def readable(base: type) -> type:
    """The release's request rows with the read that the suites use."""

    class Rows(base):  # type: ignore[misc]
        def read(self, rows: Any, columns: Any) -> torch.Tensor:
            found: torch.Tensor = self.req_to_token[rows, columns].to(torch.int64)
            return found

    return Rows


def _refcache_key(key: Any, is_eagle: bool) -> RadixKey:
    return RadixKey(list(key.token_ids), key.extra_key, is_eagle)


def _listed(req: Any) -> Any:
    for field in ("origin_input_ids", "output_ids", "fill_ids"):
        setattr(req, field, list(getattr(req, field)))
    return req
