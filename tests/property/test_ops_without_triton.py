"""Without Triton the package imports, CPU calls work, and a kernel call names what to install."""

import os
import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None
import torch
import refcache_ops
assert refcache_ops.alloc_decode(
    torch.tensor([5]), torch.tensor([3]), torch.tensor([6]), 4
).tolist() == [24]
from refcache.errors import MissingExtra
from refcache_ops.alloc_decode.op import run_kernel
t = torch.tensor([5])
try:
    run_kernel(t, t, t, 4)
except MissingExtra as error:
    assert "refcache[triton]" in str(error), error
else:
    raise SystemExit("no error")
"""


def test_import_and_cpu_calls_need_no_triton() -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_ops_does_not_import_triton() -> None:
    script = "import sys, refcache_ops; sys.exit('triton' in sys.modules)"
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=True
    )
