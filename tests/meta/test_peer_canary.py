"""The canary on an unmodified SGLang release, attached by one call."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from refcache.peers import releases

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import refcache
from refcache.oracle import HiCacheDriver, Violation, resolve

d = HiCacheDriver(resolve(sys.argv[1]), size=32, host_size=64, page_size=4)
canary = refcache.canary(d.tree, "always", on_damage=print)
prompt = tuple(range(1, 14))
d.admit(prompt)
d.cache(0)
d.finish(0)
d.admit(prompt)
assert canary.looked >= 6, canary.looked
assert canary.damaged() == []
d.finish(0)
pool = d.tree.token_to_kv_pool_allocator.get_kvcache()
pool.k_buffer[0][4:8] += 1
try:
    d.admit(prompt)
except Violation:
    pass
print(canary.damaged())
"""


@pytest.mark.parametrize("version", ["0.5.10", "0.5.12"])
def test_a_page_that_somebody_overwrote_is_seen(version: str) -> None:
    if version not in releases.unpacked():
        pytest.skip(f"sglang {version} is not unpacked: make peers")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "aliases")])
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, f"sglang:{version}"],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-2:] == ["1", "[1]"]
