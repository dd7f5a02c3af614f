"""What is on trial: a :class:`Target` makes the components that the suites drive.

A target is named in one line, ``pkg.module:factory``; calling the factory gives a Target. It
declares *capabilities*, and a suite that needs more than it has is skipped and listed:

* ``allocator``: :meth:`Target.allocator` works;
* ``tree``: :meth:`Target.tree` works;
* ``inspect``: :meth:`Target.inspect` shows the nodes of a tree, for deeper checks;
* ``events``: the tree emits KV events (``take_events``);
* ``minimal_evict``: ``evict`` stops as soon as enough is free;
* ``hicache``: :meth:`Target.hicache` makes a two-tier cache on a simulated machine;
* ``streams``: its two-tier classes are refcache's: the ordering edges can be tried one by one;
* ``fences``: copies are ordered against forwards by streams alone. Without it the state suite waits
  for each forward before it goes on, as a loop without overlap does;
* ``load_slots``: a load may be asked for while all slots of the layer counter are in use. Without
  it the driver lets those loads finish first: a loop never has more batches in flight;
* ``exact``: with the same calls it makes the choices of SGLang 0.5.10 (free page, victim);
* ``ops``: :meth:`Target.ops` gives functions with the signatures of refcache's ops;
* ``ranks``: the two-tier cache agrees with the other ranks over ``config.tp_group``;
* ``refuses_misuse``: a call that breaks the contract raises and leaves the state as it was.

Only public methods with SGLang's names and arguments are called; private fields are never needed.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.keys import RadixKey
from refcache.oracle.program.exact import check_profile
from refcache.oracle.view.host import HostView
from refcache.oracle.view.tree import TreeView
from refcache.reference.cases import TransferCase
from refcache.types import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams

CAPABILITIES = frozenset(
    {
        "allocator",
        "tree",
        "inspect",
        "events",
        "minimal_evict",
        "hicache",
        "streams",
        "fences",
        "load_slots",
        "exact",
        "ops",
        "ranks",
        "refuses_misuse",
    }
)
BUILT_IN = {
    "refcache": "refcache.oracle.target.reference:RefcacheTarget",
    "naive": "refcache.oracle.target.naive:NaiveTarget",
}


@dataclass(frozen=True)
class CacheConfig:
    """How a cache under test is built. Sizes are in tokens; ``size`` is a multiple of the page.

    ``profile`` holds every choice against the reference's (:mod:`refcache.oracle.program.exact`).
    """

    page_size: int = 1
    size: int = 16
    need_sort: bool = False
    eviction_policy: str = "lru"
    is_eagle: bool = False
    enable_kv_cache_events: bool = False
    max_requests: int = 4
    context_length: int = 64
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.size < self.page_size or self.size % self.page_size:
            raise InvalidArgument(
                f"size={self.size}, page_size={self.page_size}: expected whole pages, at least one"
            )

        if self.profile is not None:
            check_profile(self.profile)

    @property
    def pages(self) -> int:
        return self.size // self.page_size

    def init_params(self, allocator: Any, rows: Any) -> dict[str, Any]:
        """Keywords for a ``CacheInitParams`` (refcache's, or a release's) over these parts."""
        return {
            "disable": False,
            "req_to_token_pool": rows,
            "token_to_kv_pool_allocator": allocator,
            "page_size": self.page_size,
            "is_eagle": self.is_eagle,
            "eviction_policy": self.eviction_policy,
            "enable_kv_cache_events": self.enable_kv_cache_events,
        }


class Target:
    """Base of every target: override what the capabilities promise.

    The parameter classes are what the tree's methods are called with; a target whose package has
    its own (SGLang has) names them here.
    """

    name = "target"
    capabilities: frozenset[str] = frozenset()
    spec = ""
    """How :func:`resolve` found it: what a printed program calls it."""
    errors: type[Exception] | tuple[type[Exception], ...] = Exception
    """What a refusal of misuse may raise."""

    RadixKey: Any = RadixKey
    MatchPrefixParams: Any = MatchPrefixParams
    InsertParams: Any = InsertParams
    EvictParams: Any = EvictParams
    InitLoadBackParams: Any = InitLoadBackParams

    def allocator(self, config: CacheConfig) -> Any:
        """A fresh allocator of ``config.size`` tokens, all free.

        Its allocations give int64 ``[n]`` slots on the pool's device, or None. ``free`` takes such
        slots in any order, several of a page or one.
        """
        raise NotImplementedError

    def free_lists(self, allocator: Any) -> Sequence[Sequence[int]] | None:
        """The free pages of an allocator, in the order in which they will go, list by list.

        With what the views show, that is all that decides its later answers; so a search of all
        programs can tell states apart, and end. Reads SGLang's field names. None: not known; then a
        search ends at a depth, and is never called complete.
        """
        lists = [getattr(allocator, name, None) for name in ("free_pages", "release_pages")]
        if not isinstance(lists[0], torch.Tensor):
            return None
        lists += getattr(allocator, "free_group", ())
        return [pages.tolist() for pages in lists if isinstance(pages, torch.Tensor)]

    def req_to_token_pool(self, config: CacheConfig) -> Any:
        """Request rows; by default refcache's own pool."""
        from refcache.pool import ReqToTokenPool

        return ReqToTokenPool(config.max_requests, config.context_length, "cpu", False)

    def tree(self, config: CacheConfig, allocator: Any, req_to_token_pool: Any) -> Any:
        """A fresh, empty tree cache over ``allocator`` (a wrapper of one made here) and rows."""
        raise NotImplementedError

    def inspect(self, tree: Any) -> TreeView:
        """The nodes of ``tree`` (capability ``inspect``)."""
        raise NotImplementedError

    def hicache(
        self, config: Any, runtime: Any, forward_stream: Any, wrap: Callable[[Any], Any]
    ) -> Any:
        """A fresh two-tier cache (capability ``hicache``).

        Args:
            config: a :class:`refcache.oracle.target.config.HiCacheConfig`.
            runtime: the simulated machine; all copies are launches on it.
            forward_stream: where forwards will run.
            wrap: to be applied to the allocator before anything is built over it.

        Returns:
            A :class:`refcache.oracle.target.config.HiCacheParts`; its pool holds int64 elements.
        """
        raise NotImplementedError

    def inspect_host(self, tree: Any) -> HostView:
        """The host tier of ``tree`` (capability ``hicache``)."""
        raise NotImplementedError

    def ops(self) -> Any:
        """An object with some of refcache's five ops as attributes (capability ``ops``)."""
        raise NotImplementedError

    def adapt(self, case: TransferCase) -> TransferCase:
        """The case nearest to this one that the target's copies can express."""
        return case

    def named(self) -> str:
        """What to give :func:`resolve` for a target like this one."""
        return self.spec or f"{type(self).__module__}:{type(self).__qualname__}"

    def lacks(self, needs: frozenset[str]) -> list[str]:
        """The capabilities among ``needs`` that this target does not declare."""
        return sorted(needs - self.capabilities)


