"""The kernels compiled for cards that are not here: 16-byte accesses and no spills.

Interpreted and compiled Triton do not mix in a process, so this file runs itself as a script.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}

# (units a row of each plane, host pages, device table, units a tile, flags)
COPIES = {
    "mha": ((128, 128), 1, False, 1024, False),
    "mha, large tiles": ((128, 128), 64, False, 4096, False),
    "mla": ((72,), 1, False, 1024, False),
    "mla, table and flags": ((72,), 64, True, 1024, True),
}


def compile_all(target: tuple[Any, ...]) -> dict[str, dict[str, int]]:
    """Name of a kernel -> what was found in its code."""
    import torch
    from triton.backends.compiler import GPUTarget

    from refcache_ops.alloc_decode import kernel as decode
    from refcache_ops.alloc_extend import kernel as extend
    from refcache_ops.copy import kernel as copy
    from refcache_ops.copy.plan import Plan

    placed, advanced = extend._variants(16, True, *[torch.int64] * 4)
    made = {
        "alloc_extend": extend._variants(16, False, *[torch.int64] * 4)[0],
        "alloc_extend, cursor": placed,
        "alloc_extend, advance": advanced,
        "alloc_decode": decode._variant(16, False, *[torch.int64] * 3),
        "alloc_decode, cursor": decode._variant(16, True, *[torch.int32] * 3),
    }
    for name, (rows, page, table, block, flags) in COPIES.items():
        planes = len(rows)
        plan = Plan(
            (16,) * planes, rows, rows,
            ((rows[0] * page * 64, rows[0], 0),) * planes, ((rows[0], 0, 0),) * planes,
            (0,) * planes, (0,) * planes, (page,) * planes, 64, table, not table,
        )  # fmt: skip
        made[name] = copy._variant(plan, block, False, flags, torch.int64, torch.int64)
    return {name: inspect(v.compile(GPUTarget(*target))) for name, v in made.items()}


def inspect(compiled: Any) -> dict[str, int]:
    """Counts of wide and narrow data accesses, and spilled registers."""
    if "ptx" in compiled.asm:
        code = compiled.asm["ptx"]
        wide_loads = len(re.findall(r"ld\.global[.\w:]*\.v4\.b32", code))
        wide_stores = len(re.findall(r"st\.global[.\w:]*\.v4\.b32", code))
        narrow_stores = len(re.findall(r"st\.global(?!\S*\.v)\S*\.b(?:8|16|32)\s", code))
        spills = ptxas_spills(code, compiled.metadata.target.arch)
    else:
        code = compiled.asm["amdgcn"]
        wide_loads = len(re.findall(r"global_load_dwordx4|buffer_load_dwordx4", code))
        wide_stores = len(re.findall(r"global_store_dwordx4|buffer_store_dwordx4", code))
        narrow_stores = len(re.findall(r"global_store_(?:byte|short|dword) ", code))
        spills = sum(int(n) for n in re.findall(r"\.vgpr_spill_count:\s*(\d+)", code))
    return {"loads": wide_loads, "stores": wide_stores, "narrow": narrow_stores, "spills": spills}


def ptxas_spills(ptx: str, arch: int) -> int:
    """Bytes that ptxas spills."""
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
        options = ["-v", f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}", "-o", os.devnull]
        report = subprocess.run(
            [ptxas.path, *options, file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))


@pytest.mark.parametrize("target", TARGETS)
def test_wide_accesses_and_no_spills(target: str) -> None:
    pytest.importorskip("triton")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, __file__, target], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 5 + len(COPIES)
    for name, seen in found.items():
        assert seen["spills"] == 0, (name, seen)
        if name in COPIES:
            assert seen["loads"] >= 4, (name, seen)
            assert seen["stores"] >= 4, (name, seen)
            assert seen["narrow"] == 0, (name, seen)


if __name__ == "__main__":
    print(json.dumps(compile_all(TARGETS[sys.argv[1]])))
