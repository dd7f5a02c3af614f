"""Pinning: every call of the CUDA runtime, on a fake one."""

import gc
from math import gcd
from types import SimpleNamespace

import pytest
import torch

from refcache.errors import HostRegisterError, InvalidArgument
from refcache.pool import (
    HostTensorAllocator,
    LoadedCudart,
    MHATokenToKVPool,
    MHATokenToKVPoolHost,
    alloc_with_host_register,
)
from refcache.reference import LAYOUTS

PAGE = 4096


class FakeCudart:
    """Registers up to ``room`` bytes; keeps one error until it is asked for it."""

    def __init__(self, room=1 << 40, shift=0, refuse_pointer=False):
        self.room, self.shift, self.refuse_pointer = room, shift, refuse_pointer
        self.registered, self.error, self.all = {}, 0, []

    def _fail(self, code):
        self.error = code
        return code

    def cudaHostRegister(self, address, size, flags):
        assert (self.error, flags) == (0, 0), "an error was left behind"
        if size + sum(self.registered.values()) > self.room:
            return self._fail(2)
        for other, length in self.registered.items():
            if address // PAGE <= (other + length - 1) // PAGE and other <= address + size - 1:
                return self._fail(712)
        self.registered[address] = size
        self.all.append((address, size))
        return 0

    def cudaHostUnregister(self, address):
        return 0 if self.registered.pop(address, None) is not None else self._fail(713)

    def cudaHostGetDevicePointer(self, address):
        return (self._fail(1), 0) if self.refuse_pointer else (0, address + self.shift)

    def cudaGetLastError(self):
        error, self.error = self.error, 0
        return error


