"""Other people's functions on trial: by name, by parameters, over tables of addresses."""

import ctypes
import random
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import refcache_ops
from environment import environment
from refcache import reference
from refcache.errors import InvalidArgument
from refcache.oracle import resolve
from refcache.oracle.program.shrink import simpler_values
from refcache.oracle.target.base import Target
from refcache.oracle.target.ops import (
    OpsTarget,
    address_tables,
    ops_target,
    takes_cursor,
    without_cap,
)
from refcache.reference import cases
from refcache.reference.alloc_cases import AllocCase, random_alloc_case
from refcache.testing import run_suite


def verdict(target, examples=50):
    return run_suite("ops.transfer", target, max_examples=examples, seed=3)


def mine(host, device, host_indices, device_indices, page_size, layout):
    """``backup_all_layer`` without a cap, under another name."""
    reference.backup_all_layer(host, device, host_indices, device_indices, page_size, layout)


def skips_last_pair(host, device, host_indices, device_indices, page_size, layout):
    mine(host, device, host_indices[:-1], device_indices[:-1], page_size, layout)


def of_one_layer(device, host, host_indices, device_indices, layer_id, page_size, layout):
    mine = (host_indices, device_indices, layer_id, page_size, layout)
    reference.load_per_layer(device, host, *mine)


def decode(seq_lens, last_loc, free_pages, page_size):
    return reference.alloc_decode(seq_lens, last_loc, free_pages, page_size) + 0


def test_a_function_is_known_by_its_parameters():
    assert verdict(resolve(f"{__name__}:mine")).verdict == "ok"
    assert verdict(ops_target(of_one_layer)).verdict == "ok"
    assert verdict(ops_target(decode)).verdict == "ok"
    assert ops_target(decode).name == "alloc_decode"


def test_a_function_by_its_name_and_a_factory_are_told_apart():
    assert ops_target(reference.load_layers).name == "load_layers"
    assert ops_target(lambda: None) is None
    assert ops_target(Target) is None


def test_a_function_that_is_no_op_is_refused():
    with pytest.raises(InvalidArgument, match="parameters a, b: expected an op's name"):
        ops_target(lambda a, b: None)


def test_a_lost_pair_is_found_and_the_case_is_small():
    result = verdict(ops_target(skips_last_pair))
    assert result.failure.rule == "OP1"
    assert "host plane 0" in result.failure.evidence
    assert result.failure.steps[-1] == "d.transfer(TransferCase())"


@pytest.mark.parametrize("op", cases.OPS)
@pytest.mark.parametrize("limit", [64, 100])
def test_what_goes_wrong_with_many_items_is_found_at_once(op, limit):
    def loses_a_pair(to, source, host_indices, device_indices, *rest):
        count = len(host_indices) - (len(host_indices) > limit)
        whole = getattr(reference, op)
        whole(to, source, host_indices[:count], device_indices[:count], *rest)

    target = OpsTarget(SimpleNamespace(**{op: without_cap(loses_a_pair)}))
    result = run_suite("ops.transfer", target, shrink=False)
    assert (result.failure.rule, result.cases) == ("OP1", 1)
    assert op in result.failure.evidence


@pytest.mark.parametrize("op", cases.OPS)
def test_one_program_has_more_units_than_a_tile(op):
    *_, case = cases.awkward_cases(op)
    row = case.heads[0][0] * case.heads[0][1] * case.dtype.itemsize
    unit = row & -row  # the largest power of two in a row
    assert case.max_programs == 1
    assert len(case.pairs) * row // unit > 8192  # the kernel's LOAD_BLOCK


def zeroes(name, position):
    """The op ``name``, which also overwrites its argument at ``position``."""

    def function(*args):
        result = getattr(reference, name)(*args)
        args[position].zero_()
        return result

    function.__name__ = name
    return without_cap(function)


@pytest.mark.parametrize(
    ("name", "position", "rule"),
    [
        *(("alloc_extend", i, "OP2") for i in range(4)),
        *(("alloc_decode", i, "OP2") for i in range(3)),
        *(("backup_all_layer", i, "OP1") for i in (2, 3)),
        *(("load_per_layer", i, "OP1") for i in (2, 3)),
    ],
)
def test_inputs_stay_as_they_were(name, position, rule):
    result = verdict(OpsTarget(SimpleNamespace(**{name: zeroes(name, position)})))
    assert (result.failure.rule, "written to" in result.failure.evidence) == (rule, True)


