"""Backend name -> the functions that compute slots and copy rows.

``reference`` is :mod:`refcache.reference`; ``triton`` is the ops of :mod:`refcache_ops`, imported
at first use. Both give the same bytes.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from refcache import reference
from refcache.errors import MissingExtra, UnknownName

BACKENDS = ("reference", "triton")


class Backend(NamedTuple):
    """One function an op; signatures as in :mod:`refcache.reference`."""

    name: str
    alloc_extend: Callable[..., Any]
    alloc_decode: Callable[..., Any]
    backup_all_layer: Callable[..., Any]
    load_per_layer: Callable[..., Any]
    load_layers: Callable[..., Any]


def resolve(name: str | None = None, device: str = "cpu") -> Backend:
    """The backend ``name``; None means triton for a CUDA device, reference elsewhere.

    Raises:
        UnknownName: no such backend.
        MissingExtra: "triton" without Triton installed.
    """
    if name is None:
        name = "triton" if str(device).startswith("cuda") else "reference"
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS)
    module: Any = reference if name == "reference" else _ops("refcache_ops")
    return Backend(name, *(getattr(module, op) for op in Backend._fields[1:]))


def copy_engine() -> Any:
    """The module that copies for ``io_backend="direct"`` on a CUDA device.

    Its ``backup_all_layer`` and ``load_per_layer`` have the reference's signatures;
    ``list_copies`` lists all layers once, to be issued one by one; ``copy_bytes`` says how long
    each copy is, which the rules of :mod:`refcache.pool.transfer_rule` ask.

    Raises:
        MissingExtra: without Triton installed.
    """
    return _ops("refcache_ops.engine")


def _ops(module: str) -> Any:
    try:
        import_module("triton")
    except ImportError:
        raise MissingExtra("backend 'triton': install refcache[triton]") from None
    return import_module(module)
