"""The host tier on a card: pinned pools, both I/O backends, streams of the real machine."""

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from refcache.allocator import PagedTokenToKVPoolAllocator
from refcache.controller import HiCacheController, tuning
from refcache.errors import CopyFailed, HostRegisterError
from refcache.pool import HostTensorAllocator, LoadedCudart, MHATokenToKVPool, host_pool_for
from refcache.pool.host import MHATokenToKVPoolHost
from refcache.reference import LAYOUTS
from refcache.runtime import CudaRuntime
from refcache.types import ServerArgs

LAYERS, PAGE, TOKENS = 3, 4, 512


def rig(layout, io_backend, at_once=True):
    machine = CudaRuntime()
    pool = MHATokenToKVPool(
        TOKENS, PAGE, torch.float16, 2, 64, LAYERS, "cuda", v_head_dim=32, runtime=machine
    )
    allocator = PagedTokenToKVPoolAllocator(
        TOKENS, PAGE, torch.float16, "cuda", pool, runtime=machine
    )
    host = host_pool_for(pool, ServerArgs(page_size=PAGE, hicache_mem_layout=layout))
    if not at_once:
        host.small_load_bytes = 0
    controller = HiCacheController(allocator, host, PAGE, io_backend=io_backend)
    return machine, pool, allocator, host, controller


