"""Backends on trial over one directory, and what each of their answers must be.

The ledger knows of each page (engine, key, pool) whether it was acknowledged, may be there (a set
that failed, a file that was damaged), or is not. A hit must have the bytes that were stored; a miss
is wrong only for an acknowledged page.
"""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from refcache.oracle.program.trial import Trial
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.storage.contract import ENGINES, TOKEN_BYTES, RowsPool, StorageTraits

SHM = "/dev/shm"
KEYS = 6
"""Programs name this many keys."""
POOLS = ("kv", "mamba")
FOREIGN = ("notes.txt", ".hidden", "0123.tmp")
"""Files of somebody else, in every directory."""


class Page(NamedTuple):
    """Which page: of which engine, under which key, in which pool."""

    engine: int
    key: int
    pool: str = "kv"


def key_of(number: int) -> str:
    """The key that programs write as a number: a page hash."""
    return hashlib.sha256(number.to_bytes(4, "little")).hexdigest()


def payload(page: Page, size: int) -> torch.Tensor:
    """The bytes of a page: a stream that no other page has."""
    seed = f"{page.engine} {page.key} {page.pool}".encode()
    return torch.frombuffer(bytearray(hashlib.shake_128(seed).digest(size)), dtype=torch.uint8)


class BackendBench:
    """See the module docstring.

    Attributes:
        path: the directory. ``backends``: by engine, made at first use.
        stored, unsure: the pages that are acknowledged, and those that may be there.
        engines: how many of ``ENGINES`` share the directory.
    """

    engines = 3

    def __init__(self, trial: Trial, config: CacheConfig) -> None:
        self.trial, self.config = trial, config
        self.traits: StorageTraits = trial.target.storage_traits
        self.page_bytes = config.page_size * TOKEN_BYTES
        self.folder = tempfile.TemporaryDirectory(dir=SHM if os.path.isdir(SHM) else None)
        self.path = self.folder.name
        for name in FOREIGN:
            with open(os.path.join(self.path, name), "wb") as file:
                file.write(name.encode())
        self.backends: dict[int, Any] = {}
        self.pools: dict[int, dict[str, RowsPool]] = {}
        self.stored: set[Page] = set()
        self.unsure: set[Page] = set()
        self.subject: Any = self.backend(0)

    def backend(self, engine: int) -> Any:
        """The backend of an engine, with its pools registered."""
        if engine not in self.backends:
            self.backends[engine] = self.make(engine, self.path)
        return self.backends[engine]

    def make(self, engine: int, path: str, max_bytes: int | None = None) -> Any:
        """A fresh backend of an engine over ``path``, with pools of its own."""
        told = ENGINES[engine]
        made = self.trial.call(self.trial.target.storage, told, path, max_bytes)
        layout = str(told.get("layout", "layer_first"))
        slots = KEYS * self.config.page_size
        self.pools[engine] = {p: RowsPool(self.config.page_size, slots, layout) for p in POOLS}
        self.trial.call(made.register_mem_pool_host, self.pools[engine]["kv"])
        if self.traits.v2:
            for name, pool in self.pools[engine].items():
                self.trial.call(made.register_mem_host_pool_v2, pool, name)
        return made

    def restart(self) -> None:
        """Every process ends, and none is told; what a backend keeps open it is asked to close."""
        for backend in self.backends.values():
            if hasattr(backend, "close"):
                self.trial.call(backend.close)
        self.backends = {}
        if "durable" not in self.trial.target.capabilities:
            self.stored, self.unsure = set(), set()

    def call(self, engine: int, name: str, *args: Any) -> Any:
        return self.trial.call(getattr(self.backend(engine % self.engines), name), *args)

    def bytes_of(self, page: Page) -> torch.Tensor:
        return payload(page, self.page_bytes)

    # ---- what answers mean -----------------------------------------------------------------------

    def judge_set(self, page: Page, done: Any) -> None:
        self.trial.require(
            isinstance(done, bool), "SB2", f"the store of {page} answered {done!r}, no bool"
        )
        self.trial.require(
            done, "SB2", f"the store of {page} answered False; nothing failed and there is room"
        )
        self.unsure.discard(page)
        self.stored.add(page)

    def judge_exists(self, page: Page, found: Any, how: str = "exists") -> None:
        if page not in self.unsure:
            self.trial.require(
                bool(found) == (page in self.stored),
                "SB2",
                f"{how} of {page} answered {found!r}; it is "
                f"{'stored' if page in self.stored else 'not stored'}",
            )

    def judge_get(self, page: Page, found: torch.Tensor | None, how: str = "get") -> None:
        """A page's bytes, or a miss."""
        if found is None:
            self.trial.require(
                page not in self.stored, "SB2", f"{how} of {page} is a miss, but it is stored"
            )
            return
        same = found.reshape(-1).equal(self.bytes_of(page))
        whose = page if same else self.owner(found)
        if whose is not None and whose.engine != page.engine:
            self.trial.require(False, "SB10", f"{how} of {page} gave {whose}")
            return
        known = page in self.stored or page in self.unsure
        self.trial.require(
            known or not same, "SB2", f"{how} of {page} found it; it is not stored, or was cleared"
        )
        self.trial.require(same, "SB1", f"{how} of {page} gave {self.origin(found)}")

    def owner(self, found: torch.Tensor) -> Page | None:
        """Whose bytes these are."""
        every = (Page(e, k, p) for e in range(len(ENGINES)) for k in range(KEYS) for p in POOLS)
        flat = found.reshape(-1)
        return next((page for page in every if flat.equal(self.bytes_of(page))), None)

    def origin(self, found: torch.Tensor) -> str:
        """The same, for people."""
        whose = self.owner(found)
        return f"the bytes of {whose}" if whose else f"{found.numel()} bytes that nobody stored"

    def leading(self, pages: Sequence[Page]) -> int | None:
        """How many leading pages exist; None: that is not known."""
        for count, page in enumerate(pages):
            if page in self.unsure:
                return None
            if page not in self.stored:
                return count
        return len(pages)

    def clear(self, engine: int) -> None:
        """This engine's pages are gone; the files of others are as they were."""
        engine %= self.engines
        done = self.call(engine, "clear")
        self.check()
        self.trial.require(done is not False, "SB5", "clear answered False; nothing failed")
        self.stored = {page for page in self.stored if page.engine != engine}
        self.unsure = {page for page in self.unsure if page.engine != engine}
        for page in sorted(self.stored):
            if page.pool == "kv" and not self.call(page.engine, "exists", key_of(page.key)):
                self.trial.require(False, "SB5", f"clear of engine {engine} removed {page}")
                self.unsure |= self.stored  # that rule is switched off: what is left is not known
                self.stored = set()

    # ---- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Files of others are as they were."""
        for name in FOREIGN:
            try:
                with open(os.path.join(self.path, name), "rb") as file:
                    kept = file.read() == name.encode()
            except OSError:
                kept = False
            self.trial.require(kept, "SB9", f"file {name!r}, which no store wrote, is gone")

    def files(self) -> list[str]:
        """The files that are not foreign, by name."""
        return sorted(
            entry.name
            for entry in os.scandir(self.path)
            if entry.is_file(follow_symlinks=False) and entry.name not in FOREIGN
        )

    def choices(self) -> dict[str, Any]:
        return {}

    def describe(self) -> str:
        lines = [f"stored: {sorted(self.stored)}", f"may be there: {sorted(self.unsure)}"]
        return "\n".join([*lines, f"files: {self.files()}"])
