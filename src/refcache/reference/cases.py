"""Valid inputs of the transfer ops. A case is data: shapes, dtypes, pairs of slots.

:mod:`refcache.reference.case_check` runs an implementation on one and compares every byte.

Used by the tests of ``refcache_ops`` on the CPU and on a card, and by the transfer suite for other
people's functions. Cases are drawn from a seeded ``random.Random``.
"""

import random
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.reference.layout import LAYOUTS, Layout

OPS = ("backup_all_layer", "load_per_layer", "load_layers")
FORMS = ("stacked", "list", "one_layer")
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
)


def as_code(case: Any) -> str:
    """The constructor call that gives an equal case, without what is the default."""
    given = []
    for f in fields(case):
        value = getattr(case, f.name)
        if f.default is MISSING or value != f.default:
            given.append(f"{f.name}={value!r}")
    return f"{type(case).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class TransferCase:
    """One call of a transfer op.

    Attributes:
        op: one of ``OPS``.
        form: of ``device``: one of ``FORMS`` ("one_layer" for ``load_per_layer`` only).
        heads: (head_num, head_dim) of each plane.
        pairs: (host slot, device slot), distinct on both sides; -1 for no slot, a pair that is
            skipped.
        layers: (first, count): ``load_per_layer`` moves ``first``, ``backup_all_layer`` moves all.
        shift: elements by which every buffer is displaced from a 64-byte boundary.
        max_programs: passed on; 0 is no cap.
    """

    op: str = "backup_all_layer"
    layout: str = "layer_first"
    page_size: int = 4
    layer_num: int = 2
    heads: tuple[tuple[int, int], ...] = ((2, 8), (2, 8))
    dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.int64
    form: str = "stacked"
    host_pages: int = 4
    device_pages: int = 3
    pairs: tuple[tuple[int, int], ...] = ((0, 4), (1, 5), (2, 6), (3, 7))
    layers: tuple[int, int] = (0, 2)
    shift: int = 0
    max_programs: int = 0
    seed: int = 0

    __repr__ = as_code

    def __post_init__(self) -> None:
        """Raise InvalidArgument unless this is one valid call."""
        first, count = self.layers
        moved = min(first, count) >= 0 and first + count <= self.layer_num
        if self.op == "load_per_layer":
            moved = 0 <= first < self.layer_num
        sides = [[s for s in side if s >= 0] for side in zip(*self.pairs, strict=True)]
        limits = (self.host_pages * self.page_size, self.device_pages * self.page_size)
        if not (
            moved
            and self.op in OPS
            and self.layout in LAYOUTS
            and self.form in (FORMS if self.op == "load_per_layer" else FORMS[:2])
            and self.heads
            and all(heads > 0 and dim > 0 for heads, dim in self.heads)
            and min(self.page_size, *limits, self.layer_num) > 0
            and min(self.shift, self.max_programs, self.seed) >= 0
            and all(len(set(side)) == len(side) for side in sides)
            and all(-1 <= s < n for pair in self.pairs for s, n in zip(pair, limits, strict=True))
        ):
            raise InvalidArgument(f"{self!r}: expected a valid call")

    def layout_of(self, plane: int) -> Layout:
        """The host layout of a plane."""
        heads, dim = self.heads[plane]
        size = self.host_pages * self.page_size
        return Layout.of(self.layout, size, self.page_size, self.layer_num, heads, dim)


