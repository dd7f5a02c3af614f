"""Ops on trial: functions with the signatures of refcache's ops, or of SGLang's copy kernels.

:func:`ops_target` makes a target of one function. Which op it is, its name says, or else its
parameters. SGLang's kernels take tables of addresses, one a layer; :func:`address_tables` gives
them refcache's signature, for the layout and the planes that they can express.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.oracle.target.base import Target
from refcache.reference.cases import OPS as TRANSFERS
from refcache.reference.cases import TransferCase

OPS = ("alloc_extend", "alloc_decode", *TRANSFERS)
TABLES = {
    "transfer_kv_all_layer": ("backup_all_layer", 2),
    "transfer_kv_per_layer": ("load_per_layer", 2),
    "transfer_kv_all_layer_mla": ("backup_all_layer", 1),
    "transfer_kv_per_layer_mla": ("load_per_layer", 1),
}
"""SGLang's functions over addresses: the op that each one is, and its planes."""
MARKS = {
    "extend_num_tokens": "alloc_extend",
    "layer_flags": "load_layers",
    "layer_id": "load_per_layer",
    "host_indices": "backup_all_layer",
    "free_pages": "alloc_decode",
    "src_k_layers": "transfer_kv_all_layer",
    "src_k": "transfer_kv_per_layer",
    "src_layers": "transfer_kv_all_layer_mla",
    "item_size": "transfer_kv_per_layer_mla",
}
"""The first of these that a function has as a parameter says which one it is."""


def device() -> str:
    """Where ops are tried: on the card when there is one and kernels are not interpreted."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "cuda" if torch.cuda.is_available() and not interpreted else "cpu"


def interpret_kernels() -> None:
    """Without a card, choose Triton's interpreter, with its check of 32-bit overflows.

    Raises:
        InvalidArgument: Triton was imported without it, so kernels of this process cannot run.
    """
    if device() == "cuda":
        return
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidArgument(
            "Triton is imported without its interpreter, and there is no card: set "
            "TRITON_INTERPRET=1 before Python starts"
        )
    interpreter = importlib.import_module("triton.runtime.interpreter")
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)


class OpsTarget(Target):
    """Functions on trial; ``ops`` has them as attributes, ``adapt`` is :meth:`Target.adapt`.

    A subclass of :class:`~refcache.oracle.Target` with the capability ``ops`` does as well.
    """

    capabilities = frozenset({"ops"})

    def __init__(self, ops: Any, adapt: Callable[[TransferCase], TransferCase] | None = None):
        self._ops, self._adapt = ops, adapt
        self.name = ", ".join(op for op in OPS if hasattr(ops, op))

    def ops(self) -> Any:
        return self._ops

    def adapt(self, case: TransferCase) -> TransferCase:
        return case if self._adapt is None else self._adapt(case)


def ops_target(function: Callable[..., Any]) -> OpsTarget | None:
    """A target of one op; None for a callable that needs no argument (a factory).

    Raises:
        InvalidArgument: neither its name nor its parameters say which op it is.
    """
    defined = _definition(function)
    if defined is not None:
        inner = ops_target(defined)
        assert inner is not None
        return OpsTarget(SimpleNamespace(**{inner.name: without_cap(function)}))
    name = getattr(function, "__name__", "").split("::")[-1]
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters.values() if p.kind in kinds and p.default is p.empty]
    if name not in OPS and name not in TABLES:
        if not needed or inspect.isclass(function):
            return None
        name = next((op for mark, op in MARKS.items() if mark in parameters), "")
    if name in TABLES:
        return address_tables(**{name: function})
    if name not in OPS:
        raise InvalidArgument(
            f"function with the parameters {', '.join(parameters)}: expected an op's name, one of "
            f"{', '.join((*OPS, *TABLES))}, or its parameters"
        )
    capped = not parameters or "max_programs" in parameters or name.startswith("alloc")
    return OpsTarget(SimpleNamespace(**{name: function if capped else without_cap(function)}))


def _definition(function: Any) -> Callable[..., Any] | None:
    """The function that ``torch.library.custom_op`` made an op of; None for any other callable.

    PyTorch documents the class, and no way from it to the function: ``_init_fn`` is private.
    """
    kind = torch.library.CustomOpDef  # type: ignore[attr-defined]  # documented, not in __all__
    if not isinstance(function, kind):
        return None
    defined: Callable[..., Any] = function._init_fn
    return defined


def takes_cursor(function: Callable[..., Any]) -> bool:
    """Whether an allocation op has the argument ``cursor``, as far as its signature says."""
    names = function.overloads() if hasattr(function, "overloads") else ()
    schemas = [
        getattr(f, "_schema", None) for f in (function, *(getattr(function, n) for n in names))
    ]
    known = [s for s in schemas if isinstance(s, torch._C.FunctionSchema)]
    if known:
        return any(argument.name == "cursor" for s in known for argument in s.arguments)
    try:
        return "cursor" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def without_cap(function: Callable[..., Any]) -> Callable[..., Any]:
    """An op's function that has no ``max_programs``."""

    @wraps(function)
    def call(*args: Any, max_programs: int = 0) -> Any:
        return function(*args)

    return call


