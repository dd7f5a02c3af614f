"""Parameter and result types, configuration, and the Protocols that let calls go down only.

Names and fields are SGLang 0.5.10's. A result holds opaque node handles: callers pass them back,
they do not look inside.
"""

from array import array
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from refcache.errors import InvalidArgument, UnknownName
from refcache.keys import RadixKey
from refcache.reference import LAYOUTS

if TYPE_CHECKING:
    import torch

    from refcache.runtime.api import Runtime

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
IO_BACKENDS = ("kernel", "direct", "auto")
HIT_POLICIES = ("per_visit", "per_request", "chunks_count")
PREFETCH_STOP_POLICIES = ("best_effort", "wait_complete", "timeout")
"""When a prefetch from storage is given up: when the request's turn comes; never; or then, but not
before a time that grows with the pages."""
HIT_REFRESHES = ("path", "used")
MAMBA_STRATEGIES = ("auto", "no_buffer", "extra_buffer")
SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random", "routing-key")
EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")

Clock = Callable[[], float]


def check_write_policy(name: str) -> str:
    """The name of a write policy.

    Raises:
        UnknownName: there is none of that name.
    """
    if name not in WRITE_POLICIES:
        raise UnknownName("write policy", name, WRITE_POLICIES)
    return name


class SpeculativeAlgorithm(Enum):
    """Which algorithm drafts tokens. Drafting itself is not modelled: EAGLE's keys are bigrams, and
    any algorithm needs the pool's KV copy."""

    NONE = auto()
    EAGLE = auto()
    EAGLE3 = auto()
    STANDALONE = auto()
    NGRAM = auto()

    @classmethod
    def from_string(cls, name: str | None) -> "SpeculativeAlgorithm":
        """The algorithm of that name, in any case; None is NONE, and "NEXTN" is EAGLE.

        >>> SpeculativeAlgorithm.from_string("eagle3").is_eagle()
        True

        Raises:
            UnknownName: there is none.
        """
        known = {one.name: one for one in cls if one is not cls.NONE} | {"NEXTN": cls.EAGLE}
        if name is None:
            return cls.NONE
        if name.upper() not in known:
            raise UnknownName("speculative_algorithm", name, known)
        return known[name.upper()]

    def is_none(self) -> bool:
        return self is SpeculativeAlgorithm.NONE

    def is_eagle(self) -> bool:
        """EAGLE, or EAGLE3: keys are bigrams."""
        return self in (SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3)


