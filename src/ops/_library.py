"""The op library ``torch.ops.refcache``: one place that defines ops and finds their kernels.

An op is a schema, its definition (a function of :mod:`refcache.reference`, which runs on the CPU),
a CUDA implementation (the kernel) and a fake (shapes only). CUDA implementations import their
kernel at the first call, so that importing :mod:`refcache_ops` needs no Triton and a CUDA call
without it names what to install.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from refcache.errors import MissingExtra
from refcache.reference.transfer import check_programs

# Ops vanish when their Library object is collected: keep it in a module global.
LIBRARY = torch.library.Library("refcache", "DEF")


def define(
    schema: str,
    definition: Callable[..., Any],
    *,
    cuda: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
) -> None:
    """Define one op. With a CUDA tensor among the arguments the CUDA implementation runs.

    Args:
        definition: what the CPU runs. An op that ends in ``max_programs`` caps its kernel; the
            definition has no such argument, and the cap is only checked.
        fake: what comes out, by its shape; an op that returns nothing needs none.
    """
    name = schema.split("(", 1)[0]
    takes = len(inspect.signature(definition).parameters)

    def on_cpu(*args: Any) -> Any:
        for programs in args[takes:]:  # left out where it is the default
            check_programs(programs)
        return definition(*args[:takes])

    LIBRARY.define(schema)
    LIBRARY.impl(name, on_cpu if "max_programs" in schema else definition, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"refcache::{name}", fake or _nothing, lib=LIBRARY)


def _nothing(*args: Any) -> None:
    """The fake of an op that only writes into its arguments."""


@cache
def kernels(op: str) -> Any:
    """The module ``refcache_ops.<op>.kernel``.

    Raises:
        MissingExtra: Triton is not installed.
    """
    try:
        return importlib.import_module(f"refcache_ops.{op}.kernel")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise MissingExtra(
            f"torch.ops.refcache.{op} on CUDA needs Triton: install `refcache[triton]`"
        ) from error
