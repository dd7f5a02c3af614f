"""The check that a transfer op gives the reference's bytes on a case.

:func:`transfer_errors` builds the buffers of a case (:mod:`refcache.reference.cases`) inside larger
guarded ones, runs an implementation and the reference on equal copies, and compares *every* byte:
the rows that move, the source, the bystanders, the guards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from refcache.reference import transfer
from refcache.reference.cases import TransferCase, far_case

GUARD = 64  # bytes before and after each buffer
INDEX_GUARD = 16  # slots before the indices


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


def arguments(case: TransferCase, on: Buffers) -> tuple[Any, ...]:
    """The positional arguments of the case's op, as the reference takes them."""
    pairs, where = (on.host_indices, on.device_indices), (case.page_size, case.layout)
    if case.op == "backup_all_layer":
        return on.host, on.device, *pairs, *where
    if case.op == "load_per_layer":
        return on.device, on.host, *pairs, case.layers[0], *where
    return on.device, on.host, *pairs, on.flags, *case.layers, *where


def call(case: TransferCase, on: Buffers, ops: Any) -> None:
    """Call the case's op, an attribute of ``ops`` with the reference's signature."""
    options = {} if ops is transfer else {"max_programs": case.max_programs}
    getattr(ops, case.op)(*arguments(case, on), **options)


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


def far_errors(
    op: str, ops: Any, device: str = "cpu", settle: Callable[[], Any] = int
) -> list[str]:
    """What is wrong with ``cases.far_case``; only the pages of its rows are ever touched."""
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
