"""The HiCache controller on the simulated machine: what moves when, and what waits for what."""

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.controller import (
    CacheOperation,
    HiCacheController,
    LayerDoneCounter,
    LayerLoadingEvent,
    TransferBuffer,
)
from refcache.errors import (
    DoubleFree,
    InvalidArgument,
    InvalidSlot,
    LoadSlotBusy,
    UnknownName,
    WrongTier,
)
from refcache.pool import MHATokenToKVPool, MLATokenToKVPool, host_pool_for
from refcache.pool.transfer_rule import TransferPlan
from refcache.runtime import RaceFound, SimulatedRuntime, Tracker, drawn, eager, lazy
from refcache.types import ServerArgs


def rig(
    driver=lazy,
    layers=2,
    page_size=2,
    size=16,
    io_backend="kernel",
    layout="layer_first",
    mla=False,
    start_layer=0,
    at_once=True,
):
    """A device pool, its allocator, a host pool and a controller on one simulated machine."""
    machine = SimulatedRuntime(driver, Tracker())
    end = start_layer + layers
    common = {"start_layer": start_layer, "end_layer": end, "runtime": machine}
    if mla:
        pool = MLATokenToKVPool(size, page_size, torch.int64, 3, 1, layers, "cpu", **common)
    else:
        pool = MHATokenToKVPool(size, page_size, torch.int64, 1, 2, layers, "cpu", **common)
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(size, torch.int64, "cpu", pool, runtime=machine)
    else:
        allocator = PagedTokenToKVPoolAllocator(
            size, page_size, torch.int64, "cpu", pool, runtime=machine
        )
    args = ServerArgs(page_size=page_size, hicache_mem_layout=layout)
    host = host_pool_for(pool, args)
    if not at_once:
        host.small_load_bytes = 0
    controller = HiCacheController(allocator, host, page_size, io_backend=io_backend)
    return SimpleNamespace(
        machine=machine, pool=pool, allocator=allocator, host=host, controller=controller
    )


def forward(r, slots, value, layers=None):
    """Write rows that name their value, layer and slot, on the current stream."""
    for layer in range(r.pool.start_layer, r.pool.end_layer) if layers is None else layers:
        rows = [
            (value * 1000 + layer * 100 + plane * 50 + slots)
            .view(-1, 1, 1)
            .expand(-1, p.head_num, p.head_dim)
            for plane, p in enumerate(r.pool.planes)
        ]
        r.pool.set_kv_buffer(layer, slots.clone(), *rows)


def read(r, layer, slots):
    """Read K of a layer through the getter and a launch; the list fills when it runs."""
    buffer, out = r.pool.get_key_buffer(layer), []
    r.machine.launch(
        "attention",
        lambda: out.extend(buffer[slots, 0, 0].tolist()),
        reads=[r.pool.region(0, layer, slots)],
    )
    return out


def backed_up(r, value, tokens=2):
    """Device slots freed again, and host slots that hold their rows."""
    slots = r.allocator.alloc(tokens)
    forward(r, slots, value)
    host_slots = r.controller.write(slots)
    r.controller.ack_write_queue.pop().finish_event.synchronize()
    r.controller.evict_device(slots)
    return slots, host_slots


def ran(r):
    return [access.name for access in r.machine.history]


# ---- writing -------------------------------------------------------------------------------------


def test_write_starts_a_copy_that_runs_later_and_is_acknowledged():
    r = rig()
    slots = r.allocator.alloc(4)
    forward(r, slots, 7)
    host_slots = r.controller.write(slots, node_id=5)
    assert host_slots.tolist() == [0, 1, 2, 3]
    (ack,) = r.controller.ack_write_queue
    assert ack.node_ids == [5]
    assert not ack.finish_event.query()
    ack.finish_event.synchronize()
    assert ran(r)[-1] == "backup"
    assert r.controller.write_queue == []
    for layer in range(2):
        assert r.host.k_buffer[layer, :4, 0, 1].tolist() == [7000 + 100 * layer + s for s in slots]
        assert r.host.v_buffer[layer, :4, 0, 0].tolist() == [7050 + 100 * layer + s for s in slots]


def test_write_without_room_is_none_and_changes_nothing():
    r = rig()
    r.host.alloc(r.host.size - 2)
    slots = r.allocator.alloc(4)
    assert r.controller.write(slots) is None
    assert r.host.available_size() == 2
    assert r.controller.ack_write_queue == r.controller.write_queue == []
    assert r.controller.write(slots[:2]) is not None


