"""Finds an unpacked SGLang release and imports its cache, unmodified.

A release is a published wheel, unpacked into a folder of its own (``make peers`` does so) below
``.peers``, or below the folder that the variable ``REFCACHE_PEERS`` names. A process imports one
release: its modules have one name, and keep state.
"""

import importlib
import logging
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from refcache.errors import InvalidArgument, MissingExtra
from refcache.peers import guard, standins
from refcache.peers.device import device_module

VERSIONS = ("0.5.10", "0.5.12", "0.5.23")
"""The releases that the adapters are written for."""


def root() -> Path:
    """Where releases are unpacked: one folder a version."""
    return Path(os.environ.get("REFCACHE_PEERS", ".peers"))


def folder(version: str) -> Path:
    """Where one release is unpacked."""
    return root() / version


def unpacked() -> list[str]:
    """The releases that are there, oldest first."""
    return [version for version in VERSIONS if (folder(version) / "sglang").is_dir()]


@dataclass(frozen=True)
class Engine:
    """One release, imported."""

    version: str

    def module(self, name: str) -> Any:
        """A module below ``sglang.srt``."""
        return importlib.import_module(f"sglang.srt.{name}")

    @cached_property
    def allocator(self) -> Any:
        return self.module("mem_cache.allocator")

    @cached_property
    def params(self) -> Any:
        return self.module("mem_cache.base_prefix_cache")

    @cached_property
    def radix_cache(self) -> Any:
        return self.module("mem_cache.radix_cache")


_loaded: list[Engine] = []


def load(version: str) -> Engine:
    """Import a release; the same one again is the same object.

    Raises:
        MissingExtra: it is not unpacked, or what its kernels need is not installed.
        InvalidArgument: another release was imported, or Triton was, without its interpreter.
    """
    if _loaded:
        if _loaded[0].version != version:
            raise InvalidArgument(
                f"sglang {version}: this process has imported {_loaded[0].version}; one process "
                "judges one release"
            )
        return _loaded[0]
    if version not in unpacked():
        raise MissingExtra(f"sglang {version} is not unpacked in {root()}: run `make peers`")
    missing = [name for name in ("numpy", "triton") if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"sglang {version} needs {' and '.join(missing)}, not installed here")
    _interpret_triton()
    sys.path.insert(0, str(folder(version).resolve()))
    logging.getLogger("sglang").setLevel(logging.ERROR)
    guard.install()
    with standins.install():
        utils = importlib.import_module("sglang.srt.utils")
        utils.get_device_module = lambda: device_module  # type: ignore[attr-defined]
        engine = Engine(version)
        for name in (engine.allocator, engine.params, engine.radix_cache):
            assert standins.is_on_trial(name.__name__)
        engine.module("managers.cache_controller")
    _loaded.append(engine)
    return engine


def _interpret_triton() -> None:
    """The engine's allocation kernels run under Triton's interpreter, chosen before its import."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        raise InvalidArgument(
            "Triton is imported without its interpreter: set TRITON_INTERPRET=1 before Python "
            "starts"
        )
    os.environ["TRITON_INTERPRET"] = "1"
