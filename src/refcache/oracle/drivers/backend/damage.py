"""Damages the files of backends between their calls: ``storage.damage``.

A file is cut, made longer, a bit of it is flipped, or it gets the bytes of another file. A backend
may then miss any page; it may not serve a wrong one, and a page that was missed can be stored
again. One more engine shares the directory here: the same model and rank, another layout.
"""

import os

import torch

from refcache.oracle.drivers.backend.bench import BackendBench, Page
from refcache.oracle.drivers.backend.driver import BackendDriver
from refcache.oracle.program.driver import step
from refcache.oracle.program.trial import Trial
from refcache.oracle.target.config import CacheConfig


class DamageBench(BackendBench):
    """A ledger of pages whose files were damaged.

    Attributes:
        damaged: pages that a store finds there, perhaps, and so does not write again.
    """

    engines = 4

    def __init__(self, trial: Trial, config: CacheConfig) -> None:
        self.damaged: set[Page] = set()
        super().__init__(trial, config)

    def damage(self) -> None:
        """Any page may be a miss from here on."""
        self.unsure |= self.stored
        self.damaged |= self.stored
        self.stored = set()

    def judge_set(self, page: Page, done: object) -> None:
        before = page in self.damaged
        super().judge_set(page, done)
        if before:
            self.stored.discard(page)
            self.unsure.add(page)

    def judge_get(self, page: Page, found: torch.Tensor | None, how: str = "get") -> None:
        super().judge_get(page, found, how)
        if found is None:
            self.damaged.discard(page)


class DamageDriver(BackendDriver):
    """The steps of its base, and four that change a file; files are numbered by name."""

    needs = frozenset({"storage", "durable"})
    bench_type = DamageBench
    bench: DamageBench

    @step
    def cut(self, file: int, at: int) -> None:
        """Keep a beginning."""
        self._change(file, lambda data: data[: at % max(1, len(data))])

    @step
    def longer(self, file: int, more: int) -> None:
        """Zeros behind the end."""
        self._change(file, lambda data: data + bytes(1 + more))

    @step
    def flip(self, file: int, bit: int) -> None:
        """One bit, counted from the beginning, or from the end where it is below 0."""
        self._change(file, lambda data: _flipped(data, bit))

    @step
    def swap(self, file: int, other: int) -> None:
        """The bytes of another file under this name."""
        names = self.bench.files()
        if names:
            with open(os.path.join(self.bench.path, names[other % len(names)]), "rb") as source:
                content = source.read()
            self._change(file, lambda data: content)

    @step
    def stored_again(self, engine: int, key: int) -> None:
        """Read a page, store it, read it: after a miss it is there again."""
        page = self._page(engine, key)
        for _ in range(2):
            self._get(page)
            value = self.bench.bytes_of(page)
            self.bench.judge_set(
                page, self.bench.call(page.engine, "set", self._names([page])[0], value)
            )
        self._get(page)

    def _change(self, file: int, changed):  # type: ignore[no-untyped-def]
        names = self.bench.files()
        if names:
            path = os.path.join(self.bench.path, names[file % len(names)])
            with open(path, "rb") as source:
                data = source.read()
            with open(path, "wb") as target:
                target.write(changed(data))
            self.bench.damage()


def _flipped(data: bytes, bit: int) -> bytes:
    if not data:
        return data
    bit %= 8 * len(data)
    return data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