def test_lists_and_what_lies_around_indices_stay_too():
    def cleared(host, *rest):
        reference.backup_all_layer(host, *rest)
        host.clear()

    def beyond(host, device, host_indices, *rest):
        reference.backup_all_layer(host, device, host_indices, *rest)
        longer = (len(host_indices) + 8,)
        host_indices.as_strided(longer, (1,)).zero_()

    for function, evidence in ((cleared, "list of buffers"), (beyond, "host_indices, or what")):
        result = verdict(OpsTarget(SimpleNamespace(backup_all_layer=without_cap(function))))
        assert (result.failure.rule, evidence in result.failure.evidence) == ("OP1", True)


def test_what_is_no_tensor_and_an_exit():
    result = verdict(OpsTarget(SimpleNamespace(alloc_decode=lambda *args: None)))
    assert (result.failure.rule, "NoneType" in result.failure.evidence) == ("OP2", True)
    result = verdict(OpsTarget(SimpleNamespace(alloc_decode=lambda *args: sys.exit(3))))
    assert (result.failure.rule, "SystemExit" in result.failure.evidence) == ("crash", True)


@pytest.mark.parametrize("op", ["alloc_extend", "alloc_decode"])
def test_slots_of_32_bits_are_found_and_the_case_is_small(op):
    narrow = SimpleNamespace(**{op: lambda *args: getattr(reference, op)(*args).int()})
    result = verdict(OpsTarget(narrow))
    assert result.failure.rule == "OP2"
    assert "slots torch.int32 [" in result.failure.evidence
    assert "should be int64 [" in result.failure.evidence
    assert re.search(r"seq=\(\d+,\)", result.failure.steps[-1])  # one request is enough


def fails_for_narrow_lengths(seq_lens, *rest):
    return reference.alloc_decode(seq_lens, *rest) + (seq_lens.dtype == torch.int32)


def test_what_needs_its_dtype_keeps_it_while_the_case_shrinks():
    result = verdict(OpsTarget(SimpleNamespace(alloc_decode=fails_for_narrow_lengths)))
    assert result.failure.rule == "OP2"
    assert "dtype=torch.int32" in result.failure.steps[-1]
    assert re.search(r"seq=\(\d+,\)", result.failure.steps[-1])


def of_allocation(rng):
    case = random_alloc_case(rng)
    return case, lambda c: (len(c.seq), len(c.free))


def of_transfer(rng):
    case = cases.random_case(rng)
    plain = cases.TransferCase()
    given = [f.name for f in fields(case)]

    def size(c):
        changed = [getattr(c, n) for n in given if getattr(c, n) != getattr(plain, n)]
        return len(changed), sum(weight(value) for value in changed)

    return case, size


def weight(value):
    """Grows with an integer, a length and what is inside."""
    if isinstance(value, tuple):
        return 1 + sum(1 + weight(item) for item in value)
    return value if isinstance(value, int) else 0


@pytest.mark.parametrize("drawn", [of_allocation, of_transfer])
def test_every_simpler_case_is_smaller_and_valid_so_shrinking_ends(drawn):
    rng = random.Random(5)
    scope = {"AllocCase": AllocCase, "TransferCase": cases.TransferCase, "torch": torch}
    for _ in range(60):
        case, size = drawn(rng)
        steps = 0
        while simpler := list(simpler_values(case)):
            for one in simpler:
                assert size(one) < size(case), (one, case)
                assert eval(repr(one), scope) == one  # valid, and printed as code
                if drawn is of_allocation:
                    assert (one.dtype, one.page_size) == (case.dtype, case.page_size)
                    assert (one.prefix is None, one.cursor) == (case.prefix is None, case.cursor)
            case = rng.choice(simpler)
            steps += 1
        assert steps < 400
        if drawn is of_transfer:
            assert case == cases.TransferCase()
        else:
            assert len(case.seq) <= 1
            assert len(case.free) <= 1


