"""Valid inputs of the ops, and the check that an implementation gives the reference's bytes.

A case is data: shapes, dtypes, pairs of slots. :func:`transfer_errors` builds its buffers inside
larger guarded ones, runs an implementation and the reference on equal copies, and compares *every*
byte: the rows that move, the source, the bystanders, the guards.

Used by the tests of ``refcache_ops`` on the CPU and on a card, and by the transfer suite for other
people's functions. Cases are drawn from a seeded ``random.Random``.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.reference import transfer
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
GUARD = 64  # bytes before and after each buffer
INDEX_GUARD = 16  # slots before the indices


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
        pairs: (host slot, device slot), distinct on both sides.
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
        slots = [len(set(side)) for side in zip(*self.pairs, strict=True)] or [0, 0]
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
            and slots == [len(self.pairs)] * 2
            and all(0 <= s < n for pair in self.pairs for s, n in zip(pair, limits, strict=True))
        ):
            raise InvalidArgument(f"{self!r}: expected a valid call")

    def layout_of(self, plane: int) -> Layout:
        """The host layout of a plane."""
        heads, dim = self.heads[plane]
        size = self.host_pages * self.page_size
        return Layout.of(self.layout, size, self.page_size, self.layer_num, heads, dim)


@dataclass
class Buffers:
    """The tensors of a case.

    Attributes:
        raw: the guarded bytes that the buffers are views of, host planes first.
        index_raw: the longer tensors that the indices are parts of.
    """

    raw: list[torch.Tensor]
    index_raw: list[torch.Tensor]
    host: list[torch.Tensor]
    device: list[torch.Tensor]
    host_indices: torch.Tensor
    device_indices: torch.Tensor
    flags: torch.Tensor


@dataclass
class Placement:
    """Where a case's tensors live. ``host`` makes host memory out of a uint8 CPU tensor."""

    device: str = "cpu"
    host: Callable[[torch.Tensor], torch.Tensor] = field(default=torch.clone)


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


def build(case: TransferCase, place: Placement | None = None) -> Buffers:
    """The tensors of a case, with seeded random bytes in every buffer and guard."""
    place = place or Placement()
    generator = torch.Generator().manual_seed(case.seed)
    item = case.dtype.itemsize
    raw: list[torch.Tensor] = []

    def buffer(shape: Sequence[int], on_host: bool) -> torch.Tensor:
        numel = 1
        for extent in shape:
            numel *= extent
        length = 2 * GUARD + (numel + case.shift) * item
        content = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        raw.append(place.host(content) if on_host else content.to(place.device))
        start = GUARD + case.shift * item
        return raw[-1][start : start + numel * item].view(case.dtype).view(shape)

    planes = range(len(case.heads))
    slots = case.device_pages * case.page_size
    host = [buffer(case.layout_of(p).shape, True) for p in planes]
    device: list[torch.Tensor] = []
    for heads, dim in case.heads:
        if case.form == "stacked":
            device.append(buffer((case.layer_num, slots, heads, dim), False))
        else:
            count = 1 if case.form == "one_layer" else case.layer_num
            device.extend(buffer((slots, heads, dim), False) for _ in range(count))
    flags = torch.arange(case.layer_num).to(place.device) * transfer.FLAG_EPOCH
    indices, index_raw = [], []
    for side, extent in ((0, case.host_pages * case.page_size), (1, slots)):
        # More slots lie around it: whoever reads past an end moves rows that must stay.
        count = len(case.pairs)
        index = torch.randint(0, extent, (INDEX_GUARD + count + 64,), generator=generator)
        mine = slice(INDEX_GUARD, INDEX_GUARD + count)
        index[mine] = torch.tensor([p[side] for p in case.pairs], dtype=torch.int64)
        index_raw.append(index.to(case.index_dtype).to(place.device))
        indices.append(index_raw[-1][mine])
    return Buffers(raw, index_raw, host, device, indices[0], indices[1], flags)


def call(case: TransferCase, on: Buffers, ops: Any) -> None:
    """Call the case's op, an attribute of ``ops`` with the reference's signature."""
    pairs = (on.host_indices, on.device_indices)
    where = (case.page_size, case.layout)
    options = {} if ops is transfer else {"max_programs": case.max_programs}
    if case.op == "backup_all_layer":
        ops.backup_all_layer(on.host, on.device, *pairs, *where, **options)
    elif case.op == "load_per_layer":
        ops.load_per_layer(on.device, on.host, *pairs, case.layers[0], *where, **options)
    else:
        ops.load_layers(on.device, on.host, *pairs, on.flags, *case.layers, *where, **options)