def random_case(rng: random.Random, **fixed: Any) -> TransferCase:
    """A small valid case; ``fixed`` sets attributes."""
    op = fixed.get("op") or rng.choice(OPS)
    page = fixed.get("page_size") or rng.choice((1, 1, 2, 3, 4, 8))
    planes = rng.choice((1, 2, 2, 3))
    widths = (1, 2, 5, 8, 16, 33)
    heads = tuple((rng.choice((1, 1, 2, 3)), rng.choice(widths)) for _ in range(planes))
    host_pages, device_pages = rng.randint(2, 5), rng.randint(2, 4)
    host, device = list(range(host_pages * page)), list(range(device_pages * page))
    count = rng.choice((0, 1, page, rng.randint(0, min(len(host), len(device)))))
    if rng.random() < 0.3:  # whole pages, in any order
        order = rng.sample(range(host_pages), host_pages)
        host = [p * page + i for p in order for i in range(page)]
    else:  # fragments
        rng.shuffle(host)
        rng.shuffle(device)
    if rng.random() < 0.2:  # some of them are no slots
        host, device = ([s if rng.random() < 0.8 else -1 for s in side] for side in (host, device))
    layer_num = rng.randint(1, 3)
    first = rng.randrange(layer_num)
    case = TransferCase(
        op=op,
        layout=rng.choice(tuple(LAYOUTS)),
        page_size=page,
        layer_num=layer_num,
        heads=heads,
        dtype=rng.choice(DTYPES),
        index_dtype=rng.choice((torch.int32, torch.int64)),
        form=rng.choice(FORMS if op == "load_per_layer" else FORMS[:2]),
        host_pages=host_pages,
        device_pages=device_pages,
        pairs=tuple(zip(host[:count], device[:count], strict=False)),
        layers=(first, rng.randint(0, layer_num - first)),
        shift=rng.choice((0, 0, 1, 4)),
        max_programs=rng.choice((0, 0, 1, 2)),
        seed=rng.randrange(2**31),
    )
    return replace(case, **fixed)


def row_bytes_cases(op: str = "backup_all_layer") -> Iterator[TransferCase]:
    """Rows of 4 to 2048 bytes and odd head counts: multiples of 16 bytes and not."""
    for width in (4, 16, 132, 576, 656, 1152, 1280, 2048):
        yield TransferCase(op=op, heads=((1, width),), dtype=torch.uint8, page_size=2, pairs=PAIRS)
    for heads in (1, 3, 5, 7):
        for layout in LAYOUTS:
            yield TransferCase(
                op=op, heads=((heads, 24), (heads, 6)), layout=layout, page_size=2, pairs=PAIRS
            )


PAIRS = ((3, 1), (0, 5), (6, 2))


def awkward_cases(op: str) -> Iterator[TransferCase]:
    """Nothing to move; pairs without a slot; buffers of their own for each layer, and planes that
    differ in width; several tiles, the last one partial; more items than a warp or two has lanes;
    more units of four bytes than the largest tile has, for one program."""
    yield TransferCase(op, pairs=())
    yield TransferCase(op, pairs=((2, 1), (-1, 4), (3, -1), (-1, -1), (0, 5)))
    yield TransferCase(op, form="list", heads=((2, 8), (2, 6)), layer_num=3, layers=(1, 2))
    pairs = tuple(((7 * i) % 25, (5 * i + 1) % 24) for i in range(24))
    for layout in ("layer_first", "page_head"):
        yield TransferCase(
            op, layout, 8, heads=((8, 128), (8, 128)), pairs=pairs, device_pages=3, layers=(1, 1)
        )
    many = TransferCase(op, page_size=2, layer_num=1, layers=(0, 1), host_pages=52, device_pages=52)
    pairs = tuple(((7 * i) % 104, (5 * i + 1) % 104) for i in range(103))
    yield replace(many, heads=((1, 2), (1, 2)), pairs=pairs[:70])
    yield replace(many, heads=((1, 162), (1, 162)), pairs=pairs, max_programs=1)


def far_case(op: str) -> TransferCase:
    """A row behind 2^31 elements, on the device and on the host; 2 GiB of address space each.

    ``transfer_errors`` would look at every byte; use ``far_errors``.
    """
    pages = 2**31 // 1023 + 3
    return TransferCase(
        op, page_size=1, layer_num=1, heads=((1, 1023),), dtype=torch.uint8,
        index_dtype=torch.int32, host_pages=pages, device_pages=pages,
        pairs=((pages - 1, pages - 2), (3, 5)), layers=(0, 1),
    )  # fmt: skip
