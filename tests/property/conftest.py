"""Hypothesis profiles, and Triton's interpreter for the kernels.

The interpreter must be chosen before Triton is first imported. ``HYPOTHESIS_PROFILE`` picks the
profile; each draws the same cases every time, whatever is loaded. Hypothesis loads a profile "ci"
of its own where ``CI`` is set, so ours is loaded by name.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace

import pytest
from hypothesis import settings

from refcache.testing.draws import without_local_constants

os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("dev", max_examples=25, deadline=None, derandomize=True, database=None)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=60)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


@pytest.fixture(scope="session", autouse=True)
def _only_the_seed_counts() -> Iterator[None]:
    with without_local_constants():
        yield


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
    for block in ("SMALL_BLOCK", "FLAG_BLOCK"):
        monkeypatch.setattr(kernel, block, request.param)
    return int(request.param)
