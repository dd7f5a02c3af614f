"""Host pools: sizes, slots, and rows that come back bit for bit, whatever the layout."""

import threading
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refcache.errors import (
    DoubleFree,
    HostPoolTooSmall,
    InvalidArgument,
    InvalidSlot,
    UnknownName,
    WrongTier,
)
from refcache.pool import (
    HostKVCache,
    KVCache,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    MLATokenToKVPool,
    MLATokenToKVPoolHost,
    host_pool_for,
)
from refcache.reference import LAYOUTS
from refcache.reference.transfer import FLAG_EPOCH
from refcache.runtime import ImmediateRuntime, Region, SimulatedRuntime, Tracker, eager, lazy
from refcache.types import ServerArgs

LAYERS = 3


def mha(page_size=2, size=8, v_head_dim=None, runtime=None, layers=LAYERS, head_num=2):
    return MHATokenToKVPool(
        size, page_size, torch.int64, head_num, 4, layers, "cpu",
        v_head_dim=v_head_dim, runtime=runtime,
    )  # fmt: skip


def mla(page_size=2, size=8):
    return MLATokenToKVPool(size, page_size, torch.int64, 5, 2, LAYERS, "cpu")


def three_planes(page_size=2, size=8):
    widths = [("k", 2, 4), ("v", 2, 3), ("index", 1, 5)]
    return KVCache(size, page_size, torch.int64, LAYERS, "cpu", widths)


KINDS = {
    "mha": (mha, MHATokenToKVPoolHost),
    "mha, narrow v": (lambda p: mha(p, v_head_dim=2), MHATokenToKVPoolHost),
    "mha, wide v": (lambda p: mha(p, v_head_dim=7), MHATokenToKVPoolHost),
    "mla": (mla, MLATokenToKVPoolHost),
    "three planes": (three_planes, HostKVCache),
}


def pair(kind="mha", page_size=2, layout="layer_first", **kwargs):
    make, host_kind = KINDS[kind]
    device = make(page_size)
    return device, host_kind(device, 2.0, 0, page_size, layout, **kwargs)


def fill(pool, first):
    """Give every element of every plane a value of its own."""
    for plane in pool.planes:
        buffer = getattr(plane, "buffer", plane)
        buffer.copy_(torch.arange(first, first + buffer.numel()).view(buffer.shape))
        first += buffer.numel()


