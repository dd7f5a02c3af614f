"""How a cache under test is built, and the parts of a two-tier one that a target makes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from refcache.errors import InvalidArgument, UnknownName

PROFILES = {"sglang-0.5.10": "refcache"}
"""Name of a profile -> the target that defines it."""
DEFAULT_PROFILE = "sglang-0.5.10"


def check_profile(name: str) -> None:
    """Refuse what names no profile.

    Raises:
        UnknownName: with the names that there are.
    """
    if name not in PROFILES:
        raise UnknownName("profile", name, PROFILES)


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


@dataclass(frozen=True)
class SequencesConfig(CacheConfig):
    """How a cache is built that is seen through its sequences.

    ``host_size``: tokens of a tier below, for targets with the trait ``host_tier``; 0: none.
    ``write_policy`` is the one of that tier.
    """

    host_size: int = 0
    write_policy: str = "write_through"


@dataclass(frozen=True)
class HiCacheConfig(CacheConfig):
    """How a two-tier cache under test is built.

    ``host_size`` in tokens, whole pages, more than ``size``; 0 means one page more. ``delay``:
    launches wait until the program or the cache makes them run; else they run at once.
    ``reentrant``: every allocation, on either tier, first evicts all that can be evicted there.
    ``fault``: each call is first made with its inner step of that number raising, then the next,
    and so on; 0: none is. ``fault_calls``: of so many calls one is tried so. ``fault_tensors``:
    torch's calls are inner steps too.
    ``small_loads``: with the I/O backend "kernel", a load of small layers may be one launch for all
    of them; False asks for one launch a layer. It is for the reference; other targets ignore it.
    """

    host_size: int = 0
    write_policy: str = "write_through"
    layout: str = "layer_first"
    io_backend: str = "kernel"
    load_back_threshold: int = 1
    hit_policy: str = "per_visit"
    mla: bool = False
    tp_group: Any = None
    delay: bool = True
    reentrant: bool = False
    small_loads: bool = True
    fault: int = 0
    fault_calls: int = 1
    fault_tensors: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.host_size == 0:
            object.__setattr__(self, "host_size", self.size + self.page_size)
        if self.host_size <= self.size or self.host_size % self.page_size:
            raise InvalidArgument(
                f"host_size={self.host_size}: expected whole pages, more than size={self.size}"
            )


@dataclass(frozen=True)
class MambaConfig(CacheConfig):
    """How a cache of tokens and recurrent states is built.

    ``states``: slots of the state pool, at least one a request. ``extra_buffer``: states are taken
    on the way into buffers of the request, two with ``overlap``, else one; without it the page size
    is 1. ``chunk``: the grid, in tokens, on which a state can be taken; whole pages.
    """

    states: int = 6
    extra_buffer: bool = False
    overlap: bool = True
    chunk: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.states < self.max_requests:
            raise InvalidArgument(
                f"states={self.states}: expected at least one for each of {self.max_requests} "
                "requests"
            )
        if self.chunk < 1 or self.chunk % self.page_size:
            raise InvalidArgument(
                f"chunk={self.chunk}: expected whole pages of {self.page_size} tokens"
            )
        if self.page_size > 1 and not self.extra_buffer:
            raise InvalidArgument(f"page_size={self.page_size}: expected 1, or extra_buffer=True")

    @property
    def buffers(self) -> int:
        """States that a request holds beside its running one."""
        return (2 if self.overlap else 1) if self.extra_buffer else 0


@dataclass(frozen=True)
class SWAConfig(CacheConfig):
    """How a cache with sliding-window layers is built.

    ``swa_size``: window slots, in tokens, whole pages; 0 means ``size``. ``window``: how many
    tokens such a layer looks back.
    """

    swa_size: int = 0
    window: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.swa_size == 0:
            object.__setattr__(self, "swa_size", self.size)
        if self.swa_size < self.page_size or self.swa_size % self.page_size:
            raise InvalidArgument(
                f"swa_size={self.swa_size}: expected whole pages of {self.page_size} tokens"
            )
        if self.window < 1:
            raise InvalidArgument(f"window={self.window}: expected at least 1 token")


MAMBA_LAYERS = (0, 2)
"""The layers of the model on trial that have a state."""
STATE_SHAPE = (((2, 1), (1, 2)), (1, 2, 1))
"""Of one state in one layer: the shapes of two convolutions, and that of the recurrence."""


class MambaParts(NamedTuple):
    """A tree over ``allocator`` and ``rows``, whose states are in ``states``, a pool of slots.

    ``planes``: the tensors of a state, each int64 ``[layers, slots + 1, ...]``.
    """

    tree: Any
    allocator: Any
    rows: Any
    states: Any
    planes: Any


@dataclass(frozen=True)
class StorageTierConfig(HiCacheConfig):
    """How a cache of three tiers under test is built.

    ``stop_policy``: of prefetches, whose tokens are at least ``prefetch_threshold``. ``batch``:
    pages that the controller moves at once; None: as many as it likes. ``fault_rate``: of each
    kind of fault of the store, of 1, by ``fault_seed``; it is for the suite itself.
    """

    stop_policy: str = "wait_complete"
    prefetch_threshold: int = 1
    batch: int | None = None
    fault_rate: float = 0.0
    fault_seed: int = 0


class HiCacheParts(NamedTuple):
    """What a target makes: a tree over ``allocator`` and ``rows``, whose KV is in ``pool``.

    ``counter``: the layer counter whose ``set_consumer`` the worker calls before a forward.
    ``host_pool``: its ``alloc`` is watched for refusals; ``host_planes``: its buffers, one a plane.
    """

    tree: Any
    allocator: Any
    rows: Any
    pool: Any
    host_pool: Any
    host_planes: Any
    counter: Any
