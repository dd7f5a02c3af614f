"""What is on trial: a :class:`Target` makes the components that the suites drive.

A target is named in one line, ``pkg.module:factory``; calling the factory gives a Target. It
declares *capabilities*, and a suite that needs more than it has is skipped and listed:

* ``allocator``: :meth:`Target.allocator` works;
* ``tree``: :meth:`Target.tree` works;
* ``inspect``: :meth:`Target.inspect` shows the nodes of a tree, for deeper checks;
* ``events``: the tree emits KV events (``take_events``);
* ``mamba``: :meth:`Target.mamba` makes a tree of tokens and recurrent states;
* ``swa``: :meth:`Target.swa` makes a tree over a full and a sliding-window pool;
* ``minimal_evict``: ``evict`` stops as soon as enough is free;
* ``hicache``: :meth:`Target.hicache` makes a two-tier cache on a simulated machine;
* ``storage_tier``: that cache has storage below it (:meth:`Target.attach_storage`);
* ``streams``: its two-tier classes are refcache's: the ordering edges can be tried one by one;
* ``fences``: copies are ordered against forwards by streams alone. Without it the state suite waits
  for each forward before it goes on, as a loop without overlap does;
* ``bare_calls``: ``insert`` and ``reset`` may come at any time, also for KV that a forward is still
  computing and while copies run. Without it, and with ``fences``, the suites make only the calls
  that an overlap loop makes;
* ``load_slots``: a load may be asked for while all slots of the layer counter are in use. Without
  it the driver lets those loads finish first: a loop never has more batches in flight;
* ``exact``: with the same calls it makes the choices of SGLang 0.5.10 (free page, victim);
* ``offload``: :meth:`Target.offload` makes a manager of keyed blocks in a second tier;
* ``storage``: :meth:`Target.storage` makes a storage backend; ``durable``: it keeps its pages in
  files, and they outlive a crash;
* ``sequences``: :meth:`Target.sequences` makes a cache that is seen through its sequences;
* ``ops``: :meth:`Target.ops` gives functions with the signatures of refcache's ops;
* ``ranks``: the two-tier cache agrees with the other ranks over ``config.tp_group``;
* ``refuses_misuse``: a call that breaks the contract raises and leaves the state as it was;
* ``faults``: a call inside which something fails raises and leaves the state as it was, or as the
  two-tier cache's contract says (:mod:`refcache.oracle.drivers.hicache.faults`).

Only public methods with SGLang's names and arguments are called; private fields are never needed.
What a target cannot be built with is said by its ``traits``, or by a ``NotImplementedError`` of the
method that builds it: then that configuration is passed over, and a suite without one is skipped.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from refcache.keys import RadixKey
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.offload.contract import OffloadTraits
from refcache.oracle.target.storage.contract import StorageTraits
from refcache.oracle.target.traits import Traits
from refcache.types import (
    DecLockRefParams,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)

if TYPE_CHECKING:
    from refcache.oracle.target.offload.contract import OffloadManager
    from refcache.oracle.view.component import ComponentView
    from refcache.oracle.view.host import HostView
    from refcache.oracle.view.tree import TreeView
    from refcache.reference.cases import TransferCase

SOON = '"prefetch_timeout_base": 0.03}'
"""Stop policy "timeout": a few steps of a clock that counts them."""
CAPABILITIES = frozenset(
    {
        "allocator",
        "tree",
        "inspect",
        "events",
        "minimal_evict",
        "mamba",
        "swa",
        "hicache",
        "streams",
        "fences",
        "bare_calls",
        "load_slots",
        "exact",
        "faults",
        "offload",
        "ops",
        "ranks",
        "refuses_misuse",
        "storage",
        "durable",
        "sequences",
        "storage_tier",
    }
)


class Target:
    """Base of every target: override what the capabilities promise.

    The parameter classes are what the tree's methods are called with; a target whose package has
    its own (SGLang has) names them here.
    """

    name = "target"
    capabilities: frozenset[str] = frozenset()
    spec = ""
    """How ``resolve`` found it: what a printed program calls it."""
    traits = Traits()
    """What else it says of itself: the suites draw within it."""
    inner_steps: tuple[str, ...] = ()
    """Functions that calls go through and that may fail (hashes, say), as ``module:name``."""
    errors: type[Exception] | tuple[type[Exception], ...] = Exception
    """What a refusal of misuse may raise."""
    offload_traits = OffloadTraits()
    storage_traits = StorageTraits()

    RadixKey: Any = RadixKey
    MatchPrefixParams: Any = MatchPrefixParams
    InsertParams: Any = InsertParams
    EvictParams: Any = EvictParams
    DecLockRefParams: Any = DecLockRefParams
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
        import torch

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

    def inspect(self, tree: Any) -> "TreeView":
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

    def mamba(self, config: Any, wrap: Callable[[Any], Any], states: Callable[[Any], Any]) -> Any:
        """A fresh tree of tokens and states (capability ``mamba``).

        Args:
            config: a :class:`refcache.oracle.target.config.MambaConfig`.
            wrap, states: to be applied to the allocator, and to the state pool inside the rows.

        Returns:
            A :class:`refcache.oracle.target.config.MambaParts`.
        """
        raise NotImplementedError

    def swa(self, config: Any, wrap: Callable[[Any], Any]) -> Any:
        """A fresh tree over a full and a sliding-window pool (capability ``swa``).

        Args:
            config: a :class:`refcache.oracle.target.config.SWAConfig`.
            wrap: to be applied to the allocator of both pools.

        Returns:
            The tree, the wrapped allocator and the rows.
        """
        raise NotImplementedError

    def inspect_component(self, tree: Any) -> "ComponentView":
        """What a tree of states, or of windows, has beside full KV."""
        raise NotImplementedError

    def inspect_host(self, tree: Any) -> "HostView":
        """The host tier of ``tree`` (capability ``hicache``)."""
        raise NotImplementedError

    def attach_storage(self, tree: Any, store: Any, config: Any) -> bool:
        """Attach ``store`` below a two-tier cache (capability ``storage_tier``).

        Threads that talk to it are threads of the cache's simulated machine. By default with
        SGLang's own call, which is given the store itself.

        Args:
            store: a :class:`refcache.storage.HiCacheStorage`.
            config: a :class:`refcache.oracle.target.config.StorageTierConfig`.
        """
        options = f'{{"prefetch_threshold": {config.prefetch_threshold}, ' + SOON
        attached: bool = tree.attach_storage_backend(store, options, None, config.stop_policy)[0]
        if config.batch is not None:
            tree.cache_controller.storage_batch_size = config.batch
        return attached

    def page_keys(self, tokens: Sequence[int], extra_key: str | None, config: Any) -> list[str]:
        """Under which keys the pages of a prefix are stored (capability ``storage_tier``)."""
        from refcache.keys import page_hashes

        key = RadixKey(list(tokens), extra_key, is_bigram=config.is_eagle)
        return page_hashes(key, config.page_size)

    def offload(self, config: CacheConfig) -> "OffloadManager":
        """A fresh manager of ``config.pages`` blocks (capability ``offload``).

        See :mod:`refcache.oracle.target.offload.contract`; what is special about it is said in
        ``offload_traits``.
        """
        raise NotImplementedError

    def storage(self, engine: Mapping[str, Any], path: str, max_bytes: int | None = None) -> Any:
        """A storage backend of an engine over the directory ``path`` (capability ``storage``).

        See :mod:`refcache.oracle.target.storage.contract`; what is special about it is said in
        ``storage_traits``. ``engine``: fields of a ``HiCacheStorageConfig``, and the ``layout`` of
        the pool that will be registered. ``max_bytes``: a bound for its files, if it keeps one.
        """
        raise NotImplementedError

    def sequences(self, config: Any) -> Any:
        """A fresh, empty cache as sequences see it (capability ``sequences``).

        Args:
            config: a :class:`refcache.oracle.target.config.SequencesConfig`.

        Returns:
            A :class:`refcache.oracle.target.sequences.contract.Sequences`.
        """
        raise NotImplementedError

    def ops(self) -> Any:
        """An object with some of refcache's five ops as attributes (capability ``ops``)."""
        raise NotImplementedError

    def adapt(self, case: "TransferCase") -> "TransferCase":
        """The case nearest to this one that the target's copies can express."""
        return case

    def named(self) -> str:
        """What to give ``resolve`` for a target like this one."""
        return self.spec or f"{type(self).__module__}:{type(self).__qualname__}"

    @property
    def takes_bare_calls(self) -> bool:
        """Whether ``insert`` and ``reset`` may come at any time: with ``bare_calls``, or without
        ``fences``, where each forward is waited for."""
        return not self.capabilities >= {"fences"} or self.capabilities >= {"bare_calls"}

    def lacks(self, needs: frozenset[str]) -> list[str]:
        """The capabilities among ``needs`` that this target does not declare."""
        return sorted(needs - self.capabilities)