def row(host, plane, layer, slot):
    """One row of a host pool, by the names of the layout's axes (not by its strides)."""
    buffer, page = host.planes[plane], host.page_size
    where = {"T": slot, "G": slot // page, "P": slot % page, "L": layer}
    return buffer[tuple(where.get(axis, slice(None)) for axis in LAYOUTS[host.layout])]


# ---- sizes and construction ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_size", "device_size", "ratio", "size"),
    [(1, 8, 1.0, 9), (2, 16, 1.0, 18), (2, 8, 2.0, 18), (4, 8, 1.3, 12), (1, 6, 1.0, 7)],
)
def test_size_is_in_whole_pages_and_one_page_more(page_size, device_size, ratio, size):
    host = MHATokenToKVPoolHost(mha(page_size, device_size), ratio, 0, page_size, "layer_first")
    assert (host.size, host.page_num) == (size, size // page_size)
    assert host.available_size() == size


def test_size_in_gb_wins_over_the_ratio():
    device = mha(2, 8)
    host = MHATokenToKVPoolHost(device, 1e9, 1, 2, "layer_first", backend="reference")
    assert host.size_per_token == (2 * 4 + 2 * 4) * LAYERS * 8
    assert host.size == (10**9 // host.size_per_token // 2 + 1) * 2


def test_pool_that_is_not_larger_than_the_device_pool_is_refused():
    with pytest.raises(HostPoolTooSmall, match="6 slots"):
        MHATokenToKVPoolHost(mha(2, 8), 0.5, 0, 2, "layer_first")
    with pytest.raises(HostPoolTooSmall, match="8 slots"):
        MHATokenToKVPoolHost(mha(2, 8), 0.75, 0, 2, "layer_first")


def test_bad_construction_is_refused_by_name():
    device, host = pair()
    with pytest.raises(WrongTier, match="MHATokenToKVPoolHost as device pool"):
        MHATokenToKVPoolHost(host, 2.0, 0, 2, "layer_first")
    with pytest.raises(UnknownName, match="layer_last"):
        MHATokenToKVPoolHost(device, 2.0, 0, 2, "layer_last")
    with pytest.raises(UnknownName, match="mooncake"):
        MHATokenToKVPoolHost(device, 2.0, 0, 2, "layer_first", allocator_type="mooncake")
    with pytest.raises(InvalidArgument, match="page_size=4"):
        MHATokenToKVPoolHost(device, 2.0, 0, 4, "layer_first")


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_token_are_those_of_the_device(kind):
    device, host = pair(kind)
    stored = sum(plane.buffer.nbytes for plane in device.planes)
    per_slot = stored // (device.size + device.page_size)
    assert host.size_per_token == per_slot
    assert sum(plane.numel() * 8 for plane in host.planes) == host.size * per_slot


def test_stored_dtype_is_the_device_pools():
    device = MHATokenToKVPool(8, 2, torch.float8_e4m3fn, 2, 4, LAYERS, "cpu")
    host = host_pool_for(device, ServerArgs(page_size=2))
    assert {plane.dtype for plane in host.planes} == {torch.uint8}


def test_kv_buffer_is_one_tensor_where_widths_are_equal():
    _, host = pair("mha", layout="page_first")
    assert host.kv_buffer.shape == (2, host.size, LAYERS, 2, 4)
    host.kv_buffer[1] = 7
    assert (host.v_buffer == 7).all()
    assert (host.k_buffer == 0).all()
    _, host = pair("mha, narrow v")
    assert [p.shape[-1] for p in host.kv_buffer] == [4, 2]
    _, host = pair("mla")
    assert host.kv_buffer.shape == (LAYERS, host.size, 1, 7)


@pytest.mark.parametrize("kind", KINDS)
def test_host_pool_for_copies_every_plane_of_any_kind(kind):
    make, host_kind = KINDS[kind]
    device = make(2)
    host = host_pool_for(device, ServerArgs(page_size=2, hicache_mem_layout="page_head"))
    assert type(host) is host_kind
    assert (len(host.planes), host.layout) == (len(device.planes), "page_head")


def test_subclass_with_a_plane_of_its_own_has_it_copied():
    class WithIndex(MHATokenToKVPool):
        def _create_buffers(self):
            index = torch.zeros(LAYERS, self.size + self.page_size, 1, 3, dtype=torch.int64)
            self.planes += (type(self.planes[0])("index", index, 1, 3),)

    device = WithIndex(8, 2, torch.int64, 2, 4, LAYERS, "cpu")
    assert len(host_pool_for(device, ServerArgs(page_size=2)).planes) == 3


# ---- slots ---------------------------------------------------------------------------------------


def test_alloc_takes_whole_pages_from_the_front_and_free_adds_to_the_end():
    _, host = pair()
    a, b = host.alloc(4), host.alloc(2)
    assert (a.tolist(), b.tolist()) == ([0, 1, 2, 3], [4, 5])
    assert host.free(torch.tensor([2, 3])) == 2
    assert host.free(torch.tensor([], dtype=torch.long)) == 0
    assert host.free(b.to(torch.int32)) == 2
    assert host.free_slots.tolist() == [*range(6, 18), 2, 3, 4, 5]
    assert host.alloc(14).tolist() == [*range(6, 18), 2, 3]


def test_alloc_of_more_than_is_free_is_none_and_changes_nothing():
    _, host = pair()
    host.alloc(10)
    assert host.alloc(10) is None
    assert host.available_size() == 8
    assert host.alloc(8) is not None
    assert host.alloc(2) is None
    assert host.alloc(0).tolist() == []


def test_slots_that_were_handed_out_do_not_share_memory_with_the_pool():
    _, host = pair()
    mine = host.alloc(2)
    assert mine.untyped_storage().nbytes() == 2 * 8  # not a view of the free list
    host.free(mine)
    mine.fill_(17)
    assert host.free_slots.tolist() == [*range(2, 18), 0, 1]


def test_second_free_of_a_slot_is_refused_and_changes_nothing():
    # The published double free: 18 slots; alloc 4, free 4, free 2 gave 20 "free" slots.
    _, host = pair()
    taken = host.alloc(4)
    host.free(taken)
    with pytest.raises(DoubleFree, match="host slot 2"):
        host.free(taken[2:])
    again = host.alloc(4)
    with pytest.raises(DoubleFree, match="named twice"):
        host.free(torch.cat([again, again]))
    assert host.available_size() == 14


@pytest.mark.parametrize(
    ("slots", "error"),
    [
        ([0], InvalidArgument),  # half a page
        ([1, 2], InvalidArgument),  # parts of two pages
        ([1, 0], InvalidArgument),  # not ascending
        ([0, 3], InvalidArgument),  # a head and a tail, of two pages
        ([0, 1, 3, 4], InvalidArgument),  # the second is no page
        ([-2, -1], InvalidSlot),
        ([18, 19], InvalidSlot),
    ],
)
def test_bad_free_is_refused(slots, error):
    _, host = pair()
    host.alloc(4)
    with pytest.raises(error):
        host.free(torch.tensor(slots))
    assert host.available_size() == 14
    with pytest.raises(InvalidArgument):
        host.free(torch.tensor(slots, dtype=torch.float32))
    with pytest.raises(InvalidArgument):
        host.free(torch.tensor([slots]))


def test_a_free_of_a_held_and_a_free_page_is_refused_whole():
    _, host = pair()
    host.alloc(4)
    with pytest.raises(DoubleFree, match="host slot 4"):
        host.free(torch.tensor([2, 3, 4, 5]))
    assert host.available_size() == 14
    assert host.free(torch.tensor([2, 3])) == 2


def test_the_slot_behind_the_last_is_refused_at_page_size_1():
    _, host = pair(page_size=1)
    host.alloc(4)
    with pytest.raises(InvalidSlot):
        host.free(torch.tensor([host.size]))


def test_check_held_wants_slots_that_were_handed_out():
    _, host = pair()
    host.check_held(host.alloc(4))
    host.check_held(torch.tensor([], dtype=torch.long))
    for slots in ([3, 4], [-1], [18], [10**6]):
        with pytest.raises(InvalidSlot, match=f"host slot {slots[-1]}"):
            host.check_held(torch.tensor(slots))


@pytest.mark.parametrize("need", [-2, 1, 3])
def test_alloc_of_parts_of_pages_is_refused(need):
    with pytest.raises(InvalidArgument):
        pair()[1].alloc(need)


def test_clear_makes_everything_free():
    _, host = pair()
    host.alloc(6)
    host.clear()
    assert host.alloc(18).tolist() == list(range(18))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.lists(st.tuples(st.booleans(), st.integers(0, 9))))
def test_every_slot_has_one_owner_and_pages_stay_whole(page_size, steps):
    _, host = pair(page_size=page_size)
    held = []
    for alloc, n in steps:
        if alloc:
            taken = host.alloc(n * page_size)
            assert (taken is None) == (n * page_size > host.size - sum(map(len, held)))
            if taken is not None:
                pages = taken.view(-1, page_size)
                assert (pages % page_size == torch.arange(page_size)).all()
                held.append(taken)
        elif held:
            host.free(held.pop(n % len(held)))
        slots = torch.cat([host.free_slots, *held])
        assert slots.sort().values.tolist() == list(range(host.size))


def test_every_change_of_the_slots_is_made_under_the_lock():
    _, host = pair()
    entered = []

    class Spy:
        def __enter__(self):
            entered.append(host.available_size())

        def __exit__(self, *_):
            entered.append(host.available_size())

    host.lock = Spy()
    host.free(host.alloc(4))
    host.alloc(2)
    host.clear()
    assert entered == [18, 14, 14, 18, 18, 16, 16, 18]


def test_slots_survive_threads():
    _, host = pair(page_size=1)
    taken = []

    def work():
        for _ in range(50):
            mine = host.alloc(3)
            host.free(mine[:2])
            taken.append(mine[2:])
            host.free(taken.pop())
        taken.append(host.alloc(2))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slots = torch.cat([host.free_slots, *taken])
    assert slots.sort().values.tolist() == list(range(17))


# ---- rows ----------------------------------------------------------------------------------------

GRID = list(product(LAYOUTS, KINDS, ("kernel", "direct", "auto")))


@pytest.mark.parametrize(("layout", "kind", "io_backend"), GRID)
def test_rows_come_back_bit_for_bit_and_nothing_else_changes(layout, kind, io_backend):
    device, host = pair(kind, layout=layout)
    fill(device, 1)
    fill(host, 10**6)
    before = [plane.clone() for plane in host.planes]
    saved = [plane.buffer.clone() for plane in device.planes]
    # From the report on index order: pages neither ascending nor in the same order on both sides.
    host_slots, device_slots = torch.tensor([6, 7, 2, 3]), torch.tensor([4, 5, 8, 9])
    host.backup_from_device_all_layer(device, host_slots, device_slots, io_backend)
    for plane, layer, slot in product(range(len(host.planes)), range(LAYERS), range(host.size)):
        if slot in host_slots:
            source = device_slots[host_slots.tolist().index(slot)]
            wanted = saved[plane][layer, source]
        else:
            old = type(host).__new__(type(host))
            old.planes, old.page_size, old.layout = before, host.page_size, host.layout
            wanted = row(old, plane, layer, slot)
        assert torch.equal(row(host, plane, layer, slot), wanted), (plane, layer, slot)
    assert all(torch.equal(p.buffer, s) for p, s in zip(device.planes, saved, strict=True))

    back = torch.tensor([2, 3, 6, 7])  # not where they came from
    fill(device, 5 * 10**6)
    poisoned = [plane.buffer.clone() for plane in device.planes]
    for layer in range(LAYERS):
        host.load_to_device_per_layer(device, host_slots, back, layer, io_backend)
        for plane, poison, save in zip(device.planes, poisoned, saved, strict=True):
            poison[layer, back] = save[layer, device_slots]
            assert torch.equal(plane.buffer, poison), layer
    loaded = [plane.buffer.clone() for plane in device.planes]
    fill(device, 5 * 10**6)
    if io_backend == "kernel":
        flags = host.runtime.flags(LAYERS)
        host.load_to_device_all_layer(device, host_slots, back, flags, io_backend)
        assert all(
            torch.equal(p.buffer, want) for p, want in zip(device.planes, loaded, strict=True)
        )
        assert flags.epoch == 1
        assert flags.values.tolist() == [FLAG_EPOCH] * LAYERS


@settings(max_examples=30, deadline=None)
@given(st.data(), st.sampled_from(sorted(LAYOUTS)), st.sampled_from([1, 2, 4]))
def test_transfer_is_a_set_of_pairs(data, layout, page_size):
    """Order, splitting and index dtype make no difference."""
    results = []
    slots = st.permutations(range(page_size, 8 + page_size))
    count = data.draw(st.integers(0, 8))
    device_slots = data.draw(slots)[:count]
    host_slots = data.draw(st.permutations(range(16)))[:count]
    order = data.draw(st.permutations(range(count)))
    cut = data.draw(st.integers(0, count))
    for pairs, parts, dtype in (
        (range(count), [(0, count)], torch.int64),
        (order, [(0, cut), (cut, count)], torch.int32),
    ):
        device, host = pair(page_size=page_size, layout=layout)
        fill(device, 1)
        ours = torch.tensor([host_slots[i] for i in pairs], dtype=dtype)
        theirs = torch.tensor([device_slots[i] for i in pairs], dtype=dtype)
        for start, stop in parts:
            host.backup_from_device_all_layer(
                device, ours[start:stop], theirs[start:stop], "kernel"
            )
        results.append([plane.clone() for plane in host.planes])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("row_bytes", [4, 16, 132, 576, 656, 1152, 1280])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_row_width_round_trips(row_bytes, layout):
    device = MLATokenToKVPool(4, 1, torch.uint8, row_bytes, 0, 1, "cpu")
    host = MLATokenToKVPoolHost(device, 2.0, 0, 1, layout)
    buffer = device.planes[0].buffer
    generator = torch.Generator().manual_seed(row_bytes)
    buffer.random_(0, 256, generator=generator)
    saved = buffer.clone()
    slots = torch.tensor([3, 1, 2])
    host.backup_from_device_all_layer(device, slots, slots, "kernel")
    buffer.zero_()
    host.load_to_device_per_layer(device, slots, slots.flip(0), 0, "direct")
    assert torch.equal(buffer[0, slots.flip(0)], saved[0, slots])


def test_bad_transfers_are_refused_before_the_launch():
    device, host = pair(runtime=SimulatedRuntime(lazy))
    two, one = torch.tensor([2, 3]), torch.tensor([2])
    with pytest.raises(UnknownName, match="io_backend 'dma'"):
        host.backup_from_device_all_layer(device, two, two, "dma")
    with pytest.raises(InvalidArgument, match="2 host and 1 device"):
        host.backup_from_device_all_layer(device, two, one, "kernel")
    with pytest.raises(InvalidArgument, match="host_indices"):
        host.backup_from_device_all_layer(device, two.float(), two, "kernel")
    with pytest.raises(InvalidArgument, match="layer_id=3"):
        host.load_to_device_per_layer(device, two, two, 3, "kernel")
    with pytest.raises(WrongTier):
        host.load_to_device_per_layer(host, two, two, 0, "kernel")
    with pytest.raises(InvalidArgument, match="planes"):
        host.load_to_device_per_layer(mla(), two, two, 0, "kernel")
    for ours, theirs, pool, count, message in (
        (two, one, device, LAYERS, "2 host and 1 device"),
        (two.float(), two, device, LAYERS, "host_indices"),
        (two, two, mla(), LAYERS, "planes"),
        (two, two, device, LAYERS - 1, "2 flags: expected 3"),
    ):
        flags = host.runtime.flags(count)
        with pytest.raises(InvalidArgument, match=message):
            host.load_to_device_all_layer(pool, ours, theirs, flags, "kernel")
    assert not host.runtime.history
    assert host.runtime.default_stream().query()


def test_kernels_are_refused_on_memory_that_is_not_pinned_and_direct_copies_block():
    machine = SimulatedRuntime(lazy)
    device = mha(runtime=machine)
    host = MHATokenToKVPoolHost(device, 2.0, 0, 2, "layer_first", pin_memory=False)
    two = torch.tensor([2, 3])
    with pytest.raises(InvalidArgument, match="not pinned"):
        host.backup_from_device_all_layer(device, two, two, "kernel")
    host.backup_from_device_all_layer(device, two, two, "direct")
    assert [access.name for access in machine.history] == ["backup"]
    pinned = MHATokenToKVPoolHost(device, 2.0, 0, 2, "layer_first")
    pinned.backup_from_device_all_layer(device, two, two, "direct")
    assert len(machine.history) == 1


class Recorder(ImmediateRuntime):
    """Keeps the regions of every launch."""

    def __init__(self):
        super().__init__()
        self.launches = []

    def launch(self, name, fn, reads=(), writes=(), indices=()):
        self.launches.append((name, list(reads), list(writes)))
        super().launch(name, fn, reads, writes, indices)


def test_launches_name_every_plane_layer_and_index_tensor_they_touch():
    recorder = Recorder()
    device = mha(runtime=recorder)
    host = MHATokenToKVPoolHost(device, 2.0, 0, 2, "layer_first")
    ours, theirs = torch.tensor([6, 7]), torch.tensor([2, 3])
    host.backup_from_device_all_layer(device, ours, theirs, "kernel")
    host.load_to_device_per_layer(device, ours, theirs, 1, "kernel")
    (backup, reads, writes), (load, load_reads, load_writes) = recorder.launches
    assert (backup, load) == ("backup", "load layer 1")
    assert [(r.pool, r.plane, r.layers) for r in reads[2:]] == [
        (device, p, range(3)) for p in (0, 1)
    ]
    assert [(r.pool, r.plane, r.layers) for r in writes] == [(host, p, range(3)) for p in (0, 1)]
    assert [(r.pool, r.plane, r.layers) for r in load_reads[2:]] == [(host, p, 1) for p in (0, 1)]
    assert [(r.pool, r.plane, r.layers) for r in load_writes] == [(device, p, 1) for p in (0, 1)]
    assert all(r[0].pool is ours and r[1].pool is theirs for r in (reads, load_reads))
    assert all(r.slots is theirs for r in (*reads[2:], *load_writes))
    assert all(r.slots is ours for r in (*writes, *load_reads[2:]))


def test_index_tensors_are_not_kept_alive_by_the_launch():
    machine = SimulatedRuntime(lazy, Tracker(stop=False))
    device = mha(runtime=machine)
    host = MHATokenToKVPoolHost(device, 2.0, 0, 2, "layer_first")
    host.backup_from_device_all_layer(device, torch.tensor([6, 7]), torch.tensor([2, 3]), "kernel")
    machine.synchronize()
    assert len(machine.tracker.reports) == 2


def test_lock_of_the_pool_orders_host_threads():
    machine = SimulatedRuntime(eager, Tracker())
    device = mha(runtime=machine)
    host = MHATokenToKVPoolHost(device, 2.0, 0, 2, "layer_first")
    with machine.actor("io"):
        slots = host.alloc(2)
        machine.host_access("fill", lambda: None, writes=[Region(host, 0, 0, slots)])
        host.free(slots)
    host.alloc(18)
    machine.host_access("reuse", lambda: None, writes=[Region(host, 0, 0, slots)])


# ---- who copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "pinned", "io_backend", "copies"),
    [
        ("reference", True, "kernel", "refcache.reference.transfer"),
        ("reference", True, "direct", "refcache.reference.transfer"),
        ("reference", False, "direct", "refcache.reference.transfer"),
        ("reference", True, "auto", "refcache.reference.transfer"),
        ("triton", True, "kernel", "torch._ops.refcache"),
        ("triton", True, "direct", "refcache_ops.engine"),
        ("triton", False, "direct", "refcache.reference.transfer"),
    ],
)
def test_io_backend_says_who_copies(backend, pinned, io_backend, copies):
    pytest.importorskip("triton")
    host = MHATokenToKVPoolHost(mha(), 2.0, 0, 2, "page_first", pin_memory=pinned, backend=backend)
    for name in ("backup_all_layer", "load_per_layer"):
        function = host._copy_function(name, io_backend)
        assert function.__module__ == copies
        assert function.__name__.partition(".")[0] == name  # of an op, with its overload


