"""Which way a copy goes: rules as data, measured on a card.

A copy is made by a *kernel* (it takes multiprocessors from the model that runs beside it; a cap on
its programs bounds that) or by the *copy engine* ("direct": it takes none, and short copies are
slow). Which is better for the model, and which cap, depends on the direction, on how long each copy
of the engine would be, on how much is moved, and on what runs meanwhile. A table of
:class:`TransferRule` says so for one card; the first that applies is taken. docs/performance.md has
the measurements; ``refcache tune`` makes a table for another card.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from refcache.errors import InvalidArgument

RULES_FILE = "REFCACHE_TRANSFER_RULES"  # environment: a file that `refcache tune` has written


@dataclass(frozen=True)
class TransferRule:
    """Applies to copies in one direction that are at least so long.

    Attributes:
        to_host: direction: device to host, or back.
        io_backend: "kernel" or "direct" (the copy engine).
        max_programs: cap of the kernel; 0: none.
        at_once: a kernel loads all layers in one launch where a layer has at most so many bytes.
        copy_bytes: of each copy that the engine would make, at least.
        min_bytes: of the whole transfer, at least.
        phase: what runs beside, as the caller names it ("prefill", "decode"); "": anything.
    """

    to_host: bool
    io_backend: str
    max_programs: int = 0
    at_once: int = 1 << 62
    copy_bytes: int = 0
    min_bytes: int = 0
    phase: str = ""

    def applies(self, *, to_host: bool, copy_bytes: int, total: int, phase: str) -> bool:
        return (
            self.to_host == to_host
            and copy_bytes >= self.copy_bytes
            and total >= self.min_bytes
            and self.phase in ("", phase)
        )


class TransferPlan(NamedTuple):
    """How one copy goes, and why."""

    io_backend: str
    max_programs: int
    at_once: bool
    why: str


Rules = tuple[TransferRule, ...]

# By torch's name of the card, measured by benchmarks/gpu/bench_model.py. "": any other card; these
# are careful guesses from the H200, not measured: `refcache tune` measures.
RULES: dict[str, Rules] = {
    "NVIDIA H200": (
        TransferRule(to_host=False, io_backend="direct", copy_bytes=64 << 10, min_bytes=1 << 30),
        TransferRule(to_host=False, io_backend="kernel", max_programs=2),
        TransferRule(to_host=True, io_backend="direct", copy_bytes=16 << 10),
        TransferRule(to_host=True, io_backend="kernel", max_programs=2),
    ),
    "": (
        TransferRule(to_host=False, io_backend="direct", copy_bytes=64 << 10, min_bytes=1 << 30),
        TransferRule(to_host=False, io_backend="kernel", max_programs=4, at_once=4 << 20),
        TransferRule(to_host=True, io_backend="direct", copy_bytes=32 << 10),
        TransferRule(to_host=True, io_backend="kernel", max_programs=2),
    ),
}


def rules_for(card: str) -> Rules:
    """The table of a card: from the file that the environment names, or the one measured here."""
    return _saved().get(card) or RULES.get(card) or RULES[""]


@cache
def card_name(device: str) -> str:
    """Torch's name of a CUDA device; "" for any other device."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else ""


def saved_in(path: Path) -> dict[str, Rules]:
    """The tables in a file that :func:`save` may write to; none where it does not exist yet.

    Raises:
        InvalidArgument: another file, or no folder to write in.
    """
    if path.exists():
        return _read(path)
    if not path.absolute().parent.is_dir():
        raise InvalidArgument(f"transfer rules in {path}: expected a file in a folder that exists")
    return {}


def save(path: Path, card: str, rules: Iterable[TransferRule]) -> None:
    """Write a table; the tables of other cards in the file stay. Written whole or not at all.

    Raises:
        InvalidArgument: as :func:`saved_in`, or it cannot be written.
    """
    tables = {**saved_in(path), card: tuple(rules)}
    text = {name: [asdict(rule) for rule in table] for name, table in tables.items()}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            part.write_text(json.dumps(text, indent=1) + "\n", "utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidArgument(f"transfer rules in {path}: {error.strerror}") from None


@cache
def _saved() -> dict[str, Rules]:
    path = os.environ.get(RULES_FILE)
    return _read(Path(path)) if path else {}


def _read(path: Path) -> dict[str, Rules]:
    """The tables of a file.

    Raises:
        InvalidArgument: it is not there, or not what :func:`save` writes.
    """
    known = {field.name for field in fields(TransferRule)}
    try:
        found: dict[str, list[dict[str, Any]]] = json.loads(path.read_text("utf-8"))
        return {
            card: tuple(TransferRule(**{k: rule[k] for k in rule.keys() & known}) for rule in table)
            for card, table in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f"transfer rules in {path}: {error}; expected a file that `refcache tune` has written"
        ) from error
