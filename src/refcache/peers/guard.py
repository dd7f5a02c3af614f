"""Guards the memory that an engine's kernels read under Triton's interpreter.

A load outside the tensors that a launch was given may find anything on a GPU, and stops the process
here. Guarded, such a load reads 0 instead, and is remembered: a suite may call it a violation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_spans: list[tuple[str, int, int]] = []
_seen: list[str] = []


@contextmanager
def reads_outside() -> Iterator[list[str]]:
    """The reads outside their tensors that launches inside the block make, in words."""
    _seen.clear()
    yield _seen


def install() -> None:
    """Patch Triton's interpreter: launches say which tensors they have, loads are checked."""
    import numpy as np  # Triton's interpreter has it
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, launch = builder.create_masked_load, executor._init_args_hst

    def guarded_launch(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = launch(self, args, kwargs)
        _spans[:] = [
            (f"{self.fn.__name__}: {name}", arg.data_ptr(), arg.nbytes)
            for name, arg in zip(self.arg_names, on_host[0], strict=False)
            if isinstance(arg, torch.Tensor)
        ]
        return on_host

    def guarded_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        inside = np.zeros(ptrs.data.shape, dtype=bool)
        for _, start, size in _spans:
            inside |= (ptrs.data >= start) & (ptrs.data < start + size)
        for address in ptrs.data[mask.data & ~inside].tolist():
            _seen.append(_describe(address))
        mask.data = mask.data & inside
        return load(self, ptrs, mask, *rest)

    builder.create_masked_load, executor._init_args_hst = guarded_load, guarded_launch


def _describe(address: int) -> str:
    """The tensor that the address comes after: the nearest one below."""
    below = [span for span in _spans if span[1] <= address] or _spans
    name, start, size = max(below, key=lambda span: span[1])
    return f"{name}: a read at byte {address - start} of {size}"
