"""The ops on a card: opcheck, torch.compile, CUDA graphs, and no hidden synchronisation."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import refcache_ops
from graph_counter import Graphs
from refcache.errors import InvalidArgument
from refcache.reference import LAYOUTS, case_check, cases

OP = torch.ops.refcache
PINNED = case_check.Placement("cuda", torch.Tensor.pin_memory)


def check_all() -> None:
    """opcheck with every utility, of every op, in both forms."""
    for op in cases.OPS:
        for form in ("stacked", "list"):
            case = cases.TransferCase(op, "page_head", form=form)
            given = case_check.arguments(case, case_check.build(case, PINNED))
            torch.library.opcheck(getattr(OP, op).default, (*given, 0))
    t = torch.tensor
    extend = [t(v).cuda() for v in ([2, 0], [11, 4], [5, -1], [3, 4, 5, 6])]
    torch.library.opcheck(OP.alloc_extend.default, (*extend, 4, 13))
    torch.library.opcheck(OP.alloc_decode.default, (*extend[1:], 4))


def test_opcheck_with_pageable_clones() -> None:
    """opcheck clones its arguments, and clones of pinned tensors are pageable: the staged path."""
    check_all()


def test_opcheck_with_pinned_clones() -> None:
    """Again with clones that stay pinned: the kernel's path, with launches that block."""
    env = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 0  # launches of the copy kernel


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch.compiler.reset()
    yield Graphs()
    torch.compiler.reset()


@pytest.mark.parametrize("inductor", [False, True])
def test_one_graph_over_sizes(graphs: Graphs, inductor: bool) -> None:
    """Allocate, write KV, back up, forget, load one layer and then all: one graph for all sizes."""
    case = cases.TransferCase(layer_num=6, host_pages=40, device_pages=40, page_size=4)
    from torch._dynamo.utils import counters

    counters.clear()
    backend = "inductor" if inductor else graphs

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def step(
        host: Any, device: Any, flags: Any, rows: Any, seq: Any, free: Any, to: Any, layer: int
    ) -> Any:
        slots = OP.alloc_extend(seq * 0, seq, seq * 0 - 1, free, 4, rows.shape[1])
        for plane in device:
            plane[:, slots] = rows
        OP.backup_all_layer(host, device, to, slots, 4, case.layout, 0)
        for plane in device:
            plane.zero_()
        OP.load_per_layer(device, host, to, slots, layer, 4, case.layout, 0)
        OP.load_layers(device, host, to, slots, flags, layer + 1, 2, 4, case.layout, 0)
        return slots

    on = case_check.build(case, PINNED)
    free = torch.arange(1, 40).cuda()
    for batch, tokens, layer in ((3, 5, 2), (4, 9, 1), (6, 4, 3), (2, 33, 2)):
        count = batch * tokens
        rows = torch.rand(6, count, 2, 8, device="cuda").to(case.dtype)
        to = torch.randperm(160, device="cuda")[:count]
        seq = torch.full((batch,), tokens, device="cuda")
        slots = step(on.host, on.device, on.flags, rows, seq, free, to, layer)
        for plane in on.device:
            assert torch.equal(plane[layer : layer + 3, slots], rows[layer : layer + 3])
            assert int(plane[:layer].count_nonzero()) == 0
    seen = counters["stats"]["unique_graphs"] if inductor else graphs.count
    assert seen == 1


def test_no_recompiled_kernel_for_other_sizes() -> None:
    """One compilation of the allocation kernels for all batch sizes, lengths and alignments."""
    from refcache_ops import _launch

    free = torch.arange(1, 5000, device="cuda")
    before = None
    for batch, tokens in ((1, 1), (1, 16), (2, 7), (17, 33), (256, 16), (700, 1)):
        seq = torch.full((batch,), tokens, device="cuda")
        zero = seq * 0
        refcache_ops.alloc_extend(zero, seq, zero - 1, free[batch:], 16, batch * tokens)
        refcache_ops.alloc_decode(seq, zero + 40, free[batch:], 16)
        before = before or len(_launch._compiled)
        assert len(_launch._compiled) == before


