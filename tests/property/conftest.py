"""Triton's interpreter for the kernels: it must be chosen before Triton is first imported."""

import os
from importlib import import_module
from types import SimpleNamespace

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def kernel_ops() -> SimpleNamespace:
    """The kernels as functions on CPU tensors; a 32-bit sum or product that overflows raises."""
    pytest.importorskip("triton")
    interpreter = import_module("triton.runtime.interpreter")
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)
    ops = import_module("refcache_ops")
    return SimpleNamespace(
        **{op: import_module(f"refcache_ops.{op}.op").run_kernel for op in ops.OPS}
    )


@pytest.fixture(params=[32, 1024], ids=["small tiles", "default tiles"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Units a tile of the copy: small ones cut every transfer into many, with partial ends."""
    kernel = import_module("refcache_ops.copy.kernel")
    monkeypatch.setattr(kernel, "SMALL_BLOCK", request.param)
    return int(request.param)