def test_rules_say_which_way_a_transfer_goes(monkeypatch):
    pytest.importorskip("triton")
    from refcache.pool import host_copies
    from refcache.pool.transfer_rule import TransferRule

    device = MHATokenToKVPool(8, 4, torch.int64, 2, 4, LAYERS, "cpu", v_head_dim=2)
    host = MHATokenToKVPoolHost(device, 2.0, 0, 4, "page_first_direct", backend="triton")
    piece = 4 * 2 * 2 * 8  # a page of V of one layer: slots, heads, width, bytes
    rules = (
        TransferRule(False, "direct", copy_bytes=piece),
        TransferRule(True, "direct", copy_bytes=piece + 1),
        TransferRule(True, "kernel", 5, phase="decode"),
        TransferRule(True, "kernel", 3, min_bytes=4 * host.size_per_token),
        TransferRule(True, "kernel", 2),
        TransferRule(False, "kernel", 7, at_once=100),
    )
    monkeypatch.setattr(host_copies, "rules_for", lambda card: rules)

    def plan(io_backend, tokens, to_host, phase=""):
        return host.plan_transfer(io_backend, tokens, to_host=to_host, phase=phase)

    assert plan("auto", 4, False)[:3] == ("direct", 0, False)
    assert plan("auto", 4, True)[:3] == ("kernel", 3, False)
    assert plan("auto", 3, True)[:3] == ("kernel", 2, False)
    assert plan("auto", 4, True, "decode")[:3] == ("kernel", 5, False)
    assert plan("direct", 4, True)[:3] == ("direct", 0, False)
    layer = host.size_per_token // LAYERS
    assert layer < 100 < 2 * layer
    assert plan("kernel", 1, False)[:3] == ("kernel", 7, True)
    assert plan("kernel", 2, False)[:3] == ("kernel", 7, False)
    host.small_load_bytes = 2 * layer
    assert plan("kernel", 2, False)[:3] == ("kernel", 7, True)
    assert f"copies of {piece}" in plan("auto", 4, True).why
    with pytest.raises(UnknownName, match="io_backend"):
        plan("dircet", 4, True)


def test_caps_reach_the_kernels(monkeypatch):
    pytest.importorskip("triton")
    host = MHATokenToKVPoolHost(mha(), 2.0, 0, 2, "page_first", backend="triton")
    function = host._copy_function("backup_all_layer", "kernel", 3)
    assert function.keywords == {"max_programs": 3}
    assert function.func is host._backend.backup_all_layer


def test_auto_without_kernels_is_the_only_backend_that_serves():
    device = mha()
    for pinned, wanted in ((True, "kernel"), (False, "direct")):
        host = MHATokenToKVPoolHost(device, 2.0, 0, 2, "layer_first", pin_memory=pinned)
        assert host.plan_transfer("auto", 2, to_host=True).io_backend == wanted
        two = torch.tensor([2, 3])
        host.backup_from_device_all_layer(device, two, two, "auto")
