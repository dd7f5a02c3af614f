"""Every public method of allocators, pools, trees and controllers, and every argument, with values
of the wrong kind: a named error, and nothing changed. The tables say which values are legal."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.helpers.bad_calls import COUNTS, NOTHING, WRONG, fingerprint, public_methods

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.controller import HiCacheController
from refcache.controller.layer_events import LayerDoneCounter, LayerLoadingEvent
from refcache.engine import Req, SamplingParams
from refcache.errors import RefcacheError
from refcache.keys import RadixKey
from refcache.pool import (
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    ReqToTokenPool,
)
from refcache.pool.planes import PlaneSpec
from refcache.runtime import ImmediateRuntime
from refcache.tree import HiRadixCache, RadixCache
from refcache.types import (
    CacheInitParams,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    ServerArgs,
)

PAGE, SIZE = 2, 32
ANY = frozenset(WRONG)
TRUTH = frozenset({"bool"})
UNREAD = ANY  # an argument that nothing reads
POSITIVE = frozenset({"huge"})
SLOTS = frozenset({"slots twice"})  # where naming a slot twice is no mistake


@dataclass
class Call:
    """One argument of one method: how it is given, and which of the wrong values are legal."""

    method: str
    argument: str
    make: Callable[[Any, Any], Any]
    legal: frozenset[str] = frozenset()


@dataclass
class Subject:
    """A class under test: how one is made (with something in it), and its calls.

    ``others``: methods that are not called here, with the reason.
    """

    kind: type
    fresh: Callable[[], Any]
    calls: list[Call]
    others: dict[str, str] = field(default_factory=dict)


def simple(
    method: str, good: Callable[[Any], dict[str, Any]], **legal: frozenset[str]
) -> list[Call]:
    """A call for each argument, the others being good."""

    def one(name: str, allowed: frozenset[str]) -> Call:
        def make(subject: Any, value: Any) -> Any:
            arguments = good(subject) | {name: value}
            positional = [arguments.pop(k) for k in list(arguments) if k.startswith("*")]
            return getattr(subject, method)(*positional, **arguments)

        return Call(method, name, make, allowed)

    return [one(name, allowed) for name, allowed in legal.items()]


# ---- allocators ----------------------------------------------------------------------------------

LENS = frozenset({"slots twice"})


def allocator(page_size: int) -> Any:
    if page_size == 1:
        made: Any = TokenToKVPoolAllocator(SIZE, torch.int64, "cpu", None)
    else:
        made = PagedTokenToKVPoolAllocator(SIZE, page_size, torch.int64, "cpu", None)
    made.taken = made.alloc(8)
    return made


def batch(_: Any) -> dict[str, Any]:
    two = torch.tensor([2, 2, 2, 2])
    return {"prefix": two, "seq": two + 1, "last": torch.tensor([3, 5, 7, 9])}


def extend(method: str, name: str) -> Callable[[Any, Any], Any]:
    def make(subject: Any, value: Any) -> Any:
        b = batch(subject)
        arguments = {
            "prefix_lens": b["prefix"],
            "prefix_lens_cpu": b["prefix"],
            "seq_lens": b["seq"],
            "seq_lens_cpu": b["seq"],
            "last_loc": b["last"],
            "extend_num_tokens": 4,
        }
        return getattr(subject, method)(**(arguments | {name: value}))

    return make


def decode(method: str, name: str) -> Callable[[Any, Any], Any]:
    def make(subject: Any, value: Any) -> Any:
        b = batch(subject)
        arguments = {"seq_lens": b["seq"], "seq_lens_cpu": b["seq"], "last_loc": b["last"]}
        return getattr(subject, method)(**(arguments | {name: value}))

    return make


ALLOCATOR = [
    *simple("alloc", lambda _: {}, need_size=POSITIVE),
    # slots 4 to 7 are handed out; at page size 2 two of them are one page
    *simple("free", lambda _: {}, free_index=SLOTS),
    Call("free_each", "lists", lambda s, v: s.free_each(v)),
    Call("free_each", "first list", lambda s, v: s.free_each([v, s.taken[-1:]]), SLOTS),
    Call("free_each", "second list", lambda s, v: s.free_each([s.taken[-1:], v]), SLOTS),
    *simple("restore_state", lambda _: {}, state=frozenset()),
    Call("restore_state", "free pages", lambda s, v: s.restore_state((v, s.release_pages)),
         frozenset()),
    Call("restore_state", "release pages", lambda s, v: s.restore_state((s.free_pages[:0], v)),
         frozenset()),
]  # fmt: skip
PAGED = [
    *(Call(method, name, extend(method, name)) for method in ("alloc_extend", "pages_to_extend")
      for name in ("prefix_lens", "prefix_lens_cpu", "seq_lens", "seq_lens_cpu", "last_loc",
                   "extend_num_tokens")),
    *(Call(method, name, decode(method, name)) for method in ("alloc_decode", "pages_to_decode")
      for name in ("seq_lens", "seq_lens_cpu", "last_loc")),
]  # fmt: skip


# ---- pools ---------------------------------------------------------------------------------------


def rows() -> Any:
    made: Any = ReqToTokenPool(4, 16)
    made.req = SimpleNamespace(req_pool_idx=None)
    made.alloc([made.req])
    return made


def with_row(value: Any) -> Any:
    return SimpleNamespace(req_pool_idx=value)


FOUR = torch.tensor([4, 5, 6, 7])
ROWS = [
    Call("alloc", "reqs", lambda s, v: s.alloc(v)),
    Call("alloc", "a request", lambda s, v: s.alloc([v])),
    Call("alloc", "a request's row", lambda s, v: s.alloc([with_row(v)]), NOTHING),
    Call("alloc", "the same twice", lambda s, v: s.alloc([s.req, s.req])),
    Call("free", "req", lambda s, v: s.free(v)),
    Call("free", "its row", lambda s, v: s.free(with_row(v))),
    Call("write", "indices", lambda s, v: s.write(v, FOUR)),
    Call("write", "row", lambda s, v: s.write((v, slice(0, 4)), FOUR)),
    Call("write", "rows", lambda s, v: s.write((v, torch.arange(4)), FOUR)),
    Call("write", "columns", lambda s, v: s.write((0, v), FOUR), SLOTS),
    Call("write", "first column", lambda s, v: s.write((0, slice(v, 4)), FOUR), NOTHING),
    Call("write", "column", lambda s, v: s.write((0, slice(0, v)), FOUR)),
    Call("write", "step", lambda s, v: s.write((0, slice(0, 4, v)), FOUR), NOTHING),
    Call("write", "values", lambda s, v: s.write((0, slice(0, 4)), v),
         SLOTS | {"negative slots", "slots beyond"}),
    Call("read", "row", lambda s, v: s.read(v, slice(0, 4))),
    Call("read", "columns", lambda s, v: s.read(0, v), SLOTS),
    Call("read", "column", lambda s, v: s.read(0, slice(0, v))),
]  # fmt: skip


MORE = (PlaneSpec("more", 1, 2),)


def device_pool(mla: bool = False) -> Any:
    if mla:
        return MLATokenToKVPool(SIZE, PAGE, torch.float32, 2, 1, 2, "cpu", enable_memory_saver=True,
                                extra_planes=MORE)  # fmt: skip
    return MHATokenToKVPool(
        SIZE, PAGE, torch.float32, 1, 2, 2, "cpu", enable_kv_cache_copy=True,
        enable_memory_saver=True, enable_alt_stream=False, extra_planes=MORE,
    )  # fmt: skip


ROWS_1, LAYER = torch.ones(4, 1, 2), frozenset[str]()
MHA = [
    *simple("set_kv_buffer", lambda _: {"layer": 0, "loc": FOUR, "cache_k": ROWS_1,
                                        "cache_v": ROWS_1},
            layer=LAYER, loc=SLOTS, cache_k=frozenset(), cache_v=frozenset(), k_scale=NOTHING,
            v_scale=NOTHING, layer_id_override=NOTHING),
    *simple("move_kv_cache", lambda _: {"tgt_loc": FOUR, "src_loc": FOUR}, src_loc=SLOTS,
            tgt_loc=SLOTS),
]  # fmt: skip
MLA = [
    *simple("set_kv_buffer", lambda _: {"layer": 0, "loc": FOUR, "cache_k": torch.ones(4, 1, 3)},
            layer=LAYER, loc=SLOTS, cache_k=frozenset(), cache_v=UNREAD),
    *simple("set_mla_kv_buffer", lambda _: {"layer": 0, "loc": FOUR, "cache_k_nope": ROWS_1,
                                            "cache_k_rope": torch.ones(4, 1, 1)},
            layer=LAYER, loc=SLOTS, cache_k_nope=frozenset(), cache_k_rope=frozenset()),
    *simple("get_mla_kv_buffer", lambda _: {"layer": 0, "loc": FOUR}, layer=LAYER, loc=SLOTS,
            dst_dtype=NOTHING),
]  # fmt: skip
GETTERS = [
    *simple("get_key_buffer", lambda _: {}, layer_id=LAYER),
    *simple("get_value_buffer", lambda _: {}, layer_id=LAYER),
    *simple("get_kv_buffer", lambda _: {}, layer_id=LAYER),
    *simple(
        "get_plane_buffer",
        lambda _: {"name": "more", "layer_id": 0},
        name=frozenset(),
        layer_id=LAYER,
    ),
    *simple("extra_buffers", lambda _: {}, layer_id=LAYER),
    *simple(
        "set_plane_buffer",
        lambda _: {"name": "more", "layer": 0, "loc": FOUR, "rows": ROWS_1},
        name=frozenset(),
        layer=LAYER,
        loc=SLOTS,
        rows=frozenset(),
    ),
    *simple("register_layer_transfer_counter", lambda _: {}, layer_transfer_counter=NOTHING),
]
NAMES_CELLS = "names cells for a launch, which the machine checks"
REGION = dict.fromkeys(("region", "regions_of"), NAMES_CELLS)


def host_pool(mla: bool = False) -> Any:
    kind = MLATokenToKVPoolHost if mla else MHATokenToKVPoolHost
    made: Any = kind(device_pool(mla), 2.0, 0, PAGE, "layer_first")
    made.taken = made.alloc(8)
    made.flags = ImmediateRuntime().flags(2)
    return made


def transfer(s: Any) -> dict[str, Any]:
    return {"device_pool": s.device_pool, "host_indices": FOUR, "device_indices": FOUR,
            "io_backend": "direct"}  # fmt: skip


PAIR = SLOTS | {"negative slots"}  # pairs with a negative slot are skipped
KERNEL = frozenset({"huge"})
COPY = {"device_pool": frozenset[str](), "host_indices": PAIR, "device_indices": PAIR,
        "io_backend": frozenset[str](), "max_programs": KERNEL}  # fmt: skip
HOST = [
    *simple("alloc", lambda _: {}, need_size=POSITIVE),
    *simple("free", lambda _: {}, indices=frozenset()),
    *simple("check_held", lambda _: {}, indices=SLOTS),
    *simple("backup_from_device_all_layer", transfer, **COPY),
    *simple("load_to_device_per_layer", lambda s: transfer(s) | {"layer_id": 0},
            layer_id=frozenset(), **COPY),
    *simple("load_to_device_all_layer", lambda s: transfer(s) | {"flags": s.flags,
                                                               "io_backend": "kernel"},
            flags=frozenset(), **COPY),
    *(call for call in simple("load_to_device_by_copy_engine", lambda s: {
        k: v for k, v in transfer(s).items() if k != "io_backend"} | {"flags": s.flags},
        flags=frozenset(), **{k: v for k, v in COPY.items() if "_p" in k or "indices" in k})
      if call.argument != "max_programs"),
    *simple("plan_transfer", lambda _: {"io_backend": "auto", "tokens": 4, "to_host": True},
            io_backend=frozenset(), tokens=POSITIVE, to_host=TRUTH, phase=UNREAD),
]  # fmt: skip


# ---- controller ----------------------------------------------------------------------------------


def controller() -> Any:
    pool = device_pool()
    owner = PagedTokenToKVPoolAllocator(SIZE, PAGE, torch.float32, "cpu", pool)
    owner.alloc(8)
    host = MHATokenToKVPoolHost(pool, 2.0, 0, PAGE, "layer_first")
    host.alloc(8)
    made: Any = HiCacheController(owner, host, PAGE, io_backend="direct")
    made.load(FOUR)
    return made


NAMED: dict[str, frozenset[str]] = {"priority": COUNTS | NOTHING, "node_id": COUNTS}
CONTROLLER = [
    *simple("write", lambda _: {"device_indices": FOUR}, device_indices=SLOTS, **NAMED),
    *simple("load", lambda _: {"host_indices": FOUR}, host_indices=SLOTS, **NAMED),
    *simple("cancel_loading", lambda _: {}, keep=POSITIVE),
    *simple("move_indices", lambda s: {"op": s.load_queue[0]}, op=frozenset(), io_backend=NOTHING),
    *simple("evict_device", lambda _: {}, device_indices=SLOTS),
    *simple("evict_host", lambda s: {"host_indices": FOUR}, host_indices=frozenset(),
            backup_only=frozenset({"bool"})),
    *simple("register_forward_stream", lambda _: {}, stream=NOTHING),
    *simple("attach_storage_backend", lambda _: {}, storage_backend=frozenset()),
]  # fmt: skip
LAYERS = [
    *simple("complete", lambda _: {}, layer_index=frozenset()),
    *simple("wait", lambda _: {}, layer_index=frozenset()),
]
COUNTER = [
    *simple("set_consumer", lambda _: {}, index=frozenset({"negative"})),
    *simple("wait_until", lambda _: {}, threshold=POSITIVE),
]


# ---- trees ---------------------------------------------------------------------------------------


def tree(two_tiers: bool = False) -> Any:
    pool = device_pool()
    owner = PagedTokenToKVPoolAllocator(SIZE, PAGE, torch.float32, "cpu", pool)
    table = ReqToTokenPool(4, 16)
    params = CacheInitParams(False, table, owner, PAGE, enable_kv_cache_events=True)
    made: Any
    if two_tiers:
        args = ServerArgs(page_size=PAGE, hicache_io_backend="direct", hicache_ratio=2.0)
        made = HiRadixCache(params, args)
        made.load_back_threshold = 1
    else:
        made = RadixCache(params)
    made.insert(InsertParams(RadixKey([1, 2, 3, 4]), owner.alloc(4)))
    made.check_hicache_events()
    made.node = made.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4]))).last_device_node
    made.inc_lock_ref(made.node)
    req = Req("r", "", array("I", [1, 2, 3, 4, 5, 6, 7]), SamplingParams(4))
    table.alloc([req])
    req.fill_ids = req.origin_input_ids
    req.last_node, req.cache_protected_len = made.node, 4
    req.kv_committed_len = req.kv_allocated_len = 7
    table.write((req.req_pool_idx, slice(0, 7)), torch.cat([made.node.value, owner.alloc(4)[:3]]))
    made.req, made.own = req, owner.alloc(4)
    made.take_events()
    return made


def insert(name: str) -> Callable[[Any, Any], Any]:
    def make(s: Any, v: Any) -> Any:
        good = {"key": RadixKey([9, 8, 7, 6]), "value": s.own}
        return s.insert(InsertParams(**(good | {name: v})))

    return make


def request(method: str, name: str) -> Callable[[Any, Any], Any]:
    def make(s: Any, v: Any) -> Any:
        setattr(s.req, name, v)
        s.before = fingerprint(s)
        return getattr(s, method)(s.req)

    return make


NODE = frozenset[str]()
FLAGS = {"chunked": TRUTH, "mamba_value": NOTHING, "prev_prefix_len": UNREAD,
         "swa_evicted_seqlen": UNREAD}  # fmt: skip
REQUEST = {"req_pool_idx": NODE, "last_node": NODE, "priority": COUNTS | NOTHING,
           "extra_key": NOTHING | {"text"}}  # fmt: skip
# who finishes may say that the tree has all of it, and more: nothing is the request's to free
OWNED = {"cache_unfinished_req": {"cache_protected_len": NODE},
         "cache_finished_req": {"cache_protected_len": POSITIVE}}  # fmt: skip
TREE = [
    Call("match_prefix", "params", lambda s, v: s.match_prefix(v)),
    Call("match_prefix", "key", lambda s, v: s.match_prefix(MatchPrefixParams(v))),
    Call("insert", "params", lambda s, v: s.insert(v)),
    Call("insert", "key", insert("key")),
    Call("insert", "value", insert("value"), NOTHING),
    Call("insert", "priority", insert("priority"), COUNTS | NOTHING),
    Call("insert", "counted_len", insert("counted_len"), POSITIVE),
    *(Call("insert", name, insert(name), legal) for name, legal in FLAGS.items()),
    Call("evict", "params", lambda s, v: s.evict(v)),
    Call("evict", "num_tokens", lambda s, v: s.evict(EvictParams(v)), COUNTS),
    Call("evict", "swa_num_tokens", lambda s, v: s.evict(EvictParams(0, v)), UNREAD),
    *simple("inc_lock_ref", lambda _: {}, node=NODE),
    *simple("dec_lock_ref", lambda s: {"node": s.node}, node=NODE, params=UNREAD),
    *simple("nodes", lambda _: {}, below=NOTHING),
    *simple("maybe_bigram_convert", lambda s: {"key": RadixKey([1])}, key=NODE, value=UNREAD),
    Call("cache_unfinished_req", "req", lambda s, v: s.cache_unfinished_req(v)),
    Call("cache_finished_req", "req", lambda s, v: s.cache_finished_req(v)),
    Call("cache_finished_req", "is_insert", lambda s, v: s.cache_finished_req(s.req, v), TRUTH),
    Call("cache_unfinished_req", "chunked", lambda s, v: s.cache_unfinished_req(s.req, v), TRUTH),
    *(Call(method, f"req.{name}", request(method, name), legal)
      for method in ("cache_unfinished_req", "cache_finished_req")
      for name, legal in (REQUEST | OWNED[method]).items()),
    Call("init_load_back", "params", lambda s, v: s.init_load_back(v)),
]  # fmt: skip
LOAD = frozenset({"last_host_node", "host_hit_length", "mem_quota"})
TWO_TIERS = [
    Call("init_load_back", "node", lambda s, v: s.init_load_back(InitLoadBackParams(v, 0))),
    Call("init_load_back", "hit", lambda s, v: s.init_load_back(InitLoadBackParams(s.node, v))),
    Call("init_load_back", "quota",
         lambda s, v: s.init_load_back(InitLoadBackParams(s.node, 0, v)), COUNTS | NOTHING),
    *simple("load_back", lambda s: {"node": s.node}, node=NODE, mem_quota=COUNTS | NOTHING),
    *simple("evict_host", lambda _: {}, num_tokens=COUNTS),
    *simple("write_backup", lambda s: {"node": s.node}, node=NODE),
    *simple("writing_check", lambda _: {}, write_back=TRUTH),
    *simple("get_height", lambda _: {}, node=NODE),
]  # fmt: skip
NO_TREE = {"create_simulated": "makes a tree; its arguments are the constructor's"}


BELOW = "of the storage tier: the suites storage.* call it, wrong values are not tried"
PAGES = dict.fromkeys(
    ("get_data_page", "get_page_buffer_meta", "get_split_heads_page_buffer_meta",
     "set_from_flat_data_page"), BELOW,
)  # fmt: skip
THREADS = dict.fromkeys(
    ("append_host_mem_release", "prefetch", "terminate_prefetch", "write_storage"), BELOW
)
PREFETCHES = dict.fromkeys(
    ("attach_storage_backend", "can_terminate_prefetch", "check_prefetch_progress",
     "is_prefetch_timeout", "pop_prefetch_loaded_tokens", "prefetch_from_storage",
     "prefix_length", "release_aborted_request", "terminate_prefetch", "write_backup_storage"),
    BELOW,
)  # fmt: skip
REGION["pool_of"] = "a pool without parts answers with itself whatever is asked"

SUBJECTS = {
    "token allocator": Subject(TokenToKVPoolAllocator, lambda: allocator(1), ALLOCATOR),
    "paged allocator": Subject(
        PagedTokenToKVPoolAllocator, lambda: allocator(PAGE), ALLOCATOR + PAGED
    ),
    "rows": Subject(ReqToTokenPool, rows, ROWS),
    "mha": Subject(MHATokenToKVPool, device_pool, GETTERS + MHA, REGION),
    "mla": Subject(MLATokenToKVPool, lambda: device_pool(True), GETTERS + MLA, REGION),
    "mha host": Subject(MHATokenToKVPoolHost, host_pool, HOST, PAGES),
    "mla host": Subject(MLATokenToKVPoolHost, lambda: host_pool(True), HOST, PAGES),
    "controller": Subject(HiCacheController, controller, CONTROLLER, THREADS),
    "layer event": Subject(LayerLoadingEvent, lambda: LayerLoadingEvent(2), LAYERS),
    "layer counter": Subject(LayerDoneCounter, lambda: LayerDoneCounter(2), COUNTER),
    "tree": Subject(RadixCache, tree, TREE, NO_TREE),
    "two tiers": Subject(HiRadixCache, lambda: tree(True), TREE + TWO_TIERS, NO_TREE | PREFETCHES),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_method_with_arguments_is_tried(name: str) -> None:
    subject = SUBJECTS[name]
    tried = {call.method for call in subject.calls}
    assert sorted(tried | {*subject.others}) == public_methods(subject.kind)


def cases() -> list[Any]:
    return [*every_call()]


def every_call() -> Iterator[Any]:
    for name, subject in SUBJECTS.items():
        for call in subject.calls:
            yield pytest.param(subject, call, id=f"{name}: {call.method} {call.argument}")


@pytest.mark.parametrize(("subject", "call"), cases())
def test_a_wrong_value_is_refused_by_name_and_changes_nothing(subject: Any, call: Any) -> None:
    made, problems = subject.fresh(), []
    for label, wrong in WRONG.items():
        value = wrong()
        made.before = None
        before = fingerprint(made)
        try:
            call.make(made, value)
        except RefcacheError:
            before, made.before = made.before or before, None
            if before != fingerprint(made):
                problems.append(f"{label}: refused, and something changed")
            elif not call.argument.startswith("req."):
                continue
        except Exception as error:
            problems.append(f"{label}: {type(error).__name__}: {error}")
        else:
            if label not in call.legal:
                problems.append(f"{label}: accepted")
        made = subject.fresh()
    assert not problems, "\n".join(problems)
