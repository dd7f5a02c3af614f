"""The op library ``torch.ops.refcache``: one place that defines ops and finds their kernels.

An op is a schema, a CPU implementation (the reference), a CUDA implementation (the kernel) and a
fake (shapes only). CUDA implementations import their kernel at the first call, so that importing
:mod:`refcache_ops` needs no Triton and a CUDA call without it names what to install.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from refcache.errors import MissingExtra

# Ops vanish when their Library object is collected: keep it in a module global.
LIBRARY = torch.library.Library("refcache", "DEF")


def define(
    schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Define one op. With a CUDA tensor among the arguments the CUDA implementation runs."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"refcache::{name}", fake, lib=LIBRARY)


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
