"""Launching Triton kernels with less Python: look a compiled kernel up once, then call it.

``kernel[grid](...)`` inspects every argument at every call (about 15 us of Python). The kernels
here are written so that the compiled code depends on a few values that the caller can name (a
*key*); :func:`launch` compiles through Triton at the first call of a key and afterwards hands the
arguments straight to the compiled kernel.
"""

from collections.abc import Hashable
from typing import Any

import torch
from triton import knobs

_compiled: dict[tuple[Any, ...], Any] = {}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), on CPU tensors."""
    return bool(knobs.runtime.interpret)


def launch(
    kernel: Any,
    grid: tuple[int, int],
    key: Hashable,
    on: torch.Tensor,
    args: tuple[Any, ...],
    warps: int,
) -> None:
    """Run ``kernel`` on ``grid``, on the current stream of the device of ``on``.

    Args:
        key: everything the compiled code depends on beside the kernel and ``warps``: constexpr
            values, dtypes, alignment of pointers. Two calls with one key must compile alike.
        args: every argument of the kernel in order, constexprs included.
    """
    device = on.get_device()
    if device < 0:
        kernel[grid](*args, num_warps=warps)
        return
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            launch(kernel, grid, key, on, args, warps)
        return
    full_key = (id(kernel), device, warps, key)
    compiled = _compiled.get(full_key)
    if compiled is None:
        _compiled[full_key] = kernel[grid](*args, num_warps=warps)
        return
    # An address saves the launcher a call and a question to the driver for each tensor.
    passed = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
    compiled.run(
        grid[0], grid[1], 1, torch._C._cuda_getCurrentRawStream(device), compiled.function,
        compiled.packed_metadata, None, None, None, *passed,
    )  # fmt: skip
