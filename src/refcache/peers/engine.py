"""Imports the cache of an unpacked SGLang release, unmodified.

A process imports one release: its modules have one name, and keep state.
"""

import importlib
import logging
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from refcache.errors import InvalidArgument
from refcache.peers import guard, standins
from refcache.peers.device import device_module
from refcache.peers.releases import folder, refuse_unless_installed


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
    refuse_unless_installed(version)
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