@pytest.mark.parametrize(
    ("layout", "io_backend", "at_once"),
    [*product(LAYOUTS, ("kernel", "direct", "auto"), (True,))]
    + [(layout, "kernel", False) for layout in LAYOUTS],
)
def test_rows_go_to_the_host_and_come_back_elsewhere(layout, io_backend, at_once):
    machine, pool, allocator, host, controller = rig(layout, io_backend, at_once)
    forward = machine.Stream("forward")
    controller.register_forward_stream(forward)
    generator = torch.Generator("cuda").manual_seed(0)
    rows = [
        torch.randn(LAYERS, TOKENS // 2, 2, d, generator=generator, device="cuda").half()
        for d in (64, 32)
    ]
    slots = allocator.alloc(TOKENS // 2)
    with machine.stream(forward):
        forward.wait_stream(machine.default_stream())
        torch.cuda._sleep(20_000_000)  # the write must wait for what comes after this
        for layer in range(LAYERS):
            pool.set_kv_buffer(layer, slots, rows[0][layer], rows[1][layer])
    host_slots = controller.write(slots)
    controller.ack_write_queue.pop().finish_event.synchronize()
    controller.evict_device(slots)
    allocator.alloc(PAGE)  # so that they come back somewhere else
    with machine.stream(forward):
        torch.cuda._sleep(20_000_000)  # the load must wait for what this stream still writes
        for layer in range(LAYERS):
            pool.set_kv_buffer(layer, slots, -rows[0][layer], -rows[1][layer])
    new = controller.load(host_slots)
    controller.layer_done_counter.set_consumer(controller.start_loading())
    with machine.stream(forward):
        for layer in range(LAYERS):
            got = pool.get_key_buffer(layer)[new], pool.get_value_buffer(layer)[new]
            for plane in (0, 1):
                assert torch.equal(got[plane], rows[plane][layer]), (layer, plane)
    controller.reset()
    host.release()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("at_once", [True, False])
def test_consumer_waits_for_the_load_that_its_slot_carries_now(layout, at_once):
    # Seven loads through three slots, the load stream always behind: a flag or an event of an
    # earlier load of the slot must not let the consumer go. The host waits for free slots only.
    machine, pool, allocator, host, controller = rig(layout, "kernel", at_once)
    generator = torch.Generator("cuda").manual_seed(0)
    wanted, held = [], []
    for _ in range(7):
        slots = allocator.alloc(PAGE * 8)
        for plane in pool.planes:
            plane.buffer[:, slots] = torch.randn(
                plane.buffer[:, slots].shape, generator=generator, device="cuda"
            ).half()
        wanted.append([plane.buffer[:, slots].clone() for plane in pool.planes])
        held.append(controller.write(slots))
        controller.ack_write_queue.pop().finish_event.synchronize()
        controller.evict_device(slots)
    for plane in pool.planes:
        plane.buffer.zero_()
    controller.load(held[0])  # compiles the kernel: what follows is issued while the loads sleep
    controller.start_loading()
    torch.cuda.synchronize()
    consumer, seen = machine.Stream("consumer"), []
    for host_slots in held:
        new = controller.load(host_slots)
        with machine.stream(controller.load_stream):
            torch.cuda._sleep(20_000_000)
        controller.layer_done_counter.set_consumer(controller.start_loading())
        with machine.stream(consumer):
            consumer.wait_stream(machine.default_stream())  # which has moved the index tensors
            rows = [
                [pool.get_key_buffer(layer)[new], pool.get_value_buffer(layer)[new]]
                for layer in reversed(range(LAYERS))
            ]
            seen.append([torch.stack(plane[::-1]) for plane in zip(*rows, strict=True)])
    torch.cuda.synchronize()
    for got, want in zip(seen, wanted, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    controller.reset()
    host.release()


def test_host_pool_is_pinned_until_it_is_released():
    *_, host, _ = rig("page_first", "kernel")
    assert all(plane.is_pinned() for plane in host.planes)
    host.release()
    assert not any(plane.is_pinned() for plane in host.planes)


def test_every_page_of_a_buffer_in_chunks_can_be_copied_whole():
    page = 1152
    allocator = HostTensorAllocator(LoadedCudart(), chunk_bytes=1 << 16)
    buffer = allocator.allocate((1024, page), torch.uint8, "cpu")
    allocator.register(buffer, page)
    assert len(allocator.ranges) > 1
    buffer.copy_((torch.arange(buffer.numel()) % 251).view(buffer.shape))
    device = torch.empty_like(buffer, device="cuda")
    for number in range(len(buffer)):
        device[number].copy_(buffer[number], non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), buffer)
    allocator.release()


def test_refused_registration_leaves_no_error_for_the_next_call():
    cudart = LoadedCudart()
    allocator = HostTensorAllocator(cudart)
    buffer = allocator.allocate((1 << 16,), torch.uint8, "cpu")
    allocator.register(buffer, 1)
    with pytest.raises(HostRegisterError, match="cudaHostRegister returned"):
        HostTensorAllocator(cudart).register(buffer, 1)
    assert torch.ones(3, device="cuda").add(1).sum().item() == 6
    allocator.release()
    assert cudart.cudaHostUnregister(buffer.data_ptr()) != 0
    assert cudart.cudaGetLastError() != 0
    assert torch.ones(3, device="cuda").add(1).sum().item() == 6


def test_memory_of_a_pool_that_was_not_pinned_is_copied_by_waiting():
    _, pool, *_ = rig("layer_first", "kernel")
    host = MHATokenToKVPoolHost(pool, 2.0, 0, PAGE, "layer_first", pin_memory=False)
    assert not host.planes[0].is_pinned()
    slots = torch.arange(PAGE, 2 * PAGE)
    pool.planes[0].buffer[:, PAGE : 2 * PAGE] = 3
    host.backup_from_device_all_layer(pool, slots, slots, "direct")
    assert (host.k_buffer[:, PAGE : 2 * PAGE] == 3).all()


def test_tuning_gives_rules_for_both_directions(monkeypatch):
    monkeypatch.setattr(tuning, "PAGES", (64, 16))
    monkeypatch.setattr(tuning, "CAPS", (1, 3))
    said = []
    costs = tuning.measure(said.append)
    assert 3 <= len(said) == len(costs) <= 5
    assert all(cost.ms >= 0 and cost.gbps > 0 for ways in costs.values() for cost in ways.values())
    rules = tuning.rules_from(costs)
    assert {r.to_host for r in rules} == {True, False}  # which way is cheaper is measured
    assert {r.io_backend for r in rules} <= {"kernel", "direct"}


def test_tuning_finds_a_way_that_brings_other_bytes(monkeypatch):
    monkeypatch.setattr(tuning, "CAPS", (2,))
    rig = tuning._Rig(64, None)
    copy = rig.host.load_to_device_all_layer

    def wrong(pool, host_slots, slots, *how):
        copy(pool, host_slots.roll(1), slots, *how)

    monkeypatch.setattr(rig.host, "load_to_device_all_layer", wrong)
    with pytest.raises(CopyFailed, match="kernel, 2 programs, to the device: layer 0"):
        rig.cost(("kernel", 2), tuning.Moved(False, 1, tuning._total(tuning.SMALL)))


@pytest.mark.parametrize("failing", [0, 2])
def test_thread_that_fails_lets_nobody_wait(failing, monkeypatch):
    machine, pool, allocator, host, controller = rig("layer_first", "direct")
    host_slots = controller.write(allocator.alloc(PAGE * 8))
    controller.ack_write_queue.pop().finish_event.synchronize()
    raise_flag = machine.raise_flag

    def refuse(flags, part):
        if part == failing and controller.failure is None:
            raise OSError("the driver refused a copy")
        raise_flag(flags, part)

    monkeypatch.setattr(machine, "raise_flag", refuse)
    controller.load(host_slots)
    controller.layer_done_counter.set_consumer(controller.start_loading())
    for layer in range(LAYERS):
        pool.get_key_buffer(layer)
    torch.cuda.synchronize()  # the streams' waits end
    controller.ack_load_queue.pop().finish_event.synchronize()
    assert isinstance(controller.failure, CopyFailed)
    controller.reset()
    assert controller.failure is None
    assert controller.io_backend == "kernel"
    host.release()


DEVICE_CALLS_DURING_A_LOAD = """
import sys, time, torch
sys.path.insert(0, {folder!r})
from test_host_tier import LAYERS, PAGE, TOKENS, rig

machine, pool, allocator, host, controller = rig("layer_first", "direct")
host_slots = controller.write(allocator.alloc(TOKENS // 2))
controller.ack_write_queue.pop().finish_event.synchronize()
raise_flag = machine.raise_flag
machine.raise_flag = lambda flags, part: (time.sleep(0.05), raise_flag(flags, part))
cached = torch.empty(2**22, device="cuda")
registered = torch.empty(2**20)
torch.cuda.cudart().cudaHostRegister(registered.data_ptr(), 2**22, 0)
controller.load(host_slots)
controller.layer_done_counter.set_consumer(controller.start_loading())
for layer in range(LAYERS):
    pool.get_key_buffer(layer)
    del cached
    torch.cuda.empty_cache()
    cached = torch.empty(2**22 << layer, device="cuda")
torch.cuda.cudart().cudaHostUnregister(registered.data_ptr())
torch.cuda.synchronize()
assert controller.failure is None
print("done")
"""


def test_calls_that_wait_for_the_device_end_while_a_load_is_issued():
    """cudaFree and cudaHostUnregister hold the driver's lock, which the thread needs, and wait."""
    program = DEVICE_CALLS_DURING_A_LOAD.format(folder=str(Path(__file__).parent))
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "done\n", run.stderr


def test_start_loading_returns_before_anything_is_listed():
    *_, allocator, host, controller = rig("layer_first", "auto")
    controller.io_backend = "direct"
    host_slots = controller.write(allocator.alloc(TOKENS // 2))
    ack = controller.ack_write_queue.pop().finish_event
    ack.synchronize()
    torch.cuda._sleep(200_000_000)  # the caller's stream computes its slots for a tenth of a second
    new = controller.load(host_slots)
    producer = controller.start_loading()
    load = controller.ack_load_queue[0].finish_event
    assert not load.query()  # although its event was never recorded
    assert not controller.layer_done_counter.events[producer].finish_event.query()
    load.synchronize()
    assert len(new) == TOKENS // 2
    assert controller.last_plan.io_backend == "direct"
    controller.reset()
    host.release()
