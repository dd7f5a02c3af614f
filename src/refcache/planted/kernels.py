"""Bugs planted in the kernels: one line of a kernel's (or its launcher's) source is another.

A kernel cannot be wrapped, so the replacement of a patched entry point is that of a changed copy of
its module's source. The suite ``ops.transfer`` must notice, on the card or through Triton's
interpreter with its check for 32-bit overflow on; a few calls on friendly sizes must not.
"""

import importlib
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from refcache.errors import InvalidArgument
from refcache.oracle.target.base import Target
from refcache.planted.bug import PlantedBug, Use

COPY, PLAN = "refcache_ops.copy.kernel:run", "refcache_ops.copy.plan:_make_plan"
EXTEND, DECODE = "refcache_ops.alloc_extend.kernel:run", "refcache_ops.alloc_decode.kernel:run"


@dataclass(frozen=True)
class KernelBug(PlantedBug):
    """A patch that is a line of source. Plans made with it do not outlive it."""

    def smoke(self, target: Target) -> None:
        """One request, whole pages, one layer, full tiles."""
        from refcache.oracle.drivers.ops import OpsDriver
        from refcache.reference import alloc_cases, cases

        d = OpsDriver(target)
        d.slots(alloc_cases.AllocCase((8,), (4,), (7,), (2, 3, 4), 4))
        d.slots(alloc_cases.AllocCase((5,), None, (7,), (2, 3, 4), 4))
        for op in cases.OPS:
            rows = 4 if op == "load_layers" else 8  # a tile of 512 units, or of 1024
            pairs = tuple((i, i) for i in range(rows))
            d.transfer(
                cases.TransferCase(op, layer_num=1, layers=(0, 1), heads=((8, 128),), pairs=pairs)
            )

    def owner(self) -> tuple[Any, str]:
        _interpret()
        return super().owner()

    @contextmanager
    def active(self) -> Iterator[Use]:
        """As :meth:`PlantedBug.active`.

        Raises:
            InvalidArgument: the line is not in the source (any more).
        """
        _interpret()
        _forget()
        try:
            with super().active() as use:
                yield use
        finally:
            _forget()


def _interpret() -> None:
    from refcache.oracle.target.ops import interpret_kernels

    interpret_kernels()


def _forget() -> None:
    """Drop the plans, which keep what the changed source made of them."""
    importlib.import_module(PLAN.partition(":")[0])._plans.clear()


def line(name: str, report: str, summary: str, where: str, old: str, new: str) -> KernelBug:
    """The bug that ``old``, which occurs once in the source of the module, is ``new``."""
    module_name, _, entry = where.partition(":")

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        source = Path(str(importlib.import_module(module_name).__file__)).read_text("utf-8")
        if source.count(old) != 1:
            raise InvalidArgument(
                f"planted bug {name}: {old!r} is {source.count(old)} times in {module_name}, "
                "expected once"
            )
        changed: Callable[..., Any] = getattr(_load(name, source.replace(old, new)), entry)
        return changed

    return KernelBug(name, report, summary, where, replacement, "ops.transfer")


def _load(name: str, source: str) -> ModuleType:
    """A module of this source; Triton asks for it, so it is kept where ``inspect`` looks."""
    file = f"<planted {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = ModuleType(f"refcache_planted_{name.replace('-', '_')}")
    module.__file__ = file
    sys.modules[module.__name__] = module
    exec(compile(source, file, "exec"), module.__dict__)
    return module


