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

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}

# (units a row of each plane, host pages, device table, units a tile, warps, flags)
COPIES = {
    "mha": ((128, 128), 1, False, 1024, 4, False),
    "mha, large tiles": ((128, 128), 64, False, 4096, 16, False),
    "mla": ((72,), 1, False, 1024, 4, False),
    "mla, table and flags": ((72,), 64, True, 1024, 4, True),
}


def compile_all(target: tuple[Any, ...]) -> dict[str, dict[str, int]]:
    """Name of a kernel -> what was found in its code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from refcache_ops.alloc_decode import kernel as decode
    from refcache_ops.alloc_extend import kernel as extend
    from refcache_ops.copy import kernel as copy

    def build(kernel: Any, types: dict[str, Any], fixed: dict[str, Any], warps: int) -> Any:
        names = kernel.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        source = ASTSource(kernel, signature, fixed)
        return triton.compile(source, target=GPUTarget(*target), options={"num_warps": warps})

    found = {}
    i64 = "*i64"
    lengths = {"prefix_lens": i64, "seq_lens": i64, "last_loc": i64, "free_pages": i64, "out": i64}
    counts = {"batch": "i32", "free": "i32", "total": "i32"}
    for module, kernel in (
        (extend, extend.alloc_extend_kernel),
        (decode, decode.alloc_decode_kernel),
    ):
        types = {k: v for k, v in (lengths | counts).items() if k in kernel.arg_names}
        fixed = {k: getattr(module, k, 16) for k in kernel.arg_names if k not in types}
        found[kernel.__name__] = inspect(build(kernel, types, fixed, 4))
    for name, (rows, page, table, block, warps, flags) in COPIES.items():
        planes = len(rows)
        device, host = (rows[0], 0, 10**7, 0), (rows[0] * page * 64, rows[0], 10**6, 0)
        types = {
            "src": ("*bf16",) * planes,
            "dst": (i64 if table else "*bf16",) * planes,
            "src_index": i64,
            "dst_index": i64,
            "items": "i64",
            "first_layer": "i64",
            "layers": "i64",
        }
        types |= {"flags": i64} if flags else {}
        fixed = {"UNIT": (16,) * planes, "ROW": rows, "RUN": rows, "BLOCK": block}
        fixed |= {"SRC_PAGE": (1,) * planes, "DST_PAGE": (page,) * planes, "SRC_TABLE": False}
        fixed |= {"DST_TABLE": table, "SIGNAL": flags, "EPOCH": 1 << 32}
        fixed |= {"SRC_STRIDES": (device,) * planes, "DST_STRIDES": (host,) * planes}
        fixed |= {"LAYERS_LAST": not table} | ({} if flags else {"flags": None})
        found[name] = inspect(build(copy.copy_kernel, types, fixed, warps))
    return found


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
        options = ["-v", f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}", "-o", os.devnull]
        report = subprocess.run(
            [knobs.nvidia.ptxas.path, *options, file.name],
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
    assert set(found) == {"alloc_extend_kernel", "alloc_decode_kernel", *COPIES}
    for name, seen in found.items():
        assert seen["spills"] == 0, (name, seen)
        if name in COPIES:
            assert seen["loads"] >= 4, (name, seen)
            assert seen["stores"] >= 4, (name, seen)
            assert seen["narrow"] == 0, (name, seen)


if __name__ == "__main__":
    print(json.dumps(compile_all(TARGETS[sys.argv[1]])))