def test_no_compilation_for_a_new_pool_size() -> None:
    from refcache_ops import _launch

    before = None
    for pages in (3, 5, 70, 1000):
        for op, layout in itertools.product(cases.OPS, LAYOUTS):
            case = cases.TransferCase(op, layout, host_pages=pages, device_pages=pages + 2)
            case_check.call(case, case_check.build(case, PINNED), refcache_ops)
        torch.cuda.synchronize()
        before = before or len(_launch._compiled)
        assert len(_launch._compiled) == before


def test_graph_capture_and_replay() -> None:
    case = cases.TransferCase(layer_num=3)
    on = case_check.build(case, PINNED)
    pairs = (on.host_indices, on.device_indices)
    seq, last, free = (torch.tensor(v).cuda() for v in ([4, 6], [2, 9], [7, 8]))

    def work() -> torch.Tensor:
        OP.backup_all_layer(on.host, on.device, *pairs, 4, case.layout, 0)
        for plane in on.device:
            plane.zero_()
        OP.load_layers(on.device, on.host, *pairs, on.flags, 0, 3, 4, case.layout, 0)
        return OP.alloc_decode(seq, last, free, 4)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    for seed in (1, 2):
        fresh = torch.rand(on.device[0].shape, generator=torch.Generator().manual_seed(seed))
        for plane in on.device:
            plane.copy_(fresh.to(case.dtype))
        seq.fill_(4 * seed + 1)
        free.copy_(torch.tensor([20 * seed, 21 * seed]))
        moved = [plane[:, pairs[1]].clone() for plane in on.device]
        graph.replay()
        torch.cuda.synchronize()
        for plane, rows in zip(on.device, moved, strict=True):
            assert torch.equal(plane[:, pairs[1]], rows)
        assert out.tolist() == [80 * seed, 84 * seed]


def test_a_new_list_of_buffers_is_refused_inside_a_capture() -> None:
    case = cases.TransferCase(form="list")
    on = case_check.build(case, PINNED)
    args = case_check.arguments(case, on)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(InvalidArgument, match="capture"), torch.cuda.graph(graph):
        OP.backup_all_layer(*args)
    torch.cuda.synchronize()
    OP.backup_all_layer(*args)  # builds the table
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        OP.backup_all_layer(*args)


def test_no_hidden_synchronisation() -> None:
    on = {
        (op, form): (case, case_check.build(case, PINNED))
        for op in cases.OPS
        for form in ("stacked", "list")
        for case in [cases.TransferCase(op, form=form)]
    }
    seq, last, free = (torch.tensor(v).cuda() for v in ([5, 6], [2, 9], [7, 8]))
    for mode in ("default", "error"):  # the first round compiles and builds tables
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for case, buffers in on.values():
                case_check.call(case, buffers, refcache_ops)
            OP.alloc_decode(seq, last, free, 4)
            OP.alloc_extend(last * 0, seq, last, free, 4, 11)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_inference_mode() -> None:
    with torch.inference_mode():
        for op in cases.OPS:
            case = cases.TransferCase(op)
            assert (
                case_check.transfer_errors(case, refcache_ops, PINNED, torch.cuda.synchronize) == []
            )


if __name__ == "__main__":
    from torch.testing._internal.optests import generate_tests

    from refcache_ops.copy import kernel

    launches = 0
    run, clone = kernel.run, torch.clone

    def counted(*args: Any, **kwargs: Any) -> None:
        global launches
        launches += 1
        run(*args, **kwargs)

    def keep_pinned(x: torch.Tensor) -> torch.Tensor:
        out = clone(x)
        plain = type(x) is torch.Tensor and x.device.type == "cpu"
        return out.pin_memory() if plain and x.is_pinned() else out

    kernel.run = counted
    generate_tests.clone_input = keep_pinned
    torch.clone = keep_pinned
    check_all()
    print(launches)