def test_write_of_parts_of_pages_is_refused():
    r = rig()
    with pytest.raises(InvalidArgument):
        r.controller.write(r.allocator.alloc(2)[:1])
    assert r.host.available_size() == r.host.size


def test_start_writing_with_nothing_queued_does_nothing():
    r = rig()
    r.controller.start_writing()
    assert r.controller.ack_write_queue == []


def test_queued_writes_are_one_copy():
    r = rig()
    slots = r.allocator.alloc(4)
    forward(r, slots, 7)
    for node, (ours, theirs) in enumerate([([4, 5], slots[:2]), ([0, 1], slots[2:])]):
        r.controller.write_queue.append(CacheOperation(torch.tensor(ours), theirs, node))
    r.controller.start_writing()
    assert [ack.node_ids for ack in r.controller.ack_write_queue] == [[0, 1]]
    r.machine.synchronize()
    assert ran(r).count("backup") == 1
    assert r.host.k_buffer[1, [4, 5, 0, 1], 0, 0].tolist() == [7100 + s for s in slots]


@pytest.mark.parametrize("io_backend", ["kernel", "auto"])
def test_write_comes_after_the_callers_stream_and_after_the_forward_stream(io_backend):
    # The published race (start event on a stream that did not compute the rows).
    r = rig(io_backend=io_backend)
    slots, stream = r.allocator.alloc(2), r.machine.Stream("forward")
    with r.machine.stream(stream):
        forward(r, slots, 7)
    r.controller.write(slots)
    with pytest.raises(
        RaceFound, match=r"plane 0 layer 0 slot 2: write by 'set_kv_buffer'.*'backup'"
    ):
        r.machine.synchronize()
    r = rig(io_backend=io_backend)
    slots, stream = r.allocator.alloc(2), r.machine.Stream("forward")
    r.controller.register_forward_stream(stream)
    with r.machine.stream(stream):
        forward(r, slots, 7)
    r.controller.write(slots)
    r.machine.synchronize()


# ---- loading -------------------------------------------------------------------------------------


def test_load_moves_nothing_until_it_is_started():
    r = rig(eager)
    _, host_slots = backed_up(r, 7)
    assert r.controller.start_loading() == -1
    before = len(r.machine.history)
    new = r.controller.load(host_slots, node_id=3)
    assert len(r.machine.history) == before
    assert r.controller.ack_load_queue == []
    assert r.controller.start_loading() == 0
    (ack,) = r.controller.ack_load_queue
    assert (ack.node_ids, ack.finish_event.query()) == ([3], True)
    assert r.controller.start_loading() == -1
    for layer in range(2):
        assert read(r, layer, new) == [7000 + 100 * layer + s for s in (2, 3)]


def test_load_without_room_is_none_and_changes_nothing():
    r = rig()
    _, host_slots = backed_up(r, 7)
    r.allocator.alloc(r.allocator.size)
    assert r.controller.load(host_slots) is None
    assert r.controller.load_queue == []


def test_load_of_host_slots_without_an_owner_is_refused():
    r = rig()
    with pytest.raises(InvalidSlot, match="host slot 4"):
        r.controller.load(torch.tensor([4, 5]))
    assert r.allocator.available_size() == r.allocator.size


@pytest.mark.parametrize("at_once", [False, True])
def test_loads_of_a_batch_are_one_load_and_one_event_covers_a_layer_of_all(at_once):
    r = rig(at_once=at_once)
    hosts = [backed_up(r, value)[1] for value in (3, 4)]
    new = [r.controller.load(host_slots, node_id=i) for i, host_slots in enumerate(hosts)]
    index = r.controller.start_loading()
    assert [ack.node_ids for ack in r.controller.ack_load_queue] == [[0, 1]]
    r.controller.layer_done_counter.set_consumer(index)
    outs = [read(r, 0, slots) for slots in new]
    r.machine.host_sync()
    assert outs == [[3002, 3003], [4002, 4003]]
    # Layer by layer: nothing made layer 1 move.
    assert "load layer 0" in ran(r)
    assert "load layer 1" not in ran(r)


