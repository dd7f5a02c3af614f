"""Storage backends as targets: ``storage:NAME``.

``NAME`` is ``file`` or ``memory`` (refcache's), another that is registered with
:class:`~refcache.storage.StorageBackendFactory`, ``sglang-VERSION`` (the file backend of an
unpacked release), or ``pkg.module:Class``: any class with the methods of ``HiCacheStorage`` that is
made as ``Class(storage_config, directory)``.
"""

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from refcache.errors import InvalidArgument
from refcache.oracle.target.base import Target
from refcache.oracle.target.storage.contract import StorageTraits
from refcache.storage import HiCacheFile, HiCacheStorageConfig, StorageBackendFactory
from refcache.storage.disk import OsDisk
from refcache.storage.file import DIRECTORY

SGLANG = "sglang-"


def file_backend(engine: Mapping[str, Any], path: str, max_bytes: int | None) -> HiCacheFile:
    """refcache's file backend in ``path``."""
    config = HiCacheStorageConfig(**_every_field(HiCacheStorageConfig, engine))
    return HiCacheFile(config, disk=OsDisk(path), max_bytes=max_bytes)


class BackendTarget(Target):
    """A class of backends, made as ``made(storage_config, directory)``."""

    capabilities = frozenset({"storage", "durable"})

    def __init__(self, name: str, made: Any, config: Any = HiCacheStorageConfig) -> None:
        self.name = name
        self.made = made
        self.config = config
        own = {method: getattr(made, method, None) for method in ("batch_get_v1", "batch_get_v2")}
        base = _sglang_base(made)
        self.storage_traits = StorageTraits(
            v1=own["batch_get_v1"] is not getattr(base, "batch_get_v1", None),
            v2=own["batch_get_v2"] is not getattr(base, "batch_get_v2", None),
            no_target=base is None,
        )

    def storage(self, engine: Mapping[str, Any], path: str, max_bytes: int | None = None) -> Any:
        with _without_variable():
            return self.made(self.config(**_every_field(self.config, engine)), path)


class NamedTarget(Target):
    """A backend of refcache's factory."""

    def __init__(self, backend: str) -> None:
        self.name = backend
        self.backend = backend
        survives = {"durable"} if backend == "file" else set()
        self.capabilities = frozenset({"storage", *survives})
        self.storage_traits = StorageTraits(bounded=backend == "file")

    def storage(self, engine: Mapping[str, Any], path: str, max_bytes: int | None = None) -> Any:
        if self.backend == "file":
            return file_backend(engine, path, max_bytes)
        given = _every_field(HiCacheStorageConfig, engine)
        config = HiCacheStorageConfig(**given, extra_config={"file_path": path})
        return StorageBackendFactory.create_backend(self.backend, config)


def storage_target(spec: str) -> Target:
    """The target named ``storage:NAME``.

    Raises:
        InvalidArgument: no backend is called so, or it cannot be imported.
        MissingExtra: a release that is not unpacked.
    """
    name = spec.partition(":")[2]
    if name in StorageBackendFactory.names() and name != "dynamic":
        return NamedTarget(name)
    if name.startswith(SGLANG):
        release = importlib.import_module("refcache.peers.engine").load(name.removeprefix(SGLANG))
        home = release.module("mem_cache.hicache_storage")
        return BackendTarget(name, home.HiCacheFile, home.HiCacheStorageConfig)
    module, colon, attribute = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgument(f"target {spec!r} does not import: {error}") from error
    if not isinstance(made, type):
        known = [known for known in StorageBackendFactory.names() if known != "dynamic"]
        raise InvalidArgument(
            f"target {spec!r}: expected storage: and one of {', '.join(known)}, sglang-VERSION or "
            "pkg.module:Class"
        )
    return BackendTarget(name, made)


def _sglang_base(made: Any) -> Any:
    """SGLang's own base class, which has v1 and v2 without a body; None for another."""
    return next((c for c in made.__mro__[1:] if c.__module__.startswith("sglang.")), None)


def _every_field(config: Any, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a configuration class; a release's has no defaults for some."""
    plain = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "model_name": None}
    plain |= {"attn_cp_rank": 0, "attn_cp_size": 1}
    no = ("is_mla_model", "enable_storage_metrics", "is_page_first_layout")
    plain |= dict.fromkeys(no, False)
    fields = config.__dataclass_fields__
    return {name: value for name, value in {**plain, **engine}.items() if name in fields}


@contextmanager
def _without_variable() -> Iterator[None]:
    """A directory that the environment names would go first."""
    before = os.environ.pop(DIRECTORY, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[DIRECTORY] = before