BUGS = (
    line(
        "kernel-first-layer-ignored", "slip", "a load of one layer moves layer 0", COPY,
        "layer = first_layer + work // layer_tiles", "layer = work // layer_tiles",
    ),
    line(
        "kernel-one-width-for-both-planes", "sglang#27378",
        "the narrower plane's width is used for both (the wider one's would leave its buffer)",
        PLAN, "rows.append(where.head_num * where.head_dim * item // unit)",
        "rows.append(min(w.head_num * w.head_dim for w in layouts) * item // unit)",
    ),
    line(
        "kernel-16-byte-rows-only", "LMCache#2309", "what a row has beyond 16-byte units is lost",
        PLAN, "unit = math.gcd(16, *addresses, *(item * s for s in (run, *on_host, *on_device)))",
        "unit = 16 if run * item >= 16 else math.gcd(16, *addresses, *(item * s for s in "
        "(run, *on_host, *on_device)))",
    ),
    line(
        "kernel-partial-tile-dropped", "slip", "rows behind the last whole tile stay", COPY,
        "            plane_tiles = tl.cdiv(items * ROW[plane], BLOCK)",
        "            plane_tiles = items * ROW[plane] // BLOCK",
    ),
    line(
        "kernel-slot-in-32-bits", "tokenspeed#501", "an int32 slot is multiplied as it is", COPY,
        "page = (slot.to(tl.uint64) // PAGE).to(tl.int64)\n    unit = page * STRIDES[PLANE][0]",
        "slot = slot.to(tl.int32)\n    page = slot // PAGE\n    unit = page * STRIDES[PLANE][0]",
    ),
    line(
        "kernel-page-one-too-long", "slip", "pages of page_size + 1 slots", PLAN,
        "pages.append(where.page_size if paged else 1)",
        "pages.append(where.page_size + 1 if paged else 1)",
    ),
    line(
        "kernel-mask-one-too-far", "slip", "one pair behind the last is moved too", COPY,
        "live = item < items", "live = item < items + 1",
    ),
    line(
        "kernel-no-space-is-a-slot", "slip", "-1 from an allocation op is copied as a slot", COPY,
        "live = (source >= 0) & (target >= 0)", "live = item < items",
    ),
    line(
        "kernel-cap-counts-tiles", "slip", "a cap on programs is taken as a count of tiles", COPY,
        "        work += tl.num_programs(0)", "        work += layer_tiles * layers",
    ),
    line(
        "kernel-heads-together", "slip", "heads of page_head are taken as adjacent", COPY,
        "head * STRIDES[PLANE][2] + col",
        "head + col",
    ),
    line(
        "kernel-flag-per-program", "slip", "the first program raises the flag by an epoch", COPY,
        "EPOCH - others, 1)", "EPOCH, 1)",
    ),
    line(
        "kernel-flag-of-another-layer", "slip", "flags count from the first layer moved", COPY,
        "tl.atomic_add(flags + layer,", "tl.atomic_add(flags + work // layer_tiles,",
    ),
    line(
        "kernel-empty-load-not-announced", "slip", "a load of nothing raises no flag", COPY,
        "        if flags is not None:\n            flags[first",
        "        if flags is not None and items:\n            flags[first",
    ),
    line(
        "kernel-table-of-one-layer", "slip", "every layer uses the table's first address", COPY,
        "tl.load(base + layer)", "tl.load(base)",
    ),
    line(
        "kernel-one-index-twice", "sglang#28544", "both sides use the host's slots", COPY,
        "transfer.device), device_indices.contiguous()",
        "transfer.device), host_indices.contiguous()",
    ),
    line(
        "kernel-layer-stride-of-slots", "slip", "all layers but the first are taken for the second",
        COPY,
        "+ layer * layer_stride",
        "+ (layer > 0) * layer_stride",
    ),
    line(
        "kernel-reads-past-free-list", "sglang#34399", "alloc_extend reads behind the free list",
        EXTEND,
        "there = (entry >= 0) & (entry < free_left)",
        "there = entry >= 0",
    ),
    line(
        "kernel-decode-cursor-stays", "slip", "alloc_decode does not advance its cursor", DECODE,
        "tl.store(cursor, before + opened)", "tl.store(cursor, before)",
    ),
    line(
        "kernel-extend-cursor-stays", "slip", "alloc_extend does not advance its cursor", EXTEND,
        "    if cursor is not None:\n        advance.launch",
        "    if False:\n        advance.launch",
    ),
    line(
        "kernel-exhausted-cursor-stops", "slip", "the cursor does not count pages that are missing",
        DECODE,
        "tl.store(cursor, before + opened)", "tl.store(cursor, tl.minimum(before + opened, free))",
    ),
    line(
        "kernel-decode-past-free-list", "sglang#34399", "alloc_decode reads behind the free list",
        DECODE,
        "there = entry < free",
        "there = entry < free + 8",
    ),
    line(
        "kernel-old-page-abandoned", "slip", "a partial last page is not filled up", EXTEND,
        "old_page = (offset > 0).to(tl.int32)",
        "old_page = offset * 0",
    ),
    line(
        "kernel-neighbour-not-counted", "slip", "the request just before is not counted", EXTEND,
        "earlier = i < request", "earlier = i < request - 1",
    ),
    line(
        "kernel-one-block-of-requests", "sglang#18250", "only the first 1024 requests are counted",
        EXTEND, "    while block < request:", "    if block < request:",
    ),
    line(
        "kernel-decode-block-miscounted", "slip", "requests of earlier programs count at page ends",
        DECODE,
        "tl.where(earlier, opens_page(lens, PAGE), 0)",
        "tl.where(earlier, opens_page(lens + 1, PAGE), 0)",
    ),
    line(
        "kernel-page-in-32-bits", "flashinfer#3136", "a page number is multiplied in 32 bits",
        EXTEND,
        "opened = page.to(tl.int64) * PAGE", "opened = page * PAGE",
    ),
)  # fmt: skip
