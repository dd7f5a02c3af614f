"""Calls of the ops over shapes, strides, dtypes and devices, right ones and wrong ones.

A call is made twice from one seed: for the reference on the CPU and for the ops, there or on a
card. Both do the same: they refuse it by name and leave every byte as it was, or leave equal bytes.
"""

import random
from collections.abc import Callable
from typing import Any

import torch

from refcache import reference
from refcache.errors import RefcacheError
from refcache.reference import LAYOUTS, Layout
from refcache.reference.cases import OPS

ALLOC = ("alloc_extend", "alloc_decode")
INDICES = (torch.int64, torch.int64, torch.int32, torch.int32)
DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2, torch.uint8,
    torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip
VIEWS = ("dense", "of K and V", "every other slot", "slots before layers", "shifted", "wide rows")
Maker = Callable[[torch.Tensor], torch.Tensor]


class Call:
    """One drawn call; ``make`` gives its arguments anew, ``raw`` what they are views of."""

    def __init__(self, rng: random.Random) -> None:
        self.seed = rng.randrange(2**31)
        self.op = rng.choice((*OPS, *OPS, *ALLOC))
        self.wrong = rng.choice(("",) * 16 + (WRONG_ALLOC if self.op in ALLOC else WRONG))

    def __repr__(self) -> str:
        return f"{self.op} {self.seed}, wrong: {self.wrong or 'nothing'}"

    def make(self, device: str = "cpu", pin: Maker = torch.clone) -> tuple[dict[str, Any], Any]:
        """The arguments by name, and every tensor that the call could write to."""
        rng = random.Random(self.seed)
        make = _alloc if self.op in ALLOC else _transfer
        given, raw = make(self, rng, device, pin)
        return given, raw

    def outcome(self, ops: Any, device: str = "cpu", pin: Maker = torch.clone) -> tuple[Any, ...]:
        """What a call leaves behind: the error's name or the result, and all bytes."""
        given, raw = self.make(device, pin)
        before = [t.cpu().clone() for t in raw]
        refusal: RefcacheError | None = None
        if ops is reference:
            given.pop("max_programs", None)
        try:
            result = getattr(ops, self.op)(**given)
        except RefcacheError as error:
            refusal = error
        if refusal is not None:
            assert "expected" in str(refusal) or "layout" in str(refusal), refusal
            _same(before, [t.cpu() for t in raw], f"{self}: refused, but written to")
            return (type(refusal).__name__,)
        if device != "cpu":
            torch.cuda.synchronize()
        shown = result.tolist() if isinstance(result, torch.Tensor) else result
        return "done", shown, [t.cpu().clone() for t in raw]

    def check(self, ops: Any, device: str = "cpu", pin: Maker = torch.clone) -> str:
        """Raise AssertionError unless ``ops`` does as the reference; the kind of the outcome."""
        got = self.outcome(ops, device, pin)
        if self.wrong in OPS_ALONE:
            assert got[0] == "InvalidArgument", f"{self}: {got[0]}"
            return "refused"
        want = self.outcome(reference)
        assert got[:2] == want[:2], f"{self}: {got[:2]}, but should be {want[:2]}"
        if want[0] == "done":
            _same(want[2], got[2], f"{self}: other bytes than the reference")
        return "done" if want[0] == "done" else "refused"


def _same(want: list[torch.Tensor], got: list[torch.Tensor], what: str) -> None:
    for number, (a, b) in enumerate(zip(want, got, strict=True)):
        assert torch.equal(a, b), f"{what}: tensor {number} of {len(want)}"


