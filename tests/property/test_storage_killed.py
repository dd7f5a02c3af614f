"""Kill -9 at a seeded point of a write: acknowledged pages are there, others whole or a miss."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import killed_writers
from killed_writers import BYTES, page
from refcache.storage import HiCacheFile
from refcache.storage.page_format import HEADER_BYTES


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.nightly)])
def test_killed_writers_leave_whole_pages_only(tmp_path: Path, count: int) -> None:
    command = [sys.executable, str(killed_writers.__file__), str(tmp_path), "0", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    acknowledged = set(done.stdout.split())
    left = [file.name for file in tmp_path.iterdir() if file.name.endswith(".tmp")]
    store = HiCacheFile(None, tmp_path)
    files = list(tmp_path.iterdir())
    assert len(left) > len([file for file in files if file.name.endswith(".tmp")]) == 0
    stored = {file.name.split(".")[0] for file in files}
    assert stored >= acknowledged
    assert len(acknowledged) > count
    for key in stored:
        found = store.get(key, torch.empty(BYTES, dtype=torch.uint8))
        assert found is not None, key
        assert found.equal(page(key)), key
    assert sum(file.stat().st_size for file in files) == len(stored) * (HEADER_BYTES + BYTES)
