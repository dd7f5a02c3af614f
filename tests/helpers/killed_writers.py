"""Processes that write pages and kill themselves (-9) at a drawn point of a write.

``python killed_writers.py DIRECTORY FIRST COUNT``: for each seed a forked process that shares the
directory, one after the other, all without a second import of PyTorch. Each prints the keys that
were acknowledged before it died. How a page looks is :func:`page`.
"""

import os
import random
import signal
import sys

import torch

from refcache.storage import HiCacheFile
from refcache.storage.disk import OsDisk

BYTES = 50_000
BATCH = 3
OPERATIONS = 8 * BATCH + 2
"""File operations of a batch, its writes in parts: create, lock, four writes, sync, rename."""


def page(key: str) -> torch.Tensor:
    """The bytes that belong to ``key``."""
    generator = torch.Generator().manual_seed(int(key, 16))
    return torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=generator)


class KillingDisk(OsDisk):
    """Kills its process before one of its operations, which is counted in parts of a write."""

    def __init__(self, path: str, left: int) -> None:
        super().__init__(path)
        self.left = left
        for name in ("create", "lock", "sync", "rename", "sync_directory", "remove"):
            setattr(self, name, self._counted(getattr(self, name)))

    def _counted(self, operation):  # type: ignore[no-untyped-def]
        def counted(*args):  # type: ignore[no-untyped-def]
            self._step()
            return operation(*args)

        return counted

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, handle, parts):  # type: ignore[no-untyped-def]
        whole = b"".join(parts)
        for start in range(0, len(whole), -(-len(whole) // 4)):
            self._step()
            super().write(handle, [whole[start : start + -(-len(whole) // 4)]])


def write_until_killed(path: str, seed: int) -> None:
    draw = random.Random(seed)
    store = HiCacheFile(None, path)
    store.disk = KillingDisk(path, draw.randrange(3 * OPERATIONS))
    for batch in range(4):
        keys = [f"{seed:08x}{batch:04x}{i:04x}" for i in range(BATCH)]
        assert all(store.set_pages(keys, [page(key) for key in keys]))
        os.write(1, "".join(f"{key}\n" for key in keys).encode())


def main(path: str, first: int, count: int) -> None:
    for seed in range(first, first + count):
        child = os.fork()
        if not child:
            write_until_killed(path, seed)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, status


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
