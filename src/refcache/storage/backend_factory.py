"""Storage backends by name.

``memory`` and ``file`` are built in; others are registered, or named in ``extra_config`` of the
backend ``dynamic``: ``backend_name``, ``module_path``, ``class_name``. A class is made as
``cls(storage_config, options)``, ``options`` being the configuration's ``extra_config`` (a class
may make itself otherwise: :meth:`~refcache.storage.base.HiCacheStorage.from_options`).
"""

import importlib
from typing import Any, ClassVar

from refcache.errors import InvalidArgument, UnknownName
from refcache.storage.base import HiCacheStorage
from refcache.storage.transfers import HiCacheStorageConfig

DYNAMIC = ("backend_name", "module_path", "class_name")


class StorageBackendFactory:
    """Makes storage backends; see the module."""

    _registry: ClassVar[dict[str, tuple[str, str]]] = {
        "file": ("refcache.storage.file", "HiCacheFile"),
        "memory": ("refcache.storage.memory", "HiCacheMemory"),
    }

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        """Give a class a name; it is imported when the first one is made."""
        cls._registry[name] = (module_path, class_name)

    @classmethod
    def names(cls) -> list[str]:
        """The names that ``create_backend`` takes."""
        return sorted({*cls._registry, "dynamic"})

    @classmethod
    def create_backend(
        cls,
        backend_name: str,
        storage_config: HiCacheStorageConfig,
        mem_pool_host: Any = None,
        **kwargs: Any,
    ) -> HiCacheStorage:
        """A new backend, the pool registered with it if one is given.

        Raises:
            UnknownName: there is no backend of that name.
            InvalidArgument: a dynamic one that is not described, cannot be imported or is no
                :class:`~refcache.storage.base.HiCacheStorage`.
        """
        if not isinstance(backend_name, str):
            raise UnknownName("storage backend", str(backend_name), cls.names())
        options = dict(storage_config.extra_config or {})
        if backend_name == "dynamic":
            missing = [name for name in DYNAMIC if not options.get(name)]
            if missing:
                raise InvalidArgument(
                    f"extra_config of the backend 'dynamic': no {', '.join(missing)}; "
                    f"expected {', '.join(DYNAMIC)}"
                )
            home = (options["module_path"], options["class_name"])
        elif backend_name in cls._registry:
            home = cls._registry[backend_name]
        else:
            raise UnknownName("storage backend", backend_name, cls.names())
        backend = _class_of(*home).from_options(storage_config, {**options, **kwargs})
        if mem_pool_host is not None:
            backend.register_mem_pool_host(mem_pool_host)
        return backend


def _class_of(module_path: str, class_name: str) -> type[HiCacheStorage]:
    what = f"storage backend {module_path}:{class_name}"
    try:
        found = getattr(importlib.import_module(module_path), class_name)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(f"{what} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, HiCacheStorage)):
        raise InvalidArgument(f"{what}: expected a subclass of HiCacheStorage")
    return found