def test_each_layer_is_signalled_once_and_in_order():
    r = rig(layers=3, at_once=False)
    _, host_slots = backed_up(r, 7)
    r.controller.load(host_slots)
    events = r.controller.layer_done_counter.events[r.controller.start_loading()]
    for layer, event in enumerate(events.load_events):
        assert not event.query()
        event.synchronize()
        done = [other.query() for other in events.load_events]
        assert done == [True] * (layer + 1) + [False] * (2 - layer)
    assert events.finish_event.query()
    assert ran(r)[-3:] == [f"load layer {layer}" for layer in range(3)]


def test_layers_of_one_launch_are_signalled_each_on_its_own():
    r = rig(layers=3)
    _, host_slots = backed_up(r, 7)
    r.controller.load(host_slots)
    events = r.controller.layer_done_counter.events[r.controller.start_loading()]
    events.flags.parts[2].synchronize()
    assert [event.query() for event in events.flags.parts] == [False, False, True]
    assert not events.finish_event.query()
    events.finish_event.synchronize()
    assert ran(r)[-3:] == [f"load layer {layer}" for layer in (2, 0, 1)]


def test_a_load_counts_with_all_its_tokens():
    r = rig(layers=1)
    r.host.small_load_bytes = 3 * r.host.size_per_token
    for requests, name in ((1, "at once"), (2, "by layer")):
        for _ in range(requests):
            r.controller.load(backed_up(r, 7)[1])
        events = r.controller.layer_done_counter.events[r.controller.start_loading()]
        assert events.by_flags is (name == "at once"), name
        r.controller.reset()


def test_large_loads_have_a_launch_a_layer():
    r = rig()
    r.host.small_load_bytes = 2 * r.host.size_per_token // 2
    for tokens, at_once in ((3, False), (2, True)):
        assert r.host.plan_transfer("kernel", tokens, to_host=False).at_once is at_once
        assert not r.host.plan_transfer("direct", tokens, to_host=False).at_once
        assert not r.host.plan_transfer("kernel", tokens, to_host=True).at_once
    with pytest.raises(InvalidArgument, match="all layers at once: expected 'kernel'"):
        r.host.load_to_device_all_layer(r.pool, None, None, r.machine.flags(2), "direct")


@pytest.mark.parametrize("at_once", [(False, True), (True, False)])
def test_slot_used_again_is_waited_for_as_its_last_load_announces(at_once):
    # A slot that was announced by events, then by flags, and the other way round.
    r = rig(size=32)
    hosts = [backed_up(r, value)[1] for value in (1, 2, 3, 4)]
    r.host.small_load_bytes = 1 << 20 if at_once[0] else 0
    for host_slots in hosts[:3]:
        r.controller.load(host_slots)
        r.controller.start_loading()
    r.controller.layer_done_counter.events[0].finish_event.synchronize()
    r.host.small_load_bytes = 1 << 20 if at_once[1] else 0
    new = r.controller.load(hosts[3])
    r.controller.layer_done_counter.set_consumer(r.controller.start_loading())
    assert not r.controller.layer_done_counter.events[0].finish_event.query()
    out = read(r, 1, new)
    r.machine.host_sync()
    assert out == [4102, 4103]


@pytest.mark.parametrize("at_once", [False, True])
def test_waiting_for_all_loads_covers_every_layer(at_once):
    r = rig(layers=3, at_once=at_once)
    new = r.controller.load(backed_up(r, 7)[1])
    r.controller.start_loading()
    r.controller.layer_done_counter.wait_all()
    outs = [read(r, layer, new) for layer in range(3)]
    r.machine.host_sync()
    assert outs == [[7002 + 100 * layer, 7003 + 100 * layer] for layer in range(3)]


def test_without_a_load_getters_do_not_wait():
    r = rig()
    for value in range(3):  # every slot has a load that is not done
        r.controller.load(backed_up(r, value)[1])
        r.controller.start_loading()
    r.controller.layer_done_counter.set_consumer(-1)
    with r.machine.stream(r.machine.Stream()):
        assert r.pool.get_key_buffer(0) is not None
        assert r.machine.current_stream().query()


GETTERS = [
    (mla, getter)
    for mla in (False, True)
    for getter in ("get_key_buffer", "get_value_buffer", "get_kv_buffer")
]


