"""What stands in for what a machine without a GPU does not have: the whole list, in this file.

An engine imports far more than its cache: GPU kernels, model definitions, servers. Importing the
modules on trial from the published wheel needs something under those names, and nothing more than
that: no module on trial calls them, except those whose behaviour is defined here.

* ``NAMES``: packages that are replaced whole, by modules whose every name is an inert class.
* ``sgl_kernel.kvcacheio``: the copy kernels, as launches (:mod:`refcache.peers.copies`).
* ``psutil.virtual_memory``: the free-memory probe of the host pool, which asks for 10 GB to spare.
* ``torch.cuda.cudart``: registering host memory succeeds and does nothing (on a machine without a
  GPU only).
* ``xxhash.xxh64``: another hash of 64 bits.
* the device module of the engine (:mod:`refcache.peers.device`), returned by its own
  ``get_device_module``.

:func:`install` comes before the engine is imported. ``ON_TRIAL`` lists the modules on trial; none
of them is ever replaced, and :func:`foreign_names` says which stand-ins their namespaces hold.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from refcache.peers import copies

NAMES = (
    # GPU kernels and their compilers
    "sgl_kernel", "flashinfer", "aiter", "tvm_ffi", "torchvision",
    # models, tokenizers and their files
    "transformers", "huggingface_hub", "safetensors", "compressed_tensors", "gguf", "openai",
    # servers, tools
    "IPython", "aiohttp", "dill", "orjson", "psutil", "pybase64", "starlette", "tqdm", "zmq",
    # parts of the engine that its cache does not use: the language front end, the model layers,
    # the HTTP server and what parses its output
    "sglang.lang", "sglang.srt.configs", "sglang.srt.constrained", "sglang.srt.entrypoints",
    "sglang.srt.function_call", "sglang.srt.layers", "sglang.srt.model_loader",
    "sglang.srt.models", "sglang.srt.parser",
)  # fmt: skip
ON_TRIAL = ("sglang.srt.mem_cache", "sglang.srt.managers.cache_controller")
FREE_MEMORY = 2**50
LOOKED_INTO = ("__func__", "__class_validators__")
"""What the engine's patches of ``transformers`` look up; other such names do not exist."""


def is_on_trial(module: str) -> bool:
    """Whether a module belongs to what is judged."""
    return _below(module, ON_TRIAL)


def _below(module: str, names: Sequence[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


class _Inert(type):
    """Class of the inert classes: any attribute, item or base class will do."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> Any:
        return super().__new__(mcs, name, bases, body)

    def __init__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, body)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name not in LOOKED_INTO:
            raise AttributeError(name)
        made = inert(name, cls.__module__)
        setattr(cls, name, made)
        return made

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __setitem__(cls, _: Any, __: Any) -> None:
        pass

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __or__(cls, _: Any) -> Any:
        return cls

    __ror__ = __or__


def inert(name: str, module: str) -> Any:
    """A class that can be inherited from, made, called (returns its argument), looked into."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self

    def attribute(self: Any, name: str) -> Any:
        return getattr(type(self), name)

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        pass

    body = {
        "__module__": module,
        "__init__": init,
        "__call__": call,
        "__getattr__": attribute,
        "__init_subclass__": classmethod(init_subclass),
    }
    return _Inert(name, (), body)


class StandIn(ModuleType):
    """A module under a name of ``NAMES``; a package, so that anything below it imports."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        kernels = self.__name__ == "sgl_kernel.kvcacheio"
        made = copies.kernel(name) if kernels else inert(name, self.__name__)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if _below(name, self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "psutil":
            probe = SimpleNamespace(available=FREE_MEMORY, total=FREE_MEMORY)
            module.virtual_memory = lambda: probe  # type: ignore[attr-defined]
        if module.__name__ == "xxhash":
            module.xxh64 = Hash64  # type: ignore[attr-defined]


class Hash64:
    """A hash of 64 bits with the methods of ``xxhash.xxh64``."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=8)
        self.update = self._hash.update

    def intdigest(self) -> int:
        return int.from_bytes(self._hash.digest(), "little")


class _Cudart:
    """The part of CUDA's runtime that pools call: it returns success."""

    def cudaHostRegister(self, *_: Any) -> int:
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:
        return 0


@contextmanager
def install(names: Sequence[str] = NAMES) -> Iterator[None]:
    """Put the stand-ins in place while an engine is imported.

    Packages of ``names`` that were imported before come back afterwards; the stand-ins of all
    others stay, for imports that the engine makes later.
    """
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _below(name, names)}
    sys.meta_path.insert(0, _Finder(names))
    if not torch.cuda.is_available():
        torch.cuda.cudart = _Cudart
    try:
        yield
    finally:
        sys.modules.update(before)


def replaced() -> list[str]:
    """The modules of this process that are stand-ins."""
    return sorted(name for name, module in sys.modules.items() if isinstance(module, StandIn))


def foreign_names(module: ModuleType) -> list[str]:
    """The global names of a module whose values are stand-ins."""
    return sorted(
        name
        for name, value in vars(module).items()
        if isinstance(value, (StandIn, _Inert)) or isinstance(type(value), _Inert)
    )