def address_tables(**functions: Callable[..., Any]) -> OpsTarget:
    """A target of SGLang's functions over addresses, by their names (see ``TABLES``).

    They copy rows of ``item_size`` bytes between layers of the layout ``layer_first``, each given
    by its address (a uint64 table on the device for all layers, a tensor for one); K and V have
    one width. Indices are int64, and slots: no pair is to be skipped.
    """
    ops: dict[str, Callable[..., Any]] = {}
    planes: dict[str, int] = {}
    for name, function in functions.items():
        op, count = TABLES[name]
        planes[op] = count
        ops[op] = (
            _over_tables(function, count) if op.startswith("backup") else _one(function, count)
        )

    def adapt(case: TransferCase) -> TransferCase:
        heads = case.heads[:1] * planes.get(case.op, 1)
        pairs = tuple(pair for pair in case.pairs if min(pair) >= 0)
        return replace(
            case, layout="layer_first", heads=heads, index_dtype=torch.int64, pairs=pairs
        )

    return OpsTarget(SimpleNamespace(**ops), adapt)


def _row_bytes(layer: torch.Tensor) -> int:
    return layer[0].numel() * layer.element_size()


def _over_tables(function: Callable[..., Any], planes: int) -> Callable[..., None]:
    def backup_all_layer(
        host: Any, device: Any, to: Any, source: Any, page_size: int, layout: str, max_programs: int
    ) -> None:
        layers = host[0].shape[0]
        per_plane = len(device) // planes

        def table(tensors: Any) -> torch.Tensor:
            addresses = [t.data_ptr() for t in tensors]
            return torch.tensor(addresses, dtype=torch.uint64, device=source.device)

        tables = []
        for p in range(planes):
            mine = device[p].unbind() if per_plane == 1 else device[p * layers : (p + 1) * layers]
            tables += [table(mine), table(host[p].unbind())]
        function(*tables, source, to, _row_bytes(host[0][0]), layers)

    return backup_all_layer


def _one(function: Callable[..., Any], planes: int) -> Callable[..., None]:
    def load_per_layer(
        device: Any, host: Any, source: Any, to: Any, layer: int, page_size: int, layout: str,
        max_programs: int,
    ) -> None:  # fmt: skip
        per_plane = len(device) // planes
        tensors = []
        for p in range(planes):
            mine = device[p * per_plane + (layer if per_plane > 1 else 0)]
            tensors += [host[p][layer], mine[layer] if mine.dim() == 4 else mine]
        function(*tensors, source, to, _row_bytes(host[0][0]))

    return load_per_layer
