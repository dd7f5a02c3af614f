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
    device: torch.device,
    args: tuple[Any, ...],
    **options: int,
) -> None:
    """Run ``kernel`` on ``grid``, on the current stream of ``device``.

    Args:
        key: everything the compiled code depends on, beside the kernel and the options: constexpr
            values, dtypes, alignment of pointers. Two calls with one key must compile alike.
        args: every argument of the kernel in order, constexprs included.
        options: ``num_warps``.
    """
    if device.type != "cuda":
        kernel[grid](*args, **options)
        return
    index = device.index
    if index != torch.cuda.current_device():
        with torch.cuda.device(index):
            launch(kernel, grid, key, device, args, **options)
        return
    full_key = (kernel, index, key, *options.values())
    compiled = _compiled.get(full_key)
    if compiled is None:
        _compiled[full_key] = kernel[grid](*args, **options)
        return
    stream = torch._C._cuda_getCurrentRawStream(index)
    compiled.run(
        grid[0], grid[1], 1, stream, compiled.function, compiled.packed_metadata,
        None, None, None, *args,
    )  # fmt: skip