class LogicalClock:
    """A clock that counts its readings: 1, 2, 3, ... Runs repeat exactly; no two readings tie."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


@dataclass
class ServerArgs:
    """The server arguments that shape the cache; names and defaults as in SGLang's ``ServerArgs``.

    SGLang leaves ``page_size``, ``max_running_requests``, ``chunked_prefill_size``,
    ``context_length``, ``mem_fraction_static`` and ``device`` to be found out when it starts, from
    the card and the model; here they have fixed defaults. Sizes are in tokens unless the name says
    otherwise.

    Attributes:
        model_path: kept; no model is loaded from it.
        chunked_prefill_size: None, or -1, cuts no prompt.
        prefill_max_requests: requests a prefill batch at most; None: no bound.
        enable_priority_scheduling: when the batch is full, a request takes the memory of running
            ones whose priority is lower by more than ``priority_scheduling_preemption_threshold``,
            unless ``disable_priority_preemption``. Larger values are higher, unless
            ``schedule_low_priority_values_first``.
        dp_size: with ``enable_dp_attention``, groups of ranks with requests of their own.
        enable_pdmux: the device pool gets no alternative stream.
        hicache_storage_backend: a name, or a :class:`refcache.storage.HiCacheStorage`; None: the
            host is the last tier. ``hicache_storage_prefetch_policy``: when a prefetch is given up.
        served_model_name: told to the storage backend.
        swa_full_tokens_ratio: window slots / full slots, for models with sliding windows.
        max_mamba_cache_size: states, for models with recurrent layers; None: as many as
            ``max_running_requests`` need at most, with two more each for the tree.
        mamba_scheduler_strategy: "no_buffer" caches a request's running state (pages of one token,
            no overlap); "extra_buffer" snapshots of it, in two more slots. "auto" is "no_buffer".
        mamba_track_interval: with the extra buffer, a decode leaves a snapshot each so many tokens.
        mamba_cache_chunk_size: prefills can leave one at multiples of so many tokens; None: the
            larger of 64 and the page size, as in SGLang, where it is no argument.
        hicache_size: GB a rank; wins over ``hicache_ratio`` (host tokens / device tokens) above 0.

    Raises:
        InvalidArgument: a size below 1 or not in whole pages; arguments that exclude each other.
        UnknownName: a policy, layout, backend or algorithm that does not exist.
    """

    model_path: str = ""
    _: KW_ONLY
    page_size: int = 1
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int | None = 8192
    context_length: int = 131072
    mem_fraction_static: float = 0.9
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    schedule_policy: str = "fcfs"
    enable_priority_scheduling: bool = False
    disable_priority_preemption: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    prefill_max_requests: int | None = None
    schedule_conservativeness: float = 1.0
    disable_overlap_schedule: bool = False
    disable_radix_cache: bool = False
    radix_eviction_policy: str = "lru"
    enable_kv_cache_events: bool = False
    speculative_algorithm: str | None = None
    tp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False
    enable_memory_saver: bool = False
    enable_pdmux: bool = False
    enable_metrics: bool = False
    swa_full_tokens_ratio: float = 0.8
    max_mamba_cache_size: int | None = None
    mamba_scheduler_strategy: str = "auto"
    mamba_track_interval: int = 256
    mamba_cache_chunk_size: int | None = None
    enable_hierarchical_cache: bool = False
    hicache_ratio: float = 2.0
    hicache_size: int = 0
    hicache_write_policy: str = "write_through"
    hicache_io_backend: str = "auto"
    hicache_mem_layout: str = "layer_first"
    hicache_storage_backend: Any = None
    hicache_storage_prefetch_policy: str = "best_effort"
    hicache_storage_backend_extra_config: str | None = None
    served_model_name: str | None = None

    def __post_init__(self) -> None:
        at_least_one = ["page_size", "max_running_requests", "max_prefill_tokens", "context_length"]
        at_least_one += ["tp_size", "dp_size"]
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}={getattr(self, name)}: expected at least 1")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise InvalidArgument(
                f"max_total_tokens={self.max_total_tokens}: expected at least one page "
                f"({self.page_size})"
            )
        if self.chunked_prefill_size == -1:
            self.chunked_prefill_size = None
        chunk = self.chunked_prefill_size
        if chunk is not None and (chunk < self.page_size or chunk % self.page_size):
            raise InvalidArgument(
                f"chunked_prefill_size={chunk}: expected a multiple of page_size={self.page_size}"
            )
        choices = {
            "radix_eviction_policy": EVICTION_POLICIES,
            "hicache_write_policy": WRITE_POLICIES,
            "hicache_io_backend": IO_BACKENDS,
            "hicache_mem_layout": LAYOUTS,
            "hicache_storage_prefetch_policy": PREFETCH_STOP_POLICIES,
            "schedule_policy": SCHEDULE_POLICIES,
            "mamba_scheduler_strategy": MAMBA_STRATEGIES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise UnknownName(name, getattr(self, name), known)
        SpeculativeAlgorithm.from_string(self.speculative_algorithm)
        if self.enable_mamba_extra_buffer and (
            self.mamba_track_interval < 2 or self.mamba_track_interval % self.page_size
        ):
            raise InvalidArgument(
                f"mamba_track_interval={self.mamba_track_interval}: expected at least 2, in whole "
                f"pages of {self.page_size}"
            )
        if self.enable_hierarchical_cache and self.disable_radix_cache:
            raise InvalidArgument(
                "enable_hierarchical_cache with disable_radix_cache: expected one of both at most"
            )
        if self.enable_dp_attention and self.tp_size % self.dp_size:
            raise InvalidArgument(
                f"dp_size={self.dp_size} with enable_dp_attention: expected a divisor of "
                f"tp_size={self.tp_size}"
            )

    @property
    def enable_mamba_extra_buffer(self) -> bool:
        """Requests keep snapshots of their state in slots of their own."""
        return self.mamba_scheduler_strategy == "extra_buffer"


@dataclass
class CacheInitParams:
    """Constructor arguments of every tree cache; the last five are refcache's own.

    Attributes:
        enable_mamba_extra_buffer: requests keep snapshots of their state in slots of their own, at
            ``mamba_last_track_seqlen`` tokens (``MambaRadixCache``).
        sliding_window_size: how many tokens a window layer looks back (``SWARadixCache``).
        mamba_cache_chunk_size: prefills can leave a state at multiples of so many tokens; None:
            the larger of 64 and the page size.
        hit_refreshes: which states and windows of a path count as used by a hit: all ("path", as in
            SGLang 0.5.10), or those that the request goes on with ("used", as in 0.5.23).
    """

    disable: bool
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    page_size: int
    is_eagle: bool = False
    tp_cache_group: Any = None
    eviction_policy: str = "lru"
    disable_finished_insert: bool = False
    enable_metrics: bool = False
    enable_kv_cache_events: bool = False
    enable_mamba_extra_buffer: bool = False
    pp_rank: int = 0
    pp_size: int = 1
    chunked_prefill_size: int | None = None
    sliding_window_size: int | None = None
    cache_ttl_seconds: float | None = None
    clock: Clock | None = None
    hit_policy: str = "per_visit"
    runtime: "Runtime | None" = None
    mamba_cache_chunk_size: int | None = None
    hit_refreshes: str = "path"


@dataclass
class MatchPrefixParams:
    """``cow_mamba``: copy the state that was found for ``req``; of no meaning to a plain tree."""

    key: RadixKey
    cow_mamba: bool = False
    req: Any = None


class MatchResult(NamedTuple):
    """What a prefix match found.

    Attributes:
        device_indices: int64 ``[hit]``: device slots of the longest prefix on the device. The slots
            stay valid until the next ``evict``, unless ``last_device_node`` is locked.
        last_device_node, last_host_node: handles; the same one without a host tier.
        host_hit_length: tokens beyond ``device_indices`` that are only on the host.
        mamba_branching_seqlen: KV was found of at least so many tokens, where a state is missing.
    """

    device_indices: "torch.Tensor"
    last_device_node: Any
    last_host_node: Any
    host_hit_length: int = 0
    mamba_branching_seqlen: int | None = None
    cache_protected_len: int | None = None


@dataclass
class InsertParams:
    """One insert.

    Attributes:
        value: int64 device slots, one a key element.
        mamba_value: the slot of the state after the key, int64 ``[1]``; None for a tree without
            states.
        prev_prefix_len, swa_evicted_seqlen: of no meaning to a plain tree, as in SGLang; else the
            tokens whose slots are the tree's already, and those whose window slots are gone.
        chunked: made by a prefill that goes on.
        priority: None is 0, as in SGLang.
        counted_len: tokens of the key that a hit of the same request has counted already (read
            under the ``per_request`` hit policy).
    """

    key: RadixKey
    value: "torch.Tensor | None" = None
    mamba_value: "torch.Tensor | None" = None
    prev_prefix_len: int = 0
    swa_evicted_seqlen: int = 0
    chunked: bool = False
    priority: int | None = 0
    counted_len: int = 0


@dataclass
class InsertResult:
    """``prefix_len``: tokens that were on the device before; their new slots stay the caller's."""

    prefix_len: int
    mamba_exist: bool = False