def test_buffer_is_registered_whole_and_in_chunks_that_split_no_page():
    page_bytes = 1152 * 3
    unit = page_bytes * PAGE // gcd(page_bytes, PAGE)
    cudart = FakeCudart()
    allocator = HostTensorAllocator(cudart, chunk_bytes=2 * unit + page_bytes + 5)
    buffer = alloc_with_host_register(
        (5 * unit // page_bytes, page_bytes), torch.uint8, "cpu", True, allocator, page_bytes
    )
    start = buffer.data_ptr()
    assert cudart.all == [
        (start, 2 * unit),
        (start + 2 * unit, 2 * unit),
        (start + 4 * unit, unit),
    ]
    assert start % PAGE == 0
    assert (buffer == 0).all()
    allocator.release()
    assert cudart.registered == {}
    allocator.release()
    assert cudart.error == 0


def test_buffer_is_one_range_that_starts_with_its_storage():
    cudart = FakeCudart()
    allocator = HostTensorAllocator(cudart)
    buffer = alloc_with_host_register((3, PAGE + 8), torch.int16, "cpu", True, allocator, 2 * 8)
    assert cudart.all == [(buffer.untyped_storage().data_ptr(), 2 * 3 * (PAGE + 8))]
    assert buffer.data_ptr() % PAGE == 0


def test_memory_that_is_none_or_elsewhere_is_refused():
    for dims, device in (((0, 2), "cpu"), ((2,), "meta")):
        with pytest.raises(InvalidArgument):
            HostTensorAllocator().allocate(dims, torch.int8, device)


def test_page_larger_than_a_chunk_is_registered_whole():
    cudart = FakeCudart()
    allocator = HostTensorAllocator(cudart, chunk_bytes=PAGE)
    alloc_with_host_register((2, 3 * PAGE), torch.uint8, "cpu", True, allocator, 3 * PAGE)
    assert [size for _, size in cudart.all] == [3 * PAGE, 3 * PAGE]


def test_nothing_is_registered_without_pin_memory():
    cudart = FakeCudart()
    alloc_with_host_register((8,), torch.int32, "cpu", False, HostTensorAllocator(cudart))
    assert cudart.all == []


def test_without_a_device_memory_counts_as_pinned():
    allocator = HostTensorAllocator()
    assert alloc_with_host_register((8,), torch.int32, "cpu", True, allocator).shape == (8,)
    allocator.release()


def test_refused_registration_is_undone_and_its_error_cleared():
    cudart = FakeCudart(room=2 * PAGE)
    allocator = HostTensorAllocator(cudart, chunk_bytes=PAGE)
    kept = alloc_with_host_register((PAGE,), torch.uint8, "cpu", True, allocator)
    with pytest.raises(HostRegisterError, match="cudaHostRegister returned 2 of 4096 bytes"):
        alloc_with_host_register((2 * PAGE,), torch.uint8, "cpu", True, allocator)
    assert list(cudart.registered) == [kept.data_ptr()]
    assert allocator.ranges == [(kept.data_ptr(), PAGE)]
    assert cudart.error == 0


def test_memory_that_the_device_sees_elsewhere_is_refused():
    for cudart in (FakeCudart(shift=64), FakeCudart(refuse_pointer=True)):
        with pytest.raises(HostRegisterError, match=r"device address is|DevicePointer returned 1"):
            alloc_with_host_register((8,), torch.int32, "cpu", True, HostTensorAllocator(cudart))
        assert cudart.registered == {}
        assert cudart.error == 0


def test_refused_unregistration_leaves_no_error_behind():
    cudart = FakeCudart()
    allocator = HostTensorAllocator(cudart)
    alloc_with_host_register((8,), torch.int32, "cpu", True, allocator)
    cudart.registered.clear()
    allocator.release()
    assert cudart.error == 0


def device_pool(v_head_dim):
    return MHATokenToKVPool(8, 2, torch.float16, 3, 5, 2, "cpu", v_head_dim=v_head_dim)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("v_head_dim", [5, 3])
def test_host_pool_registers_every_plane_and_unregisters_on_release(layout, v_head_dim):
    cudart = FakeCudart()
    host = MHATokenToKVPoolHost(device_pool(v_head_dim), 2.0, 0, 2, layout, cudart=cudart)
    for plane in host.planes:
        first, last = plane.data_ptr(), plane.data_ptr() + plane.numel() * 2
        assert any(a <= first and last <= a + size for a, size in cudart.all)
    host.release()
    assert cudart.registered == {}


def test_host_pool_that_is_gone_has_unregistered_its_memory():
    cudart = FakeCudart()
    host = MHATokenToKVPoolHost(device_pool(5), 2.0, 0, 2, "layer_first", cudart=cudart)
    assert cudart.registered
    del host
    gc.collect()
    assert cudart.registered == {}


def test_host_pool_whose_second_plane_is_refused_unregisters_the_first():
    cudart = FakeCudart(room=18 * 2 * 3 * 5 * 2)
    with pytest.raises(HostRegisterError) as caught:
        MHATokenToKVPoolHost(device_pool(3), 2.0, 0, 2, "layer_first", cudart=cudart)
    assert len(cudart.all) == 1
    assert cudart.registered == {}
    del caught


def test_loaded_cudart_is_torchs(monkeypatch):
    opened = []
    monkeypatch.setattr("ctypes.CDLL", lambda name: opened.append(name))
    monkeypatch.setattr("torch.version.cuda", "13.0")
    LoadedCudart()
    assert opened == ["libcudart.so.13"]


def test_host_pool_of_a_cuda_device_registers_with_cudas_runtime(monkeypatch):
    cudart = FakeCudart()
    monkeypatch.setattr("refcache.pool.host.LoadedCudart", lambda: cudart)
    device = device_pool(5)
    device.device = "cuda:0"
    MHATokenToKVPoolHost(device, 2.0, 0, 2, "layer_first", backend="reference")
    assert len(cudart.all) == 1


def test_loaded_cudart_calls_the_library():
    def get_pointer(seen, address, flags):
        seen._obj.value = address.value + 1
        return 0

    library = SimpleNamespace(
        cudaHostRegister=lambda a, n, f: 0 if (a.value, n.value, f.value) == (8, 16, 0) else 1,
        cudaHostUnregister=lambda a: a.value,
        cudaHostGetDevicePointer=get_pointer,
        cudaGetLastError=lambda: 3,
    )
    cudart = LoadedCudart(library)
    assert cudart.cudaHostRegister(8, 16, 0) == 0
    assert cudart.cudaHostUnregister(5) == 5
    assert cudart.cudaHostGetDevicePointer(8) == (0, 9)
    assert cudart.cudaGetLastError() == 3
