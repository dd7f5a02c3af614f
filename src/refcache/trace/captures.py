"""What is written of each call: one generator a method.

A capture builds the record from the arguments, yields it (the original runs then), gets the result
sent and fills it in. Signatures are those of SGLang's methods; what later versions added is taken
and not looked at.
"""

from collections.abc import Callable, Generator
from typing import Any, Protocol

from refcache.trace import format as f
from refcache.trace.events.kinds import event_of

Steps = Generator[f.AnyCall, Any, None]
Capture = Callable[..., Steps]


class Recording(Protocol):
    """What a capture needs of the recorder: the tree, and numbers for opaque values."""

    tree: Any

    def node(self, handle: Any) -> int:
        """A small number for a node handle; the same handle, the same number."""
        ...

    def state(self, value: Any) -> int:
        """A number for what ``backup_state`` returned."""
        ...


def _ints(values: Any) -> list[int]:
    out: list[int] = values.tolist() if hasattr(values, "tolist") else list(values)
    return out


def _tokens(key: Any) -> f.Tokens:
    """The tokens of a key; refcache's, and those of later releases, say them under bigrams too."""
    return list(key.raw_token_ids() if hasattr(key, "raw_token_ids") else key.token_ids)


def _row(rec: Recording, req: Any, length: int) -> list[int]:
    """The first slots of a row; refcache's pool says when they have been written."""
    pool = rec.tree.req_to_token_pool
    if hasattr(pool, "read"):
        return _ints(pool.read(req.req_pool_idx, slice(0, length)))
    return _ints(pool.req_to_token[req.req_pool_idx, :length])


def _alloc(rec: Recording, need_size: int) -> Steps:
    call = f.Alloc(need_size=int(need_size))
    slots = yield call
    call.slots = None if slots is None else _ints(slots)


def _alloc_extend(
    rec: Recording,
    prefix_lens: Any,
    prefix_lens_cpu: Any,
    seq_lens: Any,
    seq_lens_cpu: Any,
    last_loc: Any,
    extend_num_tokens: int,
    *rest: Any,
    **more: Any,
) -> Steps:
    call = f.AllocExtend(
        prefix_lens=_ints(prefix_lens_cpu), seq_lens=_ints(seq_lens_cpu), last_loc=_ints(last_loc)
    )
    slots = yield call
    call.slots = None if slots is None else _ints(slots)


def _alloc_decode(
    rec: Recording, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any, *rest: Any, **more: Any
) -> Steps:
    call = f.AllocDecode(seq_lens=_ints(seq_lens_cpu), last_loc=_ints(last_loc))
    slots = yield call
    call.slots = None if slots is None else _ints(slots)


def _free(rec: Recording, free_index: Any) -> Steps:
    yield f.Free(slots=_ints(free_index))


def _free_each(rec: Recording, lists: Any) -> Steps:
    """One free of all the lists: they are given back together, or not at all."""
    yield f.Free(slots=[slot for slots in lists for slot in _ints(slots)])


def _backup_state(rec: Recording) -> Steps:
    call = f.BackupState()
    value = yield call
    call.state = rec.state(value)


def _restore_state(rec: Recording, state: Any) -> Steps:
    yield f.RestoreState(state=rec.state(state))


def _without_arguments(kind: Callable[[], f.AnyCall]) -> Capture:
    def capture(rec: Recording, *args: Any, **kwargs: Any) -> Steps:
        yield kind()

    return capture


def _match_prefix(rec: Recording, params: Any) -> Steps:
    call = f.MatchPrefix(tokens=_tokens(params.key), extra_key=params.key.extra_key)
    found = yield call
    call.slots = _ints(found.device_indices)
    call.node, call.host_node = rec.node(found.last_device_node), rec.node(found.last_host_node)
    call.host_hit_length = int(found.host_hit_length)


def _insert(rec: Recording, params: Any) -> Steps:
    tokens = _tokens(params.key)
    call = f.Insert(
        tokens=tokens,
        slots=_ints(tokens) if params.value is None else _ints(params.value),
        extra_key=params.key.extra_key,
        chunked=bool(params.chunked),
        priority=int(params.priority or 0),
    )
    result = yield call
    call.prefix_len = int(result.prefix_len)


def _evict(rec: Recording, params: Any) -> Steps:
    call = f.Evict(num_tokens=int(params.num_tokens))
    result = yield call
    call.num_tokens_evicted = int(result.num_tokens_evicted)


def _inc_lock_ref(rec: Recording, node: Any, *rest: Any, **more: Any) -> Steps:
    call = f.IncLockRef(node=rec.node(node))
    result = yield call
    call.delta = getattr(result, "delta", None)


def _dec_lock_ref(rec: Recording, node: Any, *rest: Any, **more: Any) -> Steps:
    call = f.DecLockRef(node=rec.node(node))
    result = yield call
    call.delta = getattr(result, "delta", None)


