"""Launching Triton kernels with less Python: a kernel is compiled by name, then called.

``kernel[grid](...)`` inspects every argument at every call (about 15 us of Python), and compiles
again when an integer becomes 1 or passes 2^31, or an address loses its alignment. Here the caller
says what the compiled code depends on: the types of the run-time arguments and the values of the
others, a :class:`Variant`. Nothing else can make a compilation, and two threads that meet a new
variant compile it once.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource

Type = str | tuple[str, ...]

Code = tuple[Any, Any, Any]  # what launches it, the function, its metadata

_compiled: dict[tuple[Any, ...], Code] = {}
_compiling = threading.Lock()
_interpreting = threading.Lock()  # the interpreter keeps its state in globals


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), on CPU tensors."""
    return bool(knobs.runtime.interpret)


def pointer_to(dtype: torch.dtype) -> str:
    """Triton's name of the type of a pointer to integers, ``torch.int64`` for instance."""
    return f"*i{8 * dtype.itemsize}"


def _check(kind: Type, arg: Any, what: str) -> None:
    """Raise TypeError if a compiled kernel would read other elements than ``arg`` has."""
    if isinstance(kind, tuple):
        for one, part in zip(kind, arg, strict=True):
            _check(one, part, what)
    elif isinstance(arg, torch.Tensor) and pointer_to(arg.dtype) != kind:
        raise TypeError(f"{what}: {arg.dtype}, compiled for {kind}")


def pointers(on: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Sequence[Any]:
    """The tensors as arguments of a launch on the device of ``on``.

    An address saves the launcher a call and a question to the driver for each tensor; the
    interpreter wants tensors.
    """
    return [t.data_ptr() for t in tensors] if on.is_cuda else tensors


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel and everything its compiled code depends on; keep it, to be looked up once.

    Attributes:
        kernel: a ``triton.jit`` function whose run-time arguments come first.
        types: Triton's name of the type of each run-time argument, a tuple for a tuple.
        constants: the values of the arguments that follow.
        warps: a program.
        aligned: the run-time arguments whose address is a multiple of 16.
    """

    kernel: Any
    types: tuple[Type, ...]
    constants: tuple[Any, ...]
    warps: int
    aligned: tuple[int, ...] = ()
    code: dict[int, Code] = field(default_factory=dict, init=False)  # on a device

    def compile(self, target: Any = None) -> Any:
        """The compiled kernel, for the current device or another target."""
        names = self.kernel.arg_names
        types = (*self.types, *["constexpr"] * len(self.constants))
        fixed = dict(zip(names[len(self.types) :], self.constants, strict=True))
        source = ASTSource(
            self.kernel,
            dict(zip(names, types, strict=True)),
            fixed,
            {(i,): [["tt.divisibility", 16]] for i in self.aligned},
        )
        return triton.compile(source, target=target, options={"num_warps": self.warps})

    def launch(self, grid: int | tuple[int, int], on: torch.Tensor, args: Sequence[Any]) -> None:
        """Run on ``grid``, on the current stream of the device of ``on``.

        Args:
            args: the run-time arguments: integers, and what :func:`pointers` gives; tuples where
                the type is a tuple.
        """
        columns, rows = (grid, 1) if isinstance(grid, int) else grid
        device = on.get_device()
        if device < 0:
            for number, (kind, arg) in enumerate(zip(self.types, args, strict=True)):
                _check(kind, arg, f"argument {number} of a kernel")
            with _interpreting:
                self.kernel[columns, rows](*args, *self.constants, num_warps=self.warps)
            return
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                self.launch(grid, on, args)
            return
        run, function, metadata = self.code.get(device) or self._load(device)
        run(
            columns, rows, 1, torch._C._cuda_getCurrentRawStream(device), function, metadata,
            None, None, None, *args, *self.constants,
        )  # fmt: skip

    def _load(self, device: int) -> Code:
        """Find the code that an equal variant was compiled to, or compile; once for all threads."""
        key = (self.kernel, self.types, self.constants, self.warps, self.aligned, device)
        with _compiling:
            code = _compiled.get(key)
            if code is None:
                made = self.compile()
                run = made.run  # loads the binary; before, there is no function
                code = _compiled[key] = (run, made.function, made.packed_metadata)
        self.code[device] = code
        return code