@pytest.mark.parametrize(("mla", "getter"), GETTERS)
@pytest.mark.parametrize(("start_layer", "at_once"), [(0, True), (4, True), (4, False)])
def test_every_getter_waits_for_its_layer(mla, getter, start_layer, at_once):
    r = rig(layers=3, mla=mla, start_layer=start_layer, at_once=at_once)
    _, host_slots = backed_up(r, 7)
    new = r.controller.load(host_slots)
    r.controller.layer_done_counter.set_consumer(r.controller.start_loading())
    for layer in range(start_layer, start_layer + 3):
        getattr(r.pool, getter)(layer)
        planes = range(len(r.pool.planes))
        r.machine.launch("use", lambda: None, [r.pool.region(p, layer, new) for p in planes])
        r.machine.host_sync()
        assert ran(r)[-2:] == [f"load layer {layer - start_layer}", "use"]


def test_load_comes_after_a_forward_that_still_writes_slots_given_back():
    # The published race: the slots of a finished request are reused by a load-back.
    r = rig(size=4)
    stale, stream = torch.tensor([2, 3]), r.machine.Stream("forward")
    _, host_slots = backed_up(r, 7)
    assert r.allocator.alloc(2).tolist() == stale.tolist()
    for fenced in (False, True):
        if fenced:
            r.controller.register_forward_stream(stream)
            r.machine.tracker = Tracker()
        with r.machine.stream(stream):
            forward(r, stale, 8)
        r.controller.evict_device(stale)
        assert r.controller.load(host_slots).tolist() == stale.tolist()
        with suppress(RaceFound) if fenced else pytest.raises(RaceFound, match="load layer 0"):
            r.controller.start_loading()
            r.machine.synchronize()
    r.controller.layer_done_counter.set_consumer(r.controller.layer_done_counter.producer_index)
    out = read(r, 1, stale)
    r.machine.host_sync()
    assert out == [7102, 7103]


def test_fourth_load_waits_for_the_first_and_is_counted():
    # The published assertion: four loads, none finished.
    r = rig()
    hosts = [backed_up(r, value)[1] for value in (1, 2, 3, 4)]
    indices = []
    for host_slots in hosts:
        r.controller.load(host_slots)
        indices.append(r.controller.start_loading())
    assert indices == [0, 1, 2, 0]
    assert r.controller.load_slot_waits == 1
    assert ran(r).count("load layer 1") == 1
    # The first acknowledgement is done, though its slot is in use again.
    assert [ack.finish_event.query() for ack in r.controller.ack_load_queue] == [True] + [False] * 3


def test_update_producer_of_a_busy_slot_is_refused_before_any_change():
    r = rig()
    hosts = [backed_up(r, value)[1] for value in (1, 2, 3)]
    for host_slots in hosts:
        r.controller.load(host_slots)
        r.controller.start_loading()
    counter = r.controller.layer_done_counter
    with pytest.raises(LoadSlotBusy, match="load slot 0"):
        counter.update_producer()
    assert counter.producer_index == 2
    r.machine.synchronize()
    assert counter.update_producer() == 0


def test_decode_after_a_load_waits_for_all_of_it():
    r = rig()
    _, host_slots = backed_up(r, 7)
    new = r.controller.load(host_slots)
    forward(r, new, 9)  # so that reading too early is seen
    r.controller.start_loading()
    r.controller.layer_done_counter.set_consumer(-1)
    r.controller.layer_done_counter.wait_all()
    outs = [read(r, layer, new) for layer in range(2)]
    r.machine.host_sync()
    assert outs == [[7002, 7003], [7102, 7103]]


def test_wait_all_without_a_load_waits_for_nothing():
    r = rig()
    r.controller.layer_done_counter.wait_all()
    assert r.machine.current_stream().query()


# ---- index tensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("io_backend", ["kernel", "direct"])
def test_index_tensors_live_as_long_as_the_copies(io_backend):
    r = rig(io_backend=io_backend)
    slots = r.allocator.alloc(4)
    forward(r, slots, 7)
    host_slots = r.controller.write(slots.clone()).clone()
    r.machine.synchronize()  # would report a dead index tensor
    r.controller.load(host_slots.clone())
    del host_slots
    r.controller.start_loading()
    r.machine.synchronize()


def test_kernel_moves_the_host_slots_to_the_device_on_the_callers_stream():
    r = rig()
    op = CacheOperation(torch.tensor([6, 7, 2, 3]), torch.tensor([4, 5, 8, 9]), 0)
    host_slots, device_slots = r.controller.move_indices(op)
    op.host_indices[0] = 0  # pageable: it was read at the call
    assert device_slots is op.device_indices
    assert host_slots.tolist() == [0, 0, 0, 0]
    r.machine.host_sync()
    assert host_slots.tolist() == [6, 7, 2, 3]


