"""Bugs planted in the kernels: one line of a kernel's (or its launcher's) source is another.

A kernel cannot be wrapped, so a bug is a text replacement: the changed source becomes a module of
its own, whose entry point replaces the original's. The cases of :mod:`refcache.reference.cases`
must notice, run through Triton's interpreter with its check for 32-bit overflow on; and a smoke
test, a few calls on friendly sizes, must not.
"""

import importlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.reference import cases

COPY, PLAN = "refcache_ops.copy.kernel", "refcache_ops.copy.plan"
EXTEND, DECODE = "refcache_ops.alloc_extend.kernel", "refcache_ops.alloc_decode.kernel"
OPS = ("alloc_extend", "alloc_decode", "backup_all_layer", "load_per_layer", "load_layers")


@dataclass(frozen=True)
class KernelBug:
    """``old``, which occurs once in the source of ``module``, becomes ``new``.

    ``ops``: those that have to notice; by default all that the module serves.
    """

    name: str
    report: str
    summary: str
    module: str
    old: str
    new: str
    ops: tuple[str, ...] = ()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the module's entry point for the time of a ``with`` block.

        Raises:
            InvalidArgument: the line is not in the source (any more).
        """
        original = importlib.import_module(self.module)
        source = Path(str(original.__file__)).read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise InvalidArgument(
                f"planted bug {self.name}: {self.old!r} is {source.count(self.old)} times in "
                f"{self.module}, expected once"
            )
        entries = ("run",) if hasattr(original, "run") else ("_make_plan", "plan_transfer")
        with tempfile.TemporaryDirectory() as folder:
            changed = _load(Path(folder), source.replace(self.old, self.new))
            kept = [(owner, e, getattr(owner, e)) for owner, e in _owners(self.module, entries)]
            plans = importlib.import_module(PLAN)._plans
            plans.clear()
            try:
                for owner, entry, _ in kept:
                    setattr(owner, entry, getattr(changed, entry))
                yield
            finally:
                for owner, entry, function in kept:
                    setattr(owner, entry, function)
                plans.clear()


def _owners(module: str, entries: tuple[str, ...]) -> list[tuple[Any, str]]:
    """Every module that has bound one of the entry points."""
    names = [module, *(f"refcache_ops.{op}.op" for op in cases.OPS)]
    modules = [importlib.import_module(name) for name in names]
    return [(m, e) for m in modules for e in entries if hasattr(m, e)]


def _load(folder: Path, source: str) -> ModuleType:
    path = folder / "changed.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("refcache_planted_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def kernel_ops(*names: str) -> SimpleNamespace:
    """The kernels (all, or those named) as functions on CPU tensors; TRITON_INTERPRET=1 is set."""
    return SimpleNamespace(
        **{op: importlib.import_module(f"refcache_ops.{op}.op").run_kernel for op in names or OPS}
    )


def smoke(ops: Any) -> None:
    """A few calls on friendly sizes: one request, whole pages, one layer, full tiles.

    Raises:
        AssertionError: an answer is not the reference's.
    """
    pairs = tuple((i, i) for i in range(8))
    friendly = {"layer_num": 1, "layers": (0, 1), "heads": ((8, 128),), "pairs": pairs}
    errors = cases.alloc_errors(cases.AllocCase((8,), (4,), (7,), (2, 3, 4), 4), ops)
    errors += cases.alloc_errors(cases.AllocCase((5,), None, (7,), (2, 3, 4), 4), ops)
    for op in cases.OPS:
        errors += cases.transfer_errors(cases.TransferCase(op, **friendly), ops)  # type: ignore[arg-type]
    assert not errors, errors[0]


def first_error(bug: KernelBug) -> str:
    """What the suite says of the kernels with the bug; "" when it says nothing."""
    concerned = bug.ops or (OPS[:2] if bug.module in (EXTEND, DECODE) else OPS[2:])
    with bug.active():
        try:
            return next(_errors(kernel_ops(*concerned)), "")
        except Exception as error:
            if "int32 overflow" not in repr(error):
                raise
            return f"int32 overflow: {error!r}"


def _errors(ops: Any) -> Iterator[str]:
    yield from cases.errors_of(ops, examples=30)
    if hasattr(ops, "load_per_layer"):  # last: a kernel that is wrong otherwise may crash here
        yield from _far_pages()


def _far_pages() -> Iterator[str]:
    """A page whose offset passes 2^31 units, undone by a layer's negative offset."""
    kernel, plan = importlib.import_module(COPY), importlib.import_module(PLAN)
    far = 1_039_680
    strides = (far, 5, 1 - 2066 * far, 0)
    geometry = plan.Plan((1,), (1,), (1,), (strides,), ((1, 0, 0, 0),), (4,), 2, False, False)
    host, row = torch.arange(32, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    index = torch.tensor([2066 * 4 + 3, 0], dtype=torch.int32).unbind()
    pair = (index[0][None], index[1][None])
    kernel.run(plan.Transfer(-1, geometry, (host,), (row,)), *pair, 1, 1, 0, to_host=False)
    if row.tolist() != [16]:
        yield f"page 2066 of stride {far}: byte {row.tolist()}, but should be 16"


BUGS = (
    KernelBug(
        "kernel-first-layer-ignored", "slip", "a load of one layer moves layer 0", COPY,
        "layer = first_layer + work // layer_tiles", "layer = work // layer_tiles",
    ),
    KernelBug(
        "kernel-one-width-for-both-planes", "sglang#27378",
        "the narrower plane's width is used for both (the wider one's would leave its buffer)",
        PLAN, "rows.append(where.head_num * where.head_dim * item // unit)",
        "rows.append(min(w.head_num * w.head_dim for w in layouts) * item // unit)",
    ),
    KernelBug(
        "kernel-16-byte-rows-only", "LMCache#2309", "what a row has beyond 16-byte units is lost",
        PLAN, "unit = math.gcd(16, *addresses, *(item * s for s in (run, *on_host, *on_device)))",
        "unit = 16 if run * item >= 16 else math.gcd(16, *addresses, *(item * s for s in "
        "(run, *on_host, *on_device)))",
    ),
    KernelBug(
        "kernel-partial-tile-dropped", "slip", "rows behind the last whole tile stay", COPY,
        "            plane_tiles = tl.cdiv(items * ROW[plane], BLOCK)",
        "            plane_tiles = items * ROW[plane] // BLOCK",
    ),
    KernelBug(
        "kernel-slot-in-32-bits", "tokenspeed#501", "an int32 slot is multiplied as it is", COPY,
        "other=0).to(tl.int64)\n    page = (slot.to(tl.uint64) // PAGE).to(tl.int64)",
        "other=0)\n    page = slot // PAGE",
    ),
    KernelBug(
        "kernel-page-one-too-long", "slip", "pages of page_size + 1 slots", PLAN,
        "pages.append(where.page_size if paged else 1)",
        "pages.append(where.page_size + 1 if paged else 1)",
    ),
    KernelBug(
        "kernel-mask-one-too-far", "slip", "one pair behind the last is moved too", COPY,
        "live = item < items", "live = item < items + 1",
    ),
    KernelBug(
        "kernel-heads-together", "slip", "heads of page_head are taken as adjacent", COPY,
        "head * STRIDES[PLANE][3] + col",
        "head + col",
    ),
    KernelBug(
        "kernel-flag-per-tile", "slip", "the first tile raises the flag by an epoch", COPY,
        "EPOCH - layer_tiles + 1, 1)", "EPOCH, 1)",
    ),
    KernelBug(
        "kernel-flag-of-another-layer", "slip", "flags count from the first layer moved", COPY,
        "tl.atomic_add(flags + layer,", "tl.atomic_add(flags + work // layer_tiles,",
    ),
    KernelBug(
        "kernel-empty-load-not-announced", "slip", "a load of nothing raises no flag", COPY,
        "        if flags is not None:\n            flags[first",
        "        if flags is not None and items:\n            flags[first",
    ),
    KernelBug(
        "kernel-table-of-one-layer", "slip", "every layer uses the table's first address", COPY,
        "tl.load(base + layer)", "tl.load(base)",
    ),
    KernelBug(
        "kernel-one-index-twice", "sglang#28544", "both sides use the host's slots", COPY,
        "transfer.device, device_indices.contiguous()",
        "transfer.device, host_indices.contiguous()",
    ),
    KernelBug(
        "kernel-layer-stride-of-slots", "slip", "all layers but the first are taken for the second",
        COPY,
        "        unit += layer * STRIDES[PLANE][2]",
        "        unit += (layer > 0) * STRIDES[PLANE][2]",
    ),
    KernelBug(
        "kernel-reads-past-free-list", "sglang#34399", "alloc_extend reads behind the free list",
        EXTEND,
        "there = (entry >= 0) & (entry < free_left)",
        "there = entry >= 0",
    ),
    KernelBug(
        "kernel-decode-past-free-list", "sglang#34399", "alloc_decode reads behind the free list",
        DECODE,
        "there = entry < free",
        "there = entry < free + 8",
    ),
    KernelBug(
        "kernel-old-page-abandoned", "slip", "a partial last page is not filled up", EXTEND,
        "old_page = (offset > 0).to(tl.int32)",
        "old_page = offset * 0",
    ),
    KernelBug(
        "kernel-neighbour-not-counted", "slip", "the request just before is not counted", EXTEND,
        "earlier = i < request", "earlier = i < request - 1",
    ),
    KernelBug(
        "kernel-one-block-of-requests", "sglang#18250", "only the first 1024 requests are counted",
        EXTEND, "    while block < request:", "    if block < request:",
    ),
    KernelBug(
        "kernel-decode-block-miscounted", "slip", "requests of earlier programs count at page ends",
        DECODE,
        "tl.where(earlier, opens_page(lens, PAGE), 0)",
        "tl.where(earlier, opens_page(lens + 1, PAGE), 0)",
    ),
    KernelBug(
        "kernel-page-in-32-bits", "flashinfer#3136", "a page number is multiplied in 32 bits",
        EXTEND,
        "opened = page.to(tl.int64) * PAGE", "opened = page * PAGE",
    ),
)  # fmt: skip
