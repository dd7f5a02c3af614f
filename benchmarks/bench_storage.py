"""Put and get of pages by the file backend, beside a plain copy of the same bytes.

    PYTHONPATH=src OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/bench_storage.py DIRECTORY

A plain copy has the same checksum, syncs and renames, and nothing else: files are written, synced,
renamed, the directory is synced once; a read opens a file, reads it into place and computes the
checksum. Batches of 128 pages of 256 KiB, rounds of both in turn, medians. One line of JSON.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import time
import zlib
from pathlib import Path

import torch

from refcache.storage import HiCacheFile
from refcache.storage.page_format import HEADER_BYTES, memory_of

PAGES, BYTES = 128, 256 * 1024


def plain_put(folder: str, names: list[str], pages: list[torch.Tensor]) -> None:
    handles = []
    for name, page in zip(names, pages, strict=True):
        memory = memory_of(page)
        head = zlib.crc32(memory).to_bytes(4, "little") + bytes(HEADER_BYTES - 4)
        handle = os.open(f"{folder}/{name}.tmp", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        assert os.writev(handle, [head, memory]) == HEADER_BYTES + BYTES
        handles.append(handle)
    for handle in handles:
        os.fsync(handle)
        os.close(handle)
    for name in names:
        os.rename(f"{folder}/{name}.tmp", f"{folder}/{name}")
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def plain_get(folder: str, names: list[str], targets: list[torch.Tensor]) -> None:
    for name, target in zip(names, targets, strict=True):
        memory, head = memory_of(target), bytearray(HEADER_BYTES)
        handle = os.open(f"{folder}/{name}", os.O_RDONLY)
        assert os.preadv(handle, [head, memory], 0) == HEADER_BYTES + BYTES
        os.close(handle)
        assert zlib.crc32(memory).to_bytes(4, "little") == head[:4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    pages = [
        torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=generator)
        for _ in range(PAGES)
    ]
    targets = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(PAGES)]
    seconds: dict[str, list[float]] = {}

    def timed(name: str, function, *args) -> object:  # type: ignore[no-untyped-def]
        start = time.perf_counter()
        answer = function(*args)
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return answer

    gc.disable()
    for number in range(given.rounds + 1):
        keys = [f"{number:08x}{i:056x}" for i in range(PAGES)]
        folder = given.directory / f"round{number}"
        (folder / "plain").mkdir(parents=True)
        store = HiCacheFile(None, folder / "store")
        ours = ("put", store.batch_set, keys, pages), ("get", store.batch_get, keys, targets)
        plain = (
            ("plain put", plain_put, str(folder / "plain"), keys, pages),
            ("plain get", plain_get, str(folder / "plain"), keys, targets),
        )
        for pair in zip(ours, plain, strict=True):
            for call in pair if number % 2 else pair[::-1]:
                answer = timed(*call)
                if call[0] == "get":
                    assert all(map(torch.equal, pages, answer))  # type: ignore[call-overload]
        shutil.rmtree(folder)
        if not number:
            seconds.clear()  # everything is imported and warm
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    figures = {f"{n} MiB/s": round(PAGES * BYTES / 2**20 / t) for n, t in medians.items()}
    ratios = {f"{n} to plain": round(medians[f"plain {n}"] / medians[n], 2) for n in ("put", "get")}
    print(json.dumps({"pages": PAGES, "bytes": BYTES, "rounds": given.rounds, **figures, **ratios}))


if __name__ == "__main__":
    main()
