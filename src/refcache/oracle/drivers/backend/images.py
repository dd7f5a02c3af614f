"""One directory that a crash may leave: a fresh backend starts in it and every page is read."""

import os
import tempfile
from collections.abc import Mapping, Set
from typing import Any

import torch

from refcache.oracle.drivers.backend.bench import FOREIGN, KEYS, SHM, BackendBench, Page, key_of


class Restart:
    """See the module docstring. ``when`` says which crash it was, for people."""

    def __init__(self, bench: BackendBench, image: Mapping[str, bytes], when: str) -> None:
        self.bench = bench
        self.image = image
        self.when = when
        self.require = bench.trial.require

    def judge(self, must: Set[Page], may: Set[Page]) -> None:
        """SB1 of every page, SB7 of those that ``must`` be there or may not, SB8."""
        with tempfile.TemporaryDirectory(dir=SHM if os.path.isdir(SHM) else None) as path:
            for age, (name, data) in enumerate(sorted(self.image.items())):
                with open(os.path.join(path, name), "wb") as file:
                    file.write(data)
                os.utime(os.path.join(path, name), (age, age))
            kept = dict(self.bench.pools)
            backend = self.bench.make(0, path)
            self.bench.pools = kept
            pages = [Page(0, key) for key in range(KEYS)]
            found = [page for page in pages if self._found(backend, page, must, may)]
            self._nothing_left(path, len(found))
            if hasattr(backend, "close"):
                backend.close()

    def _found(self, backend: Any, page: Page, must: Set[Page], may: Set[Page]) -> bool:
        """Whether the page is found; it is whole then."""
        target = torch.zeros(self.bench.page_bytes, dtype=torch.uint8)
        found = self.bench.trial.call(backend.get, key_of(page.key), target)
        if found is None:
            self.require(page not in must, "SB7", f"{page}, acknowledged, is lost {self.when}")
            return False
        right = bool(target.eq(self.bench.bytes_of(page)).all())
        self.require(right, "SB1", f"{page} has {self.bench.origin(target)} {self.when}")
        self.require(page in may, "SB7", f"{page}, cleared or never stored, is found {self.when}")
        return True

    def _nothing_left(self, path: str, pages: int) -> None:
        left = [entry for entry in os.scandir(path) if entry.name not in FOREIGN]
        names = sorted(entry.name for entry in left)
        self.require(
            len(left) <= pages + self.bench.traits.files,
            "SB8",
            f"restarted {self.when}: {len(left)} files for {pages} pages, {names}",
        )
        size, bound = (
            sum(entry.stat().st_size for entry in left),
            getattr(self.bench, "bound", None),
        )
        self.require(
            bound is None or size <= bound,
            "SB8",
            f"restarted {self.when}: {size} bytes, the bound is {bound}",
        )