def test_direct_waits_for_the_device_and_sorts_pairs_for_layer_first():
    for layout, wanted in (("layer_first", [2, 3, 6, 7]), ("page_first", [6, 7, 2, 3])):
        r = rig(io_backend="direct", layout=layout)
        r.machine.launch("pending", lambda: None)
        pairs = torch.tensor([6, 7, 2, 3]), torch.tensor([4, 5, 8, 9])
        host_slots, device_slots = r.controller.move_indices(CacheOperation(*pairs, 0))
        assert ran(r) == ["pending"]
        assert host_slots.tolist() == wanted
        assert dict(zip(*map(torch.Tensor.tolist, pairs), strict=True)) == dict(
            zip(host_slots.tolist(), device_slots.tolist(), strict=True)
        )


def test_auto_is_decided_for_each_direction_and_places_the_index_tensors(monkeypatch):
    r = rig(io_backend="auto", at_once=False)
    asked, given = [], []

    def plan(io_backend, tokens, *, to_host, phase):
        asked.append((io_backend, tokens, to_host, phase))
        return TransferPlan("direct" if to_host else "kernel", 3, False, "said so")

    for name in ("backup_from_device_all_layer", "load_to_device_per_layer"):
        monkeypatch.setattr(r.host, name, lambda *args: given.append(args[3:]))
    monkeypatch.setattr(r.host, "plan_transfer", plan)
    r.controller.phase = "decode"
    host_slots = r.controller.write(r.allocator.alloc(2))
    assert r.controller.last_plan.io_backend == "direct"
    assert given == []  # the thread has not come to it yet
    assert r.machine.current_stream().query()  # direct: no index tensor was moved
    r.controller.load(host_slots)
    r.controller.start_loading()
    assert not r.machine.current_stream().query()
    r.machine.synchronize()
    assert asked == [("auto", 2, True, "decode"), ("auto", 2, False, "decode")]
    assert r.controller.last_plan.why == "said so"
    assert sorted(given, key=len) == [("direct",), (0, "kernel", 3), (1, "kernel", 3)]


# ---- eviction, reset, refusals -------------------------------------------------------------------


def test_evictions_free_slots_and_return_their_number():
    r = rig()
    slots, host_slots = r.allocator.alloc(4), r.host.alloc(6)
    assert r.controller.evict_device(slots) == 4
    assert r.allocator.available_size() == r.allocator.size
    assert r.controller.evict_host(host_slots) == 6
    assert r.host.available_size() == r.host.size
    with pytest.raises(DoubleFree):
        r.controller.evict_device(slots)
    with pytest.raises(DoubleFree):
        r.controller.evict_host(host_slots)
    with pytest.raises(InvalidArgument, match="backup_only=False"):
        r.controller.evict_host(host_slots, backup_only=False)


def test_reset_waits_for_running_copies_and_forgets_queued_ones():
    r = rig()
    _, host_slots = backed_up(r, 7)
    r.controller.load(host_slots)
    r.controller.start_loading()
    r.controller.write(r.allocator.alloc(2))
    r.controller.load(host_slots)
    r.controller.layer_done_counter.set_consumer(0)
    r.controller.reset()
    assert {"backup", "load layer 0", "load layer 1"} <= set(ran(r))
    controller = r.controller
    assert controller.ack_load_queue == controller.ack_write_queue == controller.load_queue == []
    counter = controller.layer_done_counter
    assert (counter.producer_index, counter.consumer_index) == (-1, -1)
    assert controller.start_loading() == -1


def test_bad_construction_is_refused_by_name():
    r = rig()
    good = {"token_to_kv_pool_allocator": r.allocator, "mem_pool_host": r.host, "page_size": 2}
    for error, change in [
        (WrongTier, {"mem_pool_host": r.pool}),
        (UnknownName, {"write_policy": "write_never"}),
        (UnknownName, {"io_backend": "copy"}),
        (InvalidArgument, {"page_size": 4}),
        (InvalidArgument, {"storage_backend": "nowhere"}),
    ]:
        with pytest.raises(error):
            HiCacheController(**good | change)
    assert r.pool.layer_transfer_counter is r.controller.layer_done_counter


