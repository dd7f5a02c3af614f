"""The few calls of the CUDA driver that PyTorch does not offer, through ``ctypes``.

Streams that wait for a value in device memory (how a stream waits for one layer) or write one (how
the copy engine announces it), and many host-device copies in one call (the copy-engine strategy).
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from refcache.errors import InvalidArgument, RefcacheError
from refcache.reference.transfer import FLAG_EPOCH, check_flags

_WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_OVERLAP_WITH_COMPUTE = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_HOST_POINTER_IS_DEVICE_POINTER = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class DriverError(RefcacheError, RuntimeError):
    """The CUDA driver refused a call; the message carries its return code."""


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _wait_value() -> Any:
    wait = _driver().cuStreamWaitValue64_v2
    wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)
    return wait


def _check(code: int, call: str) -> None:
    if code:
        raise DriverError(f"{call} returned {code}: expected 0")


def wait_flag(
    layer_flags: torch.Tensor, layer: int, epoch: int, stream: torch.cuda.Stream | None = None
) -> None:
    """Let ``stream`` (the current one by default) wait for a layer of the ``epoch``-th load.

    Work issued to the stream afterwards starts once ``layer_flags[layer]`` has reached ``epoch``
    epochs (see :func:`refcache.reference.load_layers`). The host does not wait. What raises the
    flag must have been issued: nothing else ends the wait, and a thread that has yet to issue it
    may stand behind a call that waits for the device with the driver's lock in hand.

    Raises:
        InvalidArgument: no such layer, or flags that are not on a CUDA device.
        DriverError: the driver refused the wait.
    """
    check_flags(layer_flags, len(layer_flags))
    if not layer_flags.is_cuda or not 0 <= layer < len(layer_flags):
        raise InvalidArgument(
            f"layer {layer} of {len(layer_flags)} flags on {layer_flags.device}: expected one of "
            "them, on a CUDA device"
        )
    stream = stream or torch.cuda.current_stream(layer_flags.device)
    flag = layer_flags.data_ptr() + 8 * layer
    code = _wait_value()(stream.cuda_stream, flag, epoch * FLAG_EPOCH, _WAIT_UNTIL_AT_LEAST)
    _check(code, "cuStreamWaitValue64")


def raise_flag(
    layer_flags: torch.Tensor, layer: int, epoch: int, stream: torch.cuda.Stream | None = None
) -> None:
    """Behind all work of ``stream`` (by default the current one) load ``epoch`` of a layer is done.

    The stream writes ``layer_flags[layer]`` itself; no kernel runs. The host does not wait.

    Raises:
        DriverError: the driver refused the write.
    """
    stream = stream or torch.cuda.current_stream(layer_flags.device)
    flag = layer_flags.data_ptr() + 8 * layer
    code = _driver().cuStreamWriteValue64_v2(
        ctypes.c_void_p(stream.cuda_stream),
        ctypes.c_uint64(flag),
        ctypes.c_uint64(epoch * FLAG_EPOCH),
        ctypes.c_uint(0),
    )
    _check(code, "cuStreamWriteValue64")


def enter_context(device: Any = None) -> Callable[[], None]:
    """A function that lets another host thread call the driver for a device (by default this one).

    PyTorch's calls find their device by themselves; the driver's want its context to be current.

    Raises:
        DriverError: the driver refused; on the thread, too.
    """
    context = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the context, where there is none yet
        _check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")

    def enter() -> None:
        _check(_driver().cuCtxSetCurrent(context), "cuCtxSetCurrent")

    return enter


class _Attributes(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_int),
        ("source", ctypes.c_int * 2),
        ("target", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


@cache
def one_address(device: int) -> bool:
    """Whether registered host memory has one address, for the host and for the device."""
    if torch.version.hip:
        return False
    value = ctypes.c_int(0)
    code = _driver().cuDeviceGetAttribute(
        ctypes.byref(value), ctypes.c_int(_HOST_POINTER_IS_DEVICE_POINTER), ctypes.c_int(device)
    )
    return code == 0 and value.value == 1


@cache
def _batched(device: int) -> bool:
    """Whether the driver has batched copies that take registered host addresses."""
    return one_address(device) and hasattr(_driver(), "cuMemcpyBatchAsync")


def copy_many(
    targets: torch.Tensor, sources: torch.Tensor, sizes: torch.Tensor, device: torch.device
) -> None:
    """Copy ``sizes[i]`` bytes from address ``sources[i]`` to ``targets[i]``, in stream order.

    All three are int64 ``[n]`` on the CPU, contiguous. One side is pinned host memory, the other
    memory of ``device``. Runs on its current stream; one driver call where the driver can (not on
    the legacy default stream), else one a copy.

    Raises:
        DriverError: a copy was refused; earlier ones of the call may have been issued.
    """
    count = len(sizes)
    stream = torch.cuda.current_stream(device).cuda_stream
    driver = _driver()
    if count > 1 and stream and _batched(device.index):
        attributes = _Attributes(order=_IN_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)
        first = ctypes.c_size_t(0)
        arguments = [
            *(ctypes.c_void_p(t.data_ptr()) for t in (targets, sources, sizes)),
            ctypes.c_size_t(count),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if hasattr(driver, "cuMemcpyBatchAsync_v2"):
            code = driver.cuMemcpyBatchAsync_v2(*arguments, ctypes.c_void_p(stream))
        else:
            failed = ctypes.c_size_t(0)
            code = driver.cuMemcpyBatchAsync(
                *arguments, ctypes.byref(failed), ctypes.c_void_p(stream)
            )
        _check(code, "cuMemcpyBatchAsync")
        return
    copy, on = driver.cuMemcpyAsync, ctypes.c_void_p(stream)
    for target, source, size in zip(
        targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
    ):
        code = copy(ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), on)
        _check(code, "cuMemcpyAsync")