def _cache_unfinished_req(rec: Recording, req: Any, chunked: bool = False, **more: Any) -> Steps:
    length = len(req.fill_ids)
    call = f.CacheUnfinishedReq(
        tokens=list(req.fill_ids),
        row=_row(rec, req, length),
        cache_protected_len=int(req.cache_protected_len),
        last_node=rec.node(req.last_node),
        extra_key=req.extra_key,
        chunked=chunked,
    )
    yield call
    call.new_row = _row(rec, req, length)
    call.new_protected_len = int(req.cache_protected_len)
    call.new_node = rec.node(req.last_node)


def _cache_finished_req(rec: Recording, req: Any, is_insert: bool = True, **more: Any) -> Steps:
    """The committed length may be asked once: it is seen when the cache asks, if not before."""
    tree = rec.tree
    call = f.CacheFinishedReq(
        cache_protected_len=int(req.cache_protected_len),
        last_node=rec.node(req.last_node),
        extra_key=req.extra_key,
        is_insert=is_insert and not getattr(tree, "disable_finished_insert", False),
    )
    ask = req.pop_committed_kv_cache

    def committed(length: int) -> int:
        call.tokens = (list(req.origin_input_ids) + list(req.output_ids))[:length]
        call.row = _row(rec, req, length)
        return length

    def asked() -> int:
        return committed(ask())

    if not getattr(req, "kv_committed_freed", True):
        committed(req.kv_committed_len)
    req.pop_committed_kv_cache = asked
    try:
        yield call
    finally:
        del req.pop_committed_kv_cache


def _init_load_back(rec: Recording, params: Any, *rest: Any, **more: Any) -> Steps:
    call = f.InitLoadBack(
        host_node=rec.node(params.last_host_node),
        host_hit_length=int(params.host_hit_length),
        mem_quota=None if params.mem_quota is None else int(params.mem_quota),
    )
    slots, node = yield call
    call.slots, call.node = _ints(slots), rec.node(node)


def _evict_host(rec: Recording, num_tokens: int) -> Steps:
    call = f.EvictHost(num_tokens=int(num_tokens))
    count = yield call
    call.num_tokens_evicted = int(count or 0)


def _poll(method: str) -> Capture:
    def capture(rec: Recording, *args: Any, **kwargs: Any) -> Steps:
        yield f.Poll(method=method)

    return capture


def _start_loading(rec: Recording) -> Steps:
    call = f.StartLoading()
    index = yield call
    call.index = int(index)


def _take_events(rec: Recording) -> Steps:
    call = f.TakeEvents()
    events = yield call
    call.events = [event_of(event) for event in events]


def _host_alloc(rec: Recording, need_size: int) -> Steps:
    call = f.HostAlloc(need_size=int(need_size))
    slots = yield call
    call.slots = None if slots is None else _ints(slots)


def _host_free(rec: Recording, indices: Any) -> Steps:
    yield f.HostFree(slots=_ints(indices))


def _write(
    rec: Recording, device_indices: Any, priority: Any = None, node_id: int = -1, **more: Any
) -> Steps:
    call = f.Write(id=int(node_id), slots=_ints(device_indices))
    slots = yield call
    call.host_slots = None if slots is None else _ints(slots)


def _load(
    rec: Recording, host_indices: Any, priority: Any = None, node_id: int = -1, **more: Any
) -> Steps:
    call = f.Load(id=int(node_id), host_slots=_ints(host_indices))
    slots = yield call
    call.slots = None if slots is None else _ints(slots)


ALLOCATOR: dict[str, Capture] = {
    "alloc": _alloc,
    "alloc_extend": _alloc_extend,
    "alloc_decode": _alloc_decode,
    "free": _free,
    "free_each": _free_each,
    "free_group_begin": _without_arguments(f.FreeGroupBegin),
    "free_group_end": _without_arguments(f.FreeGroupEnd),
    "backup_state": _backup_state,
    "restore_state": _restore_state,
    "clear": _without_arguments(f.Clear),
}
OPTIONAL = frozenset({"free_each"})
"""Other ways to ask for what is an operation already: nothing is missing without them."""
POLLS = ("check_hicache_events", "writing_check", "loading_check", "flush_write_through_acks")
TREE: dict[str, Capture] = {
    "match_prefix": _match_prefix,
    "insert": _insert,
    "evict": _evict,
    "inc_lock_ref": _inc_lock_ref,
    "dec_lock_ref": _dec_lock_ref,
    "cache_unfinished_req": _cache_unfinished_req,
    "cache_finished_req": _cache_finished_req,
    "reset": _without_arguments(f.Reset),
    "take_events": _take_events,
}
HOST_TREE: dict[str, Capture] = {
    **TREE,
    "init_load_back": _init_load_back,
    "evict_host": _evict_host,
    "ready_to_load_host_cache": _start_loading,
    **{name: _poll(name) for name in POLLS},
}
HOST_POOL: dict[str, Capture] = {
    "alloc": _host_alloc,
    "free": _host_free,
    "clear": _without_arguments(f.HostClear),
}
CONTROLLER: dict[str, Capture] = {"write": _write, "load": _load, "start_loading": _start_loading}
