"""The ops under torch's own checks, ``torch.compile`` and inference mode, on the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import refcache_ops
from graph_counter import Graphs
from refcache.reference import case_check, cases

OP = torch.ops.refcache


@pytest.mark.parametrize("layout", ["layer_first", "page_head"])
@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("op", cases.OPS)
def test_opcheck_transfers(op: str, form: str, layout: str) -> None:
    case = cases.TransferCase(op, layout, form=form)
    given = case_check.arguments(case, case_check.build(case))
    torch.library.opcheck(getattr(OP, op).default, (*given, 0))


def test_opcheck_allocs() -> None:
    t = torch.tensor
    extend = (t([2, 0]), t([11, 4]), t([5, -1]), t([3, 4, 5, 6]), 4, 13)
    torch.library.opcheck(OP.alloc_extend.default, extend)
    torch.library.opcheck(OP.alloc_decode.default, (t([2, 5]), t([5, 8]), t([3, 4]), 4))
    torch.library.opcheck(OP.alloc_extend.cursor, (*extend, t([1])))
    torch.library.opcheck(OP.alloc_decode.cursor, (t([2, 5]), t([5, 8]), t([3, 4]), 4, t([0])))


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


def test_one_graph_over_batches_and_lengths(graphs: Graphs) -> None:
    @torch.compile(fullgraph=True, dynamic=True, backend=graphs)
    def grow(prefix: Any, seq: Any, last: Any, free: Any, tokens: int) -> tuple[Any, Any]:
        slots = OP.alloc_extend(prefix, seq, last, free, 4, tokens)
        return slots + 0, OP.alloc_decode(seq + 1, seq * 0 + 3, free, 4)

    for batch, tokens, pages in ((2, 5, 9), (3, 2, 11), (7, 4, 64), (64, 3, 200), (5, 17, 40)):
        prefix, last = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), -1)
        seq, free = torch.full((batch,), tokens), torch.arange(1, pages + 1)
        slots, _ = grow(prefix, seq, last, free, batch * tokens)
        want = OP.alloc_extend(prefix, seq, last, free, 4, batch * tokens)
        assert torch.equal(slots, want)
    assert graphs.count == 1


def test_one_graph_over_transfer_sizes_and_layers(graphs: Graphs) -> None:
    case = cases.TransferCase(layer_num=6, host_pages=6, device_pages=6, form="stacked")
    on = case_check.build(case)

    @torch.compile(fullgraph=True, dynamic=True, backend=graphs)
    def round_trip(host: Any, device: Any, flags: Any, to: Any, source: Any, layer: int) -> Any:
        OP.backup_all_layer(host, device, to, source, 4, case.layout, 0)
        for plane in device:
            plane.zero_()
        OP.load_per_layer(device, host, to, source, layer, 4, case.layout, 0)
        OP.load_layers(device, host, to, source, flags, layer, 2, 4, case.layout, 0)
        return device[0][layer]

    # The first size and layer differ: torch gives equal integers of a first call one symbol.
    for size, layer in ((5, 2), (3, 3), (8, 4), (20, 2), (2, 3)):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(size))[:size]
        fresh = case_check.build(case)
        before = [plane.clone() for plane in fresh.device]
        got = round_trip(fresh.host, fresh.device, on.flags, order, order.flip(0), layer)
        assert torch.equal(got[order].view(torch.int16), before[0][layer][order].view(torch.int16))
        assert int(fresh.device[1][layer - 1].count_nonzero()) == 0  # nobody loaded that layer
    assert graphs.count == 1


def test_inductor_keeps_every_write_in_order() -> None:
    """The compiled example of the README: allocate, write KV, back it up; then read the copy."""
    torch.compiler.reset()
    kv, host = torch.zeros(2, 32, 2, 8), torch.zeros(2, 64, 2, 8)

    @torch.compile(fullgraph=True, dynamic=True)
    def step(rows: Any, seq: Any, free: Any, host_slots: Any) -> Any:
        slots = OP.alloc_extend(seq * 0, seq, seq * 0 - 1, free, 4, rows.shape[1])
        kv[:, slots] = rows
        OP.backup_all_layer([host], [kv], host_slots, slots, 4, "layer_first", 0)
        return slots

    for tokens in (5, 9):
        rows = torch.rand(2, tokens, 2, 8, generator=torch.Generator().manual_seed(tokens))
        to = torch.arange(tokens) + 7
        slots = step(rows, torch.tensor([2, tokens - 2]), torch.arange(1, 8), to)
        assert torch.equal(kv[:, slots], rows)
        assert torch.equal(host[:, to], rows)
    torch.compiler.reset()


def test_inductor_keeps_a_cursor_in_step() -> None:
    """A compiled loop body, with a cursor and without: both compile, and the cursor advances."""
    torch.compiler.reset()
    free, cursor = torch.arange(1, 40), torch.zeros(1, dtype=torch.int64)

    @torch.compile(fullgraph=True, dynamic=True)
    def step(seq: Any, last: Any) -> Any:
        other = OP.alloc_decode(seq, last, free, 4)
        slots = OP.alloc_decode(seq, last, free, 4, cursor)
        more = OP.alloc_extend(seq, seq + 5, slots, free, 4, 10, cursor=cursor)
        return slots, more, other

    taken = []
    for _ in range(3):
        slots, more, other = step(torch.tensor([1, 5]), torch.tensor([-1, 3]))
        taken += slots.tolist() + more.tolist()
        assert other.tolist() == [4, 8]
    assert int(cursor) == 3 * (2 + 2)
    assert len(set(taken)) == len(taken)
    torch.compiler.reset()


def test_inference_mode_export_and_meta() -> None:
    case = cases.TransferCase()
    with torch.inference_mode():
        assert case_check.transfer_errors(case, refcache_ops) == []
    meta = torch.empty(3, dtype=torch.int64, device="meta")
    assert OP.alloc_extend(meta, meta, meta, meta, 4, 7).shape == (7,)
    assert OP.alloc_decode(meta, meta, meta, 4).dtype == torch.int64

    class Grow(torch.nn.Module):
        def forward(self, seq: Any, last: Any, free: Any) -> Any:
            return OP.alloc_decode(seq, last, free, 4)

    arguments = (torch.tensor([5, 2]), torch.tensor([3, 8]), torch.tensor([6, 7]))
    program = torch.export.export(Grow(), arguments)
    assert program.module()(*arguments).tolist() == [24, 9]


def test_cpu_ops_are_the_reference() -> None:
    for op in cases.OPS:
        assert case_check.transfer_errors(cases.TransferCase(op), refcache_ops) == []


def test_every_op_takes_the_calls_of_0_1() -> None:
    """Schemas gain overloads and arguments with defaults, and lose nothing."""
    buffers = "Tensor host_indices, Tensor device_indices"
    where = "int page_size, str layout, int max_programs=0) -> ()"
    lengths = "Tensor seq_lens, Tensor last_loc, Tensor free_pages, int page_size"
    first = {
        "alloc_extend": f"(Tensor prefix_lens, {lengths}, SymInt extend_num_tokens) -> Tensor",
        "alloc_decode": f"({lengths}) -> Tensor",
        "backup_all_layer": f"(Tensor(a!)[] host, Tensor[] device, {buffers}, {where}",
        "load_per_layer": f"(Tensor(a!)[] device, Tensor[] host, {buffers}, "
        f"SymInt layer_id, {where}",
        "load_layers": f"(Tensor(a!)[] device, Tensor[] host, {buffers}, Tensor(b!) layer_flags, "
        f"SymInt first_layer, SymInt layer_num, {where}",
    }
    for name, want in first.items():
        now = getattr(OP, name).default._schema
        then = torch._C.parse_schema(f"refcache::{name}{want}")
        assert now.is_backward_compatible_with(then), name


def test_a_variant_that_would_read_other_elements_is_refused() -> None:
    launch = pytest.importorskip("refcache_ops._launch")
    variant = launch.Variant(lambda: None, ("*i64", ("i32", "*i8")), (), 4)
    ones = torch.ones(2, dtype=torch.int64)
    for args in ((ones.int(), (1, ones.to(torch.int8))), (ones, (1, ones))):
        with pytest.raises(TypeError, match="compiled for"):
            variant.launch(1, ones, args)
