"""Where other engines' sources are, and how a module of them is imported without a GPU.

An engine is a folder that holds its package, such as an unpacked source distribution:
``.peers/vllm-0.33.0``, or the one that a variable names (``REFCACHE_PEER_VLLM``). What the modules
on trial import and never call is replaced by inert stand-ins (:mod:`refcache.peers.standins`):
``STAND_INS`` is the whole list. None of them holds cache logic.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from refcache.errors import MissingExtra
from refcache.peers import releases, standins

RELEASES = {"vllm": "0.33.0", "lmcache": "0.5.6", "nanovllm": "bb823b3"}
"""The releases or commits that the adapters are written for, by package."""
CALLED = {"nanovllm": "nano-vllm"}
"""An engine's name, where its package has another one."""
STAND_INS = {
    "vllm": (
        "psutil", "vllm.distributed", "vllm.env_override", "vllm.logger", "vllm.platforms",
    ),
    "lmcache": (
        "cachetools", "numba", "psutil", "requests",
        # metrics, the native extension, other backends, the controller's messages
        "lmcache.observability", "lmcache.lmcache_native", "lmcache.integration",
        "lmcache.storage_backend", "lmcache.v1.cache_controller", "lmcache.v1.gpu_connector",
        "lmcache.v1.storage_backend.gds_backend", "lmcache.v1.storage_backend.local_disk_backend",
        "lmcache.v1.storage_backend.p2p_backend", "lmcache.v1.storage_backend.remote_backend",
    ),
    "nanovllm": ("xxhash", "nanovllm.llm"),
}  # fmt: skip


def folder(engine: str) -> Path:
    """Where an engine's package is looked for."""
    named = os.environ.get(variable(engine))
    called = f"{CALLED.get(engine, engine)}-{RELEASES[engine]}"
    return Path(named) if named else releases.root() / called


def variable(engine: str) -> str:
    """The environment variable that names an engine's folder."""
    return "REFCACHE_PEER_" + CALLED.get(engine, engine).upper().replace("-", "_")


def present(engine: str) -> bool:
    """Whether it is there."""
    return (folder(engine) / engine).is_dir()


def module(engine: str, name: str) -> ModuleType:
    """A module of the engine, below its package.

    Raises:
        MissingExtra: the sources are not there.
    """
    if not present(engine):
        raise MissingExtra(
            f"{engine} {RELEASES[engine]} is not in {folder(engine)}: unpack its source "
            f"distribution there, or name its folder in {variable(engine)}"
        )
    full = f"{engine}.{name}"
    if full not in sys.modules:
        where = str(folder(engine).resolve())
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")
        if where not in sys.path:
            sys.path.insert(0, where)
        with standins.install(STAND_INS[engine]):
            importlib.import_module(full)
    return sys.modules[full]
