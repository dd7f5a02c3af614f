"""Host memory that a device can read and write: allocation, pinning, and its release.

Pinned means registered with ``cudaHostRegister``. The rules, each of which was somebody's bug:

* a return code that is not 0 is an error, and what was registered before it is undone;
* a refused registration leaves an error behind that the next CUDA call would raise: it is cleared;
* the copy engine refuses a copy that crosses two registrations, so a buffer is one range; where it
  must be registered in chunks, none ends inside a KV page (or inside a page of the system), and no
  copy may be longer than a page;
* the range starts where the tensor's storage does: ``Tensor.is_pinned`` looks at that byte only;
* where a device sees registered memory at another address than the host, a kernel that is given the
  host's address faults: such memory is refused;
* ranges are unregistered when the memory is released.

Models SGLang's ``HostTensorAllocator`` and ``alloc_with_host_register``; left out: allocators of
storage backends, and the check that enough host memory is free.
"""

import ctypes
import mmap
from math import lcm, prod
from typing import Any, Protocol

import torch

from refcache.errors import HostRegisterError, InvalidArgument

SYSTEM_PAGE = mmap.PAGESIZE  # bytes


class Cudart(Protocol):
    """The functions of the CUDA runtime that pinning needs; 0 is success."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int: ...
    def cudaHostUnregister(self, address: int) -> int: ...
    def cudaHostGetDevicePointer(self, address: int) -> tuple[int, int]:
        """(return code, the address at which the device sees registered memory)."""
        ...

    def cudaGetLastError(self) -> int:
        """The error left behind, which this call clears."""
        ...


class LoadedCudart:
    """The CUDA runtime that torch has loaded (``torch.cuda.cudart()`` lacks two of the calls)."""

    def __init__(self, library: Any = None) -> None:
        """``library``: the loaded library; by default torch's."""
        if library is None:
            library = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}")
        self._library = library

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        return int(
            self._library.cudaHostRegister(
                ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(flags)
            )
        )

    def cudaHostUnregister(self, address: int) -> int:
        return int(self._library.cudaHostUnregister(ctypes.c_void_p(address)))

    def cudaHostGetDevicePointer(self, address: int) -> tuple[int, int]:
        seen = ctypes.c_void_p()
        code = self._library.cudaHostGetDevicePointer(
            ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
        return int(code), seen.value or 0

    def cudaGetLastError(self) -> int:
        return int(self._library.cudaGetLastError())


class HostTensorAllocator:
    """Allocates host tensors, registers them, and unregisters them all on :meth:`release`.

    Args:
        cudart: who registers; None where there is no device: memory then counts as pinned.
        chunk_bytes: the most that is registered at once, unless one page is larger; None: no limit.

    Attributes:
        ranges: address and bytes of every registered range.
        dims, dtype: what was allocated last.
    """

    def __init__(self, cudart: Cudart | None = None, chunk_bytes: int | None = None) -> None:
        self.cudart = cudart
        self.chunk_bytes = chunk_bytes
        self.ranges: list[tuple[int, int]] = []
        self.dims: tuple[int, ...] | None = None
        self.dtype: torch.dtype | None = None

    def allocate(self, dims: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """A zeroed tensor whose storage starts at a page of the system.

        Raises:
            InvalidArgument: ``device`` is not "cpu", or there is nothing to allocate.
        """
        self.dims, self.dtype = dims, dtype
        size = prod(dims) * dtype.itemsize
        if device != "cpu" or size == 0:
            raise InvalidArgument(f"host memory {dims} on {device!r}: expected some, on 'cpu'")
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(memory, dtype=dtype).view(dims)

    def register(self, buffer: torch.Tensor, page_bytes: int) -> None:
        """Pin ``buffer``, as one range or in chunks of whole KV pages of ``page_bytes``.

        Raises:
            HostRegisterError: a call was refused, or the device sees the memory elsewhere; nothing
                of ``buffer`` is registered then, and no error is left behind.
        """
        if self.cudart is None:
            return
        address, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
        step = size
        if self.chunk_bytes is not None:
            unit = lcm(page_bytes, SYSTEM_PAGE)
            step = max(1, self.chunk_bytes // unit) * unit
        before = len(self.ranges)
        for start in range(0, size, step):
            chunk = (address + start, min(step, size - start))
            refusal = self._register(*chunk)
            if refusal:
                self._unregister_from(before)
                raise HostRegisterError(
                    f"{refusal} of {chunk[1]} bytes at {chunk[0]:#x} (chunk at {start} of {size} "
                    "bytes): expected 0 and the same address on the device"
                )

    def release(self) -> None:
        """Unregister everything; a second call does nothing."""
        self._unregister_from(0)

    def _register(self, address: int, size: int) -> str:
        """Register one range; what went wrong, in words, or nothing."""
        assert self.cudart is not None
        code = self.cudart.cudaHostRegister(address, size, 0)
        if code != 0:
            self.cudart.cudaGetLastError()
            return f"cudaHostRegister returned {code}"
        self.ranges.append((address, size))
        code, seen = self.cudart.cudaHostGetDevicePointer(address)
        if code != 0:
            self.cudart.cudaGetLastError()
            return f"cudaHostGetDevicePointer returned {code}"
        return "" if seen == address else f"the device address is {seen:#x}"

    def _unregister_from(self, first: int) -> None:
        while len(self.ranges) > first:
            assert self.cudart is not None
            if self.cudart.cudaHostUnregister(self.ranges.pop()[0]) != 0:
                self.cudart.cudaGetLastError()


def alloc_with_host_register(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,
    allocator: HostTensorAllocator,
    page_bytes: int = 1,
) -> torch.Tensor:
    """A zeroed host tensor, registered if ``pin_memory``; ``allocator`` keeps the ranges.

    Raises:
        HostRegisterError: as :meth:`HostTensorAllocator.register`.
    """
    buffer = allocator.allocate(dims, dtype=dtype, device=device)
    if pin_memory:
        allocator.register(buffer, page_bytes)
    return buffer
