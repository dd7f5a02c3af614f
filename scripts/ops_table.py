"""Write the table of docs/ops.md: op x property, each cell the outcome of running the property.

    PYTHONPATH=src:aliases python scripts/ops_table.py

Everything here runs on the CPU, the kernels through Triton's interpreter. What needs a card is
named with its test. ``tests/property/test_ops_table.py`` fails while the page differs.
"""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

import refcache_ops
from refcache.oracle import resolve
from refcache.reference import LAYOUTS, alloc_cases, case_check, cases

PAGE = Path(__file__).parents[1] / "docs" / "ops.md"
BEGIN, END = "<!-- table: scripts/ops_table.py -->", "<!-- end of table -->"
OP = torch.ops.refcache


def equal(op: str, **fixed: Any) -> bool:
    """Whether the kernel of ``op`` gives the reference's bytes in a case with these attributes."""
    ops = resolve("refcache").ops()
    if op.startswith("alloc"):
        dtype = fixed.get("index_dtype", torch.int64)
        page = 2**27 + 3 if fixed.get("far") else 5
        prefix = None if op == "alloc_decode" else (2, 0, 4)
        seq = (5, 6, 9) if prefix is None else (11, 4, 6)
        last = (23, 5, 31) if prefix is None else (5, -1, 11)
        pages = (page, page + 1, page + 2, page + 3)
        size = 16 if fixed.get("far") else 4
        seq = tuple(1 + size * i for i in (1, 2, 0)) if fixed.get("far") and prefix is None else seq
        return not alloc_cases.alloc_errors(
            alloc_cases.AllocCase(seq, prefix, last, pages, size, dtype), ops
        )
    if fixed.pop("far", False):
        return not case_check.far_errors(op, ops)
    return not case_check.transfer_errors(cases.TransferCase(op, **fixed), ops)


def arguments(op: str) -> tuple[Any, ...]:
    """Arguments of a small call."""
    t = torch.tensor
    if op == "alloc_extend":
        return t([2, 0]), t([11, 4]), t([5, -1]), t([3, 4, 5, 6]), 4, 13
    if op == "alloc_decode":
        return t([2, 5]), t([5, 8]), t([3, 4]), 4
    on = case_check.build(cases.TransferCase(op))
    pairs, where = (on.host_indices, on.device_indices), (4, "layer_first", 0)
    if op == "backup_all_layer":
        return on.host, on.device, *pairs, *where
    if op == "load_per_layer":
        return on.device, on.host, *pairs, 1, *where
    return on.device, on.host, *pairs, on.flags, 0, 2, *where


def opcheck(op: str) -> bool:
    """Whether every utility of ``opcheck`` passes."""
    found = torch.library.opcheck(getattr(OP, op).default, arguments(op))
    return len(found) == 4 and set(found.values()) == {"SUCCESS"}


def graphs(op: str) -> int:
    """Graphs that ``torch.compile(fullgraph=True, dynamic=True)`` makes over four sizes."""
    count = 0

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return graph.forward

    torch.compiler.reset()
    run = torch.compile(getattr(OP, op), fullgraph=True, dynamic=True, backend=backend)
    for size in (5, 3, 8, 11):
        zero, index = torch.zeros(size, dtype=torch.int64), torch.arange(size)
        free = torch.arange(1, 40 + size)
        if op == "alloc_extend":
            run(zero, zero + 7, zero - 1, free, 4, 7 * size)
        elif op == "alloc_decode":
            run(zero + 5, zero + 3, free, 4)
        else:
            args = list(arguments(op))
            args[2], args[3] = index, index.flip(0)
            run(*args)
    torch.compiler.reset()
    return count


def name(dtype: torch.dtype) -> str:
    """A dtype as the table calls it."""
    return str(dtype).removeprefix("torch.")


def properties() -> dict[str, Callable[[str], bool]]:
    """Column -> whether an op has the property."""
    columns: dict[str, Callable[[str], bool]] = {
        "byte-equal": equal,
        "opcheck": opcheck,
        "fullgraph": lambda op: graphs(op) > 0,
        "one graph": lambda op: graphs(op) == 1,
    }
    for index in (torch.int32, torch.int64):
        columns[name(index)] = lambda op, index=index: equal(op, index_dtype=index)  # type: ignore[misc]
    columns[">2^31"] = lambda op: equal(op, far=True, index_dtype=torch.int32)
    for dtype in cases.DTYPES:
        columns[name(dtype)] = lambda op, dtype=dtype: equal(op, dtype=dtype)  # type: ignore[misc]
    for layout in LAYOUTS:
        columns[layout] = lambda op, layout=layout: equal(op, layout=layout)  # type: ignore[misc]
    return columns


def table() -> str:
    """The table, in Markdown: one row a property, one column an op."""
    interpreter = import_module("triton.runtime.interpreter")
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)
    ops = refcache_ops.OPS
    lines = ["| property | " + " | ".join(f"`{op}`" for op in ops) + " |"]
    lines.append("| --- " * (len(ops) + 1) + "|")
    of_rows = {name(d) for d in cases.DTYPES} | set(LAYOUTS)
    for column, holds in properties().items():
        cells = [
            "-" if column in of_rows and op.startswith("alloc") else "yes" if holds(op) else "NO"
            for op in ops
        ]
        lines.append(f"| {column} | " + " | ".join(cells) + " |")
    card = "`tests/gpu/test_compilers.py::test_graph_capture_and_replay`"
    lines.append("| CUDA graph | " + " | ".join("on a card" for _ in ops) + " |")
    return "\n".join([*lines, "", f"CUDA graphs need a card: {card}."])


def page(old: str, new_table: str) -> str:
    """The page with another table."""
    before, _, rest = old.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{new_table}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), table()))