def transfer_errors(
    case: TransferCase, ops: Any, place: Placement | None = None, settle: Callable[[], Any] = int
) -> list[str]:
    """What is wrong with the bytes that ``ops`` leaves behind, one line a buffer; empty when right.

    Args:
        ops: has the op as an attribute, with the reference's signature plus ``max_programs``.
        settle: called after the op; waits until its bytes have arrived.
    """
    want, got = build(case), build(case, place)
    given = [*got.host, *got.device]
    call(case, want, transfer)
    call(case, got, ops)
    settle()
    errors = []
    now = [*got.host, *got.device]
    if len(now) != len(given) or any(a is not b for a, b in zip(now, given, strict=True)):
        errors.append("a list of buffers that was passed in is another one now")
    for side, expected, seen in zip(("host", "device"), want.index_raw, got.index_raw, strict=True):
        if not torch.equal(expected, seen.cpu()):
            errors.append(f"{side}_indices, or what lies around them, were written to")
    for i, (expected, seen) in enumerate(zip(want.raw, got.raw, strict=True)):
        wrong = (expected != seen.cpu()).nonzero().flatten()
        if len(wrong):
            errors.append(f"{_place(case, i, int(wrong[0]))}, {len(wrong)} bytes in all")
    if not torch.equal(want.flags, got.flags.cpu()):
        errors.append(f"flags {got.flags.tolist()}, but should be {want.flags.tolist()}")
    return errors


def _place(case: TransferCase, buffer: int, byte: int) -> str:
    """Name the first wrong byte: which buffer, and which (layer, slot) of it."""
    at = (byte - GUARD) // case.dtype.itemsize - case.shift
    planes = len(case.heads)
    tier, plane = ("host", buffer) if buffer < planes else ("device", buffer - planes)
    if tier == "host":
        where = case.layout_of(plane)
        for slot in range(where.size):
            for layer in range(where.layer_num):
                for head in range(where.head_num):
                    if 0 <= at - where.offset(slot, layer, head) < where.head_dim:
                        return f"wrong bytes in host plane {plane}, {slot=}, {layer=}, {head=}"
        return f"wrong bytes in a guard of host plane {plane}"
    per_plane = case.layer_num if case.form == "list" else 1
    heads, dim = case.heads[plane // per_plane]
    slots = case.device_pages * case.page_size
    layers = case.layer_num if case.form == "stacked" else 1
    if not 0 <= at < layers * slots * heads * dim:
        return f"wrong bytes in a guard of device buffer {plane}"
    layer, slot = divmod(at // (heads * dim), slots)
    return f"wrong bytes in device buffer {plane}, {layer=} of it, {slot=}"


def awkward_cases(op: str) -> Iterator[TransferCase]:
    """Nothing to move; buffers of their own for each layer; several tiles, the last one partial."""
    yield TransferCase(op, pairs=())
    yield TransferCase(op, form="list", layer_num=3, layers=(1, 2))
    pairs = tuple(((7 * i) % 25, (5 * i + 1) % 24) for i in range(24))
    for layout in ("layer_first", "page_head"):
        yield TransferCase(
            op, layout, 8, heads=((8, 128), (8, 128)), pairs=pairs, device_pages=3, layers=(1, 1)
        )


def far_case(op: str) -> TransferCase:
    """A row behind 2^31 elements, on the device and on the host; 2 GiB of address space each.

    :func:`transfer_errors` would look at every byte; use :func:`far_errors`.
    """
    pages = 2**31 // 1023 + 3
    return TransferCase(
        op, page_size=1, layer_num=1, heads=((1, 1023),), dtype=torch.uint8,
        index_dtype=torch.int32, host_pages=pages, device_pages=pages,
        pairs=((pages - 1, pages - 2), (3, 5)), layers=(0, 1),
    )  # fmt: skip


def far_errors(
    op: str, ops: Any, device: str = "cpu", settle: Callable[[], Any] = int
) -> list[str]:
    """What is wrong with :func:`far_case`; only the pages of its rows are ever touched."""
    case = far_case(op)
    to_host = op == "backup_all_layer"
    far, near = case.host_pages, 8
    tiers = {"host": near, "device": far} if device != "cpu" else {"host": far, "device": far}
    pairs = torch.tensor(case.pairs) % torch.tensor([tiers["host"], tiers["device"]])
    host = torch.empty((1, tiers["host"], 1, 1023), dtype=torch.uint8)
    if device != "cpu":
        host = host.pin_memory()
    on_device = torch.empty((1, tiers["device"], 1, 1023), dtype=torch.uint8, device=device)
    rows = torch.randint(
        0, 256, (2, 1, 1023), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    source, target = (on_device[0], host[0]) if to_host else (host[0], on_device[0])
    at, to = (pairs[:, 1], pairs[:, 0]) if to_host else (pairs[:, 0], pairs[:, 1])
    source[at.to(source.device)] = rows.to(source.device)
    target[to.to(target.device)] = 0
    index = pairs.to(torch.int32).to(device).unbind(1)
    flags = torch.zeros(1, dtype=torch.int64, device=device)
    call(case, Buffers([], [], [host], [on_device], index[0], index[1], flags), ops)
    settle()
    if not torch.equal(target[to.to(target.device)].cpu(), rows):
        return [f"wrong bytes in slots {to.tolist()}, behind 2^31 elements"]
    return []