def _laid(
    view: str, shape: tuple[int, ...], dtype: torch.dtype, noise: torch.Generator, place: Maker
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes, and a tensor of this shape that lies in them as ``view`` says."""
    *lead, slots, heads, dim = shape
    outer = {
        "of K and V": (*lead, slots, 2, heads, dim),
        "every other slot": (*lead, 2 * slots, heads, dim),
        "slots before layers": (slots, *lead, heads, dim),
        "wide rows": (*lead, slots, heads, dim + 3),
    }.get(view, shape)
    skip = 3 if view == "shifted" else 0
    count = skip + torch.Size(outer).numel()
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=noise)
    raw = place(raw)
    whole = raw.view(dtype)[skip:].view(outer)
    if view == "of K and V":
        return raw, whole.select(-3, 1)
    if view == "every other slot":
        return raw, whole[..., ::2, :, :]
    if view == "slots before layers" and lead:
        return raw, whole.transpose(0, 1)
    return raw, whole[..., :dim]


def _index(
    values: list[int], rng: random.Random, dtypes: tuple[torch.dtype, ...], device: str
) -> torch.Tensor:
    """An index tensor, sometimes a strided one, on ``device``."""
    step = rng.choice((1, 1, 2, 3))
    spread = torch.full((step * len(values) + 1,), 10**6)
    spread[: step * len(values) : step] = torch.tensor(values, dtype=torch.int64)
    return spread.to(rng.choice(dtypes)).to(device)[: step * len(values) : step]


def _transfer(call: Call, rng: random.Random, device: str, pin: Maker) -> tuple[Any, Any]:
    noise = torch.Generator().manual_seed(call.seed)
    page, layers = rng.choice((1, 2, 3, 4, 16)), rng.randint(1, 4)
    planes = [(rng.choice((1, 2, 5)), rng.choice((1, 3, 8, 24))) for _ in range(rng.randint(1, 3))]
    layout, dtype = rng.choice(tuple(LAYOUTS)), rng.choice(DTYPES)
    form = rng.choice(("stacked", "list", "one layer")[: 2 + (call.op == "load_per_layer")])
    host_slots, device_slots = page * rng.randint(1, 5), rng.randint(1, 40)
    host, tensors, raw = [], [], []
    for heads, dim in planes:
        where = Layout.of(layout, host_slots, page, layers, heads, dim)
        content, tensor = _laid("dense", (1, *where.shape), dtype, noise, pin)
        host.append(tensor[0])
        raw.append(content)
        lead = (layers,) if form == "stacked" else ()
        view = rng.choice(VIEWS)
        for _ in range(layers if form == "list" else 1):
            content, tensor = _laid(
                view, (*lead, device_slots, heads, dim), dtype, noise, lambda t: t.to(device)
            )
            tensors.append(tensor)
            raw.append(content)
    count = rng.randint(0, min(host_slots, device_slots))
    pairs = [rng.sample(range(n), count) for n in (host_slots, device_slots)]
    if rng.random() < 0.3:
        pairs = [[s if rng.random() < 0.8 else -1 for s in side] for side in pairs]
    given: dict[str, Any] = {"host": host, "device": tensors}
    given["host_indices"] = _index(pairs[0], rng, INDICES, device)
    given["device_indices"] = _index(pairs[1], rng, INDICES, device)
    first = rng.randrange(layers)
    if call.op == "load_per_layer":
        given["layer_id"] = first
    if call.op == "load_layers":
        given["layer_flags"] = torch.arange(layers).to(device)
        given |= {"first_layer": first, "layer_num": rng.randint(0, layers - first)}
        raw.append(given["layer_flags"])
    given |= {"page_size": page, "layout": layout}
    given["max_programs"] = rng.choice((0, 0, 1, 2, 9, 1000))
    if call.wrong:
        _spoil(call.wrong, given, rng, layers)
    raw += [given[side] for side in ("host_indices", "device_indices")]
    return given, [t for t in raw if not t.is_meta]


WRONG = (
    "cap", "page", "pairs", "index dtype", "index shape", "index device", "layout", "no buffers",
    "a buffer more", "mixed forms", "other dtype", "grad", "host strides", "layer", "flags",
    "layers differ",
)  # fmt: skip
OPS_ALONE = ("cap", "layers differ", "index device")
"""What the reference takes, or cannot be asked."""


def _spoil(wrong: str, given: dict[str, Any], rng: random.Random, layers: int) -> None:
    side = rng.choice(("host_indices", "device_indices"))
    tier = rng.choice(("host", "device"))
    host, device = given["host"], given["device"]
    if wrong == "page":
        given["page_size"] = rng.choice((0, -1, -given["page_size"]))
    elif wrong == "pairs":
        given[side] = torch.cat([given[side], given[side].new_zeros(1)])
    elif wrong == "index dtype":
        dtypes = (torch.float32, torch.int16, torch.uint8, torch.bool, torch.complex64)
        given[side] = given[side].to(rng.choice(dtypes))
    elif wrong == "index shape":
        given[side] = given[side][None]
    elif wrong == "index device":
        elsewhere = "cpu" if given[side].is_cuda else "meta"
        given[side] = torch.zeros(given[side].shape, dtype=torch.int64, device=elsewhere)
    elif wrong == "no buffers":
        given[tier] = []
    elif wrong == "a buffer more":
        given["device"] = [*device, device[0]]
        if len(host) == 1 and device[0].dim() == 3:
            given["host"] = [*host, host[0]]
            given["device"] = [*device, device[0]] if len(device) % 2 == 0 else device
    elif wrong == "mixed forms":
        other = device[0][0] if device[0].dim() == 4 else torch.stack([device[0]] * layers)
        given["host"], given["device"] = [*host, host[0]], [*device, other]
    elif wrong == "other dtype":
        each = len(device) // len(host)
        device[-each:] = [torch.zeros_like(t, dtype=torch.int8) for t in device[-each:]]
    elif wrong == "grad":
        each = len(device) // len(host)
        device[:each] = [
            torch.zeros(t.shape, device=t.device).requires_grad_() for t in device[:each]
        ]
    elif wrong == "host strides":
        host[0] = torch.stack([host[0]] * 2, dim=-1)[..., 0]
        if host[0].is_contiguous():  # a single element
            given["host"] = []
    elif wrong == "layer" and ("layer_id" in given or "first_layer" in given):
        given["layer_id" if "layer_id" in given else "first_layer"] = rng.choice((-1, layers + 1))
    elif wrong == "flags" and "layer_flags" in given:
        given["layer_flags"] = rng.choice((given["layer_flags"].int(), given["layer_flags"][1:]))
    elif wrong == "layers differ" and len(device) > len(host) and "layer_id" not in given:
        device[0] = torch.stack([device[0]] * 5, dim=1).select(1, 0)
    elif wrong in OPS_ALONE:
        given["max_programs"] = rng.choice((-1, -7))
    else:
        given["layout"] = "diagonal"


WRONG_ALLOC = (
    "page", "lengths", "dtype", "shape", "cursor", "cursor dtype", "tokens", "device",
)  # fmt: skip


def _alloc(call: Call, rng: random.Random, device: str, pin: Maker) -> tuple[Any, Any]:
    page, batch = rng.choice((1, 2, 3, 16, 64)), rng.choice((0, 1, 5, 40))
    extend = call.op == "alloc_extend"
    prefix = [rng.randint(0, 3 * page) for _ in range(batch)]
    seq = [p + (rng.randint(0, 2 * page + 3) if extend else 1) for p in prefix]
    last = [rng.randint(1, 99) * page + (p - 1) % page if p else -1 for p in prefix]
    last = [s if rng.random() < 0.9 else -1 for s in last]
    given = {"prefix_lens": _index(prefix, rng, INDICES, device)} if extend else {}
    given["seq_lens"] = _index(seq, rng, INDICES, device)
    given["last_loc"] = _index(last, rng, INDICES, device)
    free = rng.sample(range(1, 5000), rng.randint(0, 4 * batch + 2))
    given["free_pages"] = _index(free, rng, INDICES, device)
    args: dict[str, Any] = {**given, "page_size": page}
    if extend:
        args["extend_num_tokens"] = sum(seq) - sum(prefix)
    if rng.random() < 0.5:
        args["cursor"] = torch.tensor([rng.randint(0, len(free) + 2)], device=device)
    name = rng.choice(tuple(given))
    if call.wrong == "page":
        args["page_size"] = rng.choice((0, -1, -page, 2**31))
    elif call.wrong == "lengths":
        name = name if name != "free_pages" else "seq_lens"
        args[name] = torch.cat([args[name], args[name].new_ones(1)])
    elif call.wrong == "dtype":
        args[name] = args[name].to(rng.choice((torch.float32, torch.int16, torch.complex64)))
    elif call.wrong == "shape":
        args[name] = args[name][None]
    elif call.wrong == "cursor":
        args["cursor"] = torch.zeros(rng.choice((0, 2)), dtype=torch.int64, device=device)
    elif call.wrong == "cursor dtype":
        args["cursor"] = torch.zeros(1, dtype=torch.int32, device=device)
    elif call.wrong == "tokens":
        args["extend_num_tokens" if extend else "page_size"] = -1
    elif call.wrong == "device":
        args[name] = torch.empty(args[name].shape, dtype=torch.int64, device="meta")
    return args, [t for t in args.values() if isinstance(t, torch.Tensor) and not t.is_meta]