def resolve(spec: str) -> Target:
    """The target named ``spec``: ``"refcache"``, ``"naive"``, ``"sglang:VERSION"``,
    ``"pkg.module:factory"``, or ``"pkg.module:function"`` for one op.

    Raises:
        InvalidArgument: it does not import, the name is missing, or calling it gives no Target.
        MissingExtra: a release that is not unpacked.
    """
    if spec == "sglang" or spec.startswith("sglang:"):
        from refcache.peers import peer_target

        peer = peer_target(spec)
        peer.spec = spec
        return peer
    module_name, colon, attribute = BUILT_IN.get(spec, spec).partition(":")
    if not (module_name and colon and attribute):
        raise InvalidArgument(
            f"target {spec!r}: expected one of {', '.join(BUILT_IN)}, sglang[:VERSION], "
            "pkg.module:factory or pkg.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InvalidArgument(f"target {spec!r} does not import: {error!r}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise InvalidArgument(f"target {spec!r}: {module_name} has no factory {attribute!r}")
    from refcache.oracle.target.ops import ops_target

    try:
        target: Any = ops_target(factory)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"target {spec!r}: no factory, which takes no argument; as an op: {error}"
        ) from None
    try:
        target = target or factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InvalidArgument(f"target {spec!r}: calling the factory: {error!r}") from error
    if not isinstance(target, Target):
        raise InvalidArgument(
            f"target {spec!r}: the factory gave {type(target).__name__}, expected a "
            "refcache.oracle.Target"
        )
    unknown = target.capabilities - CAPABILITIES
    if unknown:
        raise InvalidArgument(
            f"target {spec!r}: unknown capabilities {sorted(unknown)}, expected some of "
            f"{sorted(CAPABILITIES)}"
        )
    target.spec = spec
    return target