def test_a_custom_op_is_known_by_its_function():
    @torch.library.custom_op("refcache_test::take", mutates_args=())
    def take(
        seq_lens: torch.Tensor, last_loc: torch.Tensor, free_pages: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        return reference.alloc_decode(seq_lens, last_loc, free_pages, page_size)

    target = ops_target(take)
    assert (target.name, verdict(target).verdict) == ("alloc_decode", "ok")


def test_an_op_is_asked_with_a_cursor_where_it_takes_one():
    def never_counts(seq_lens, last_loc, free_pages, page_size, cursor=None):
        kept = None if cursor is None else cursor.clone()
        return reference.alloc_decode(seq_lens, last_loc, free_pages, page_size, kept)

    result = verdict(OpsTarget(SimpleNamespace(alloc_decode=never_counts)))
    assert result.failure.rule == "OP2"
    assert "the cursor and its neighbours are" in result.failure.evidence
    assert "cursor=" in result.failure.steps[-1]
    assert takes_cursor(refcache_ops.alloc_decode)
    assert takes_cursor(refcache_ops.alloc_extend.cursor)
    assert not takes_cursor(refcache_ops.alloc_extend.default)
    assert not takes_cursor(decode)
    assert not takes_cursor(dict)


def test_an_exception_is_a_crash():
    def backup_all_layer(host, *rest):
        raise ZeroDivisionError

    result = verdict(ops_target(backup_all_layer))
    assert (result.verdict, result.failure.rule) == ("violation", "crash")


def copy_row(source, target, source_slot, target_slot, size):
    ctypes.memmove(target + target_slot * size, source + source_slot * size, size)


def transfer_kv_all_layer(
    src_k_layers, dst_k_layers, src_v_layers, dst_v_layers, src_indices, dst_indices, item_size,
    num_layers,
):  # fmt: skip
    pairs = list(zip(src_indices.tolist(), dst_indices.tolist(), strict=True))
    for source, target in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        for a, b in zip(source.tolist()[:num_layers], target.tolist()[:num_layers], strict=True):
            for i, j in pairs:
                copy_row(a, b, i, j, item_size)


def transfer_kv_per_layer(src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size):
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        for i, j in zip(src_indices.tolist(), dst_indices.tolist(), strict=True):
            copy_row(source.data_ptr(), target.data_ptr(), i, j, item_size)


def test_tables_of_addresses():
    both = address_tables(
        transfer_kv_all_layer=transfer_kv_all_layer, transfer_kv_per_layer=transfer_kv_per_layer
    )
    assert both.name == "backup_all_layer, load_per_layer"
    assert both.adapt(cases.TransferCase(layout="page_first")) == cases.TransferCase()
    result = verdict(both)
    assert (result.verdict, result.failure) == ("ok", None)


@pytest.mark.parametrize(
    "change",
    [
        lambda k, k2, v, v2, s, d, size, n: (k, k2, k, v2, s, d, size, n),  # V is K's bytes
        lambda k, k2, v, v2, s, d, size, n: (k, k2, v, v2, s, d, size // 2 * 2, n),
        lambda k, k2, v, v2, s, d, size, n: (k, k2, v, v2, s, d, size, n - 1),
        lambda k, k2, v, v2, s, d, size, n: (k, k2, v, v2, s.flip(0), d, size, n),
    ],
)
def test_wrong_tables_are_found(change):
    def transfer_kv_all_layer_changed(*args):
        transfer_kv_all_layer(*change(*args))

    result = verdict(address_tables(transfer_kv_all_layer=transfer_kv_all_layer_changed))
    assert result.failure.rule == "OP1"


def test_adapt_limits_what_is_asked():
    asked = []

    class Ops:
        def backup_all_layer(self, *args, max_programs):
            asked.append(args[-1])
            reference.backup_all_layer(*args)

    result = verdict(OpsTarget(Ops(), lambda case: replace(case, layout="page_head")))
    assert result.verdict == "ok"
    assert set(asked) == {"page_head"}


def test_the_printed_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "turned_engine.py").write_text(
        "from refcache import reference\n"
        "def backup_all_layer(host, device, host_indices, device_indices, page_size, layout):\n"
        "    reference.backup_all_layer(host, device, host_indices.flip(0), device_indices,\n"
        "        page_size, layout)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    failure = verdict(resolve("turned_engine:backup_all_layer")).failure
    assert failure.steps[-1] == "d.transfer(TransferCase())"
    program = tmp_path / "program.py"
    program.write_text("\n".join(failure.steps))
    command = [sys.executable, str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert ran.returncode == 1
    assert f"Violation: {failure.rule}: backup_all_layer: wrong bytes" in ran.stderr