@dataclass
class EvictParams:
    """``num_tokens``: how many device tokens to free, at least.

    The others ask for what a plain tree has none of; it frees none of it, as in SGLang.
    """

    num_tokens: int
    swa_num_tokens: int = 0
    mamba_num: int = 0


@dataclass
class EvictResult:
    """``num_tokens_evicted``: by how much the allocator's free space grew."""

    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0


@dataclass
class IncLockRefResult:
    """``delta``: minus the tokens that are newly protected."""

    delta: int = 0
    swa_uuid_for_lock: int | None = None


@dataclass
class DecLockRefParams:
    """Accepted for callers written for SGLang; a plain tree needs nothing from it."""

    swa_uuid_for_lock: int | None = None


@dataclass
class DecLockRefResult:
    """``delta``: the tokens that are newly evictable."""

    delta: int = 0


@dataclass
class InitLoadBackParams:
    """``mem_quota``: device tokens the request may still take; None means no bound."""

    last_host_node: Any
    host_hit_length: int
    mem_quota: int | None = None
    req: Any = None


@runtime_checkable
class CacheReq(Protocol):
    """What a tree cache reads and writes of a request (the engine's ``Req`` is one).

    ``fill_ids`` are the tokens whose KV exists or is being computed; the row ``req_pool_idx`` of
    ``ReqToTokenPool`` holds their slots. ``prefix_indices``: slots of tokens that need no
    computing. ``cache_protected_len``: tokens of the row that the tree owns. ``last_node``: the
    handle this request has locked. ``cache_counted_len``: tokens whose hit it has counted.
    ``kv_committed_len``: what ``pop_committed_kv_cache`` will say; ``kv_committed_freed``: it has
    been asked (a request without these two is asked before anything else is done).
    """

    req_pool_idx: int | None
    origin_input_ids: "array[int]"
    output_ids: "array[int]"
    fill_ids: "array[int]"
    extra_key: str | None
    prefix_indices: "torch.Tensor"
    cache_protected_len: int
    last_node: Any
    priority: int | None
    cache_counted_len: int
    kv_committed_len: int
    kv_committed_freed: bool

    def pop_committed_kv_cache(self) -> int:
        """The number of tokens with KV; may be asked once."""
        ...
