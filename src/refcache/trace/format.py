"""The trace format: what was called on a cache and what it answered, one JSON object a line.

The first line is a :class:`Header`. Every other line is a :class:`Line`: one outermost call with
its arguments and its result, and in ``inner``, in order, what went over the borders of its parts
while it ran: allocations and frees on either tier, copies that were submitted, copies that were
acknowledged. The last line is :class:`End`; without it the recording was cut off.

Slots are token slots, tokens are integers (pairs for a bigram key), node handles are small numbers
given in the order in which they were first seen.

Not recorded: KV bytes, time, storage below the host. :mod:`refcache.trace.file` reads and
writes the files.
"""

from typing import Annotated

from msgspec import Meta, Struct

from refcache.trace.events.kinds import KVEvent

FORMAT = "refcache-trace"
VERSION = 1

Count = Annotated[int, Meta(ge=0, le=2**40)]
Slots = list[Annotated[int, Meta(ge=-(2**62), le=2**62)]]
Tokens = list[int | tuple[int, int]]


class Header(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What was recorded, and how it was built. Sizes are in tokens, whole pages.

    Attributes:
        host_size: of the host pool; None for one tier.
        write_policy: of a two-tier cache.
        subject: the class that was wrapped; ``versions``: of the packages that made the trace.
        excerpt: lines were left out (:func:`refcache.trace.shrink`): numbers skip, and only
            what follows from the lines that are there is judged.
    """

    format: str
    version: int
    page_size: Annotated[int, Meta(ge=1, le=2**20)]
    size: Count
    host_size: Count | None = None
    is_eagle: bool = False
    write_policy: str | None = None
    subject: str = ""
    versions: dict[str, str] = {}
    excerpt: bool = False


class Call(Struct, tag_field="op", kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of every call. ``error``: the exception it ended with; its results are then absent."""

    error: str | None = None


class Alloc(Call, tag="alloc"):
    """Whole pages (page size 1: tokens). ``slots`` is None for a refusal, here as everywhere."""

    need_size: int
    slots: Slots | None = None


class AllocExtend(Call, tag="alloc_extend"):
    """A batch of requests grows; lengths in tokens, ``last_loc`` the last slot of each."""

    prefix_lens: Slots
    seq_lens: Slots
    last_loc: Slots
    slots: Slots | None = None


class AllocDecode(Call, tag="alloc_decode"):
    """A batch of requests grows by one token each, to ``seq_lens``."""

    seq_lens: Slots
    last_loc: Slots
    slots: Slots | None = None


class Free(Call, tag="free"):
    """Every page that has one of ``slots`` is given back."""

    slots: Slots


class FreeGroupBegin(Call, tag="free_group_begin"):
    """Frees are queued from here on."""


class FreeGroupEnd(Call, tag="free_group_end"):
    """What was queued is free."""


class Clear(Call, tag="clear"):
    """Every device page is free."""


class BackupState(Call, tag="backup_state"):
    """``state`` numbers the returned value, for ``restore_state``."""

    state: int = 0


class RestoreState(Call, tag="restore_state"):
    """Every allocation and free since that state is undone."""

    state: int


class MatchPrefix(Call, tag="match_prefix"):
    """``node``, ``host_node``: the last nodes on the device and on the host."""

    tokens: Tokens
    extra_key: str | None = None
    slots: Slots = []
    node: int = 0
    host_node: int = 0
    host_hit_length: int = 0


class Insert(Call, tag="insert"):
    """``slots``: one an element; ``prefix_len``: how many were on the device before."""

    tokens: Tokens
    slots: Slots
    extra_key: str | None = None
    chunked: bool = False
    priority: int = 0
    prefix_len: int = 0


class Evict(Call, tag="evict"):
    """Device tokens, asked for and freed."""

    num_tokens: int
    num_tokens_evicted: int = 0


class IncLockRef(Call, tag="inc_lock_ref"):
    """``delta``: by how much the unlocked tokens grew (None where it is not returned)."""

    node: int
    delta: int | None = None


class DecLockRef(Call, tag="dec_lock_ref"):
    """As :class:`IncLockRef`."""

    node: int
    delta: int | None = None


class CacheUnfinishedReq(Call, tag="cache_unfinished_req"):
    """``row``: slots of ``tokens`` before the call, ``new_row``: after it."""

    tokens: Tokens
    row: Slots
    cache_protected_len: int
    last_node: int
    extra_key: str | None = None
    chunked: bool = False
    new_row: Slots = []
    new_protected_len: int = 0
    new_node: int = 0


class CacheFinishedReq(Call, tag="cache_finished_req"):
    """``tokens`` and ``row`` are None if the cache never asked how many tokens were computed."""

    cache_protected_len: int
    last_node: int
    tokens: Tokens | None = None
    row: Slots | None = None
    extra_key: str | None = None
    is_insert: bool = True


class Reset(Call, tag="reset"):
    """The tree forgets everything; the allocator is cleared by a call of its own."""


class InitLoadBack(Call, tag="init_load_back"):
    """``slots``: of the tokens that are loaded; ``node``: the last one on the device then."""

    host_node: int
    host_hit_length: int
    mem_quota: int | None = None
    slots: Slots = []
    node: int = 0


class EvictHost(Call, tag="evict_host"):
    """Host tokens, asked for and freed."""

    num_tokens: int
    num_tokens_evicted: int = 0


class Poll(Call, tag="poll"):
    """One of the calls that look for finished copies, by name."""

    method: str


class TakeEvents(Call, tag="take_events"):
    """The KV events since the last such call."""

    events: list[KVEvent] = []


class HostAlloc(Call, tag="host_alloc"):
    """Whole pages of the host pool."""

    need_size: int
    slots: Slots | None = None


class HostFree(Call, tag="host_free"):
    """Pages of the host pool are given back."""

    slots: Slots


class HostClear(Call, tag="host_clear"):
    """Every host page is free."""


class Write(Call, tag="write"):
    """A copy to the host is submitted; ``id`` is what its acknowledgement names."""

    id: int
    slots: Slots
    host_slots: Slots | None = None


class Load(Call, tag="load"):
    """A copy to the device is submitted."""

    id: int
    host_slots: Slots
    slots: Slots | None = None


class StartLoading(Call, tag="start_loading"):
    """The loads so far start as one. ``index``: of their layer events, -1 for none."""

    index: int = -1


class Ack(Call, tag="ack"):
    """Copies of a ``kind`` (``write``, ``load``) are over, for all who are asked."""

    kind: str
    ids: list[int]


class End(Call, tag="end"):
    """The recording was closed after this many lines."""

    lines: int


AnyCall = (
    Alloc
    | AllocExtend
    | AllocDecode
    | Free
    | FreeGroupBegin
    | FreeGroupEnd
    | Clear
    | BackupState
    | RestoreState
    | MatchPrefix
    | Insert
    | Evict
    | IncLockRef
    | DecLockRef
    | CacheUnfinishedReq
    | CacheFinishedReq
    | Reset
    | InitLoadBack
    | EvictHost
    | Poll
    | TakeEvents
    | HostAlloc
    | HostFree
    | HostClear
    | Write
    | Load
    | StartLoading
    | Ack
    | End
)


class Sizes(Struct, array_like=True, frozen=True):
    """Tokens, as the cache counts them; None for a part that was not recorded."""

    available: int
    evictable: int | None = None
    protected: int | None = None
    host_available: int | None = None


class Line(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Record ``n``, from 1. ``after``: the sizes after it; ``before``: in an excerpt."""

    n: int
    call: AnyCall
    inner: list[AnyCall] = []
    before: Sizes | None = None
    after: Sizes | None = None