# ---- small parts ---------------------------------------------------------------------------------


def test_merge_keeps_pairs_in_order_all_nodes_and_the_smallest_priority():
    ops = [
        CacheOperation(torch.tensor([0, 1]), torch.tensor([4, 5]), 1, priority=7),
        CacheOperation(torch.tensor([6]), torch.tensor([9]), 2, priority=3),
    ]
    merged = CacheOperation.merge_ops(ops)
    assert (merged.host_indices.tolist(), merged.device_indices.tolist()) == ([0, 1, 6], [4, 5, 9])
    assert (merged.node_ids, merged.priority) == ([1, 2], 3)
    assert CacheOperation.merge_ops(ops[:1]) is ops[0]
    assert sorted(ops) == ops[::-1]
    with pytest.raises(InvalidArgument):
        CacheOperation.merge_ops([])
    with pytest.raises(InvalidArgument, match=r"\(1,\).*\(2,\)"):
        CacheOperation(torch.tensor([0]), torch.tensor([4, 5]), 1)
    first, second = (CacheOperation(torch.tensor([0]), torch.tensor([0]), 1) for _ in range(2))
    assert first < second  # by default in the order of creation


def test_layer_events_know_their_layers():
    events = LayerLoadingEvent(2)
    for call in (events.complete, events.wait):
        call(1)
        for layer in (-1, 2):
            with pytest.raises(InvalidArgument, match=f"layer {layer}"):
                call(layer)
    assert events.finish_event is events.load_events[1]
    counter = LayerDoneCounter(2)
    for index in (-2, 3):
        with pytest.raises(InvalidArgument, match=f"consumer {index}"):
            counter.set_consumer(index)
    assert counter.consumer_index == -1


def test_transfer_buffer_is_a_bounded_queue_that_stops():
    stop = threading.Event()
    buffer, op = TransferBuffer(stop, buffer_count=1), object()
    assert buffer.empty()
    assert buffer.get(block=False) is None
    buffer.put(op)
    buffer.put(object(), block=False)  # dropped
    assert buffer.full()
    assert buffer.get() is op
    stop.set()
    buffer.put(op)  # dropped: it has stopped
    assert buffer.empty()
    stop.clear()
    buffer.put(op)
    threading.Timer(0.01, stop.set).start()
    buffer.put(object(), timeout=0.001)  # waits for room until it is stopped
    buffer.clear()
    assert buffer.empty()


# ---- any program ---------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["new", "load", "drop"]), st.integers(0, 3)), max_size=12),
    st.lists(st.integers(0, 4), max_size=60),
    st.sampled_from(["kernel", "direct"]),
    st.sampled_from(["layer_first", "page_head"]),
)
def test_rows_survive_any_order_of_copies(steps, choices, io_backend, layout):
    """Prefixes are computed, backed up, evicted and loaded again; every read sees its own rows."""
    r = rig(drawn(choices), layers=2, size=8, io_backend=io_backend, layout=layout)
    forward_stream = r.machine.Stream("forward")
    r.controller.register_forward_stream(forward_stream)
    cached = []  # (value, first slots, host slots)
    reads = []
    for value, (what, n) in enumerate(steps):
        if what == "new":
            slots = r.allocator.alloc(2)
            with r.machine.stream(forward_stream):
                forward_stream.wait_stream(r.machine.default_stream())
                forward(r, slots, value)
            host_slots = r.controller.write(slots)
            r.controller.ack_write_queue.pop().finish_event.synchronize()
            r.controller.evict_device(slots)
            if host_slots is not None:
                cached.append((value, slots, host_slots))
        elif cached and what == "drop":
            r.controller.evict_host(cached.pop(n % len(cached))[2])
        elif cached:
            value, first, host_slots = cached[n % len(cached)]
            new = r.controller.load(host_slots)
            r.controller.layer_done_counter.set_consumer(r.controller.start_loading())
            with r.machine.stream(forward_stream):
                forward_stream.wait_stream(r.machine.default_stream())
                for layer in range(2):
                    expected = [value * 1000 + layer * 100 + s for s in first.tolist()]
                    reads.append((read(r, layer, new), expected))
            r.controller.ack_load_queue.pop().finish_event.synchronize()
            r.controller.evict_device(new)  # the forward may still be reading them
    r.machine.synchronize()
    assert all(out == expected for out, expected in reads)
