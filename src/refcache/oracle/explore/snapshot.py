"""A driver with everything it drives, kept as it is, to be gone on with as often as one likes.

:func:`freeze` writes the object graph below a driver into bytes, and :meth:`Frozen.thaw` makes a
fresh graph of them: the same sharing, the same views of the same storages, closures with cells of
their own. So one step after another can be tried from one state, without making the steps that lead
there again. What has no state of its own is shared and not copied: classes, modules, code, the
functions of a module or class, and the :class:`~refcache.oracle.target.Target`.

Not everything can be copied (a thread, a file, memory of a device), and a copy may be unfaithful
(an ``id`` used as a key). So the explorer compares a sample of copies with a replay, and where one
differs, or where :func:`freeze` refuses, it replays.
"""

import io
import pickle
import sys
import types
import weakref
from ctypes import memmove, string_at
from threading import Lock, RLock
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.oracle.program.driver import Driver
from refcache.oracle.target.base import Target
from refcache.runtime import Tracker


class CannotCopy(InvalidArgument):
    """Something below a driver has no copy; the message names it."""


class Frozen:
    """A driver as it was when it was frozen. ``size``: bytes."""

    def __init__(self, data: bytes, shared: list[Any]) -> None:
        self._data, self._shared = data, shared

    @property
    def size(self) -> int:
        return len(self._data)

    def thaw(self) -> Driver:
        """A driver of its own in that state."""
        _thawing.append(self._shared)
        try:
            driver: Driver = pickle.loads(self._data)
        finally:
            _thawing.pop()
        return driver


def freeze(driver: Driver) -> Frozen:
    """Keep ``driver`` as it is between two steps.

    Raises:
        CannotCopy: something below it has no copy.
    """
    out = io.BytesIO()
    freezer = _Freezer(out)
    try:
        freezer.dump(driver)
    except KeyboardInterrupt:
        raise
    except Exception as error:  # a class may raise anything when it is asked for its state
        raise CannotCopy(f"the state of a {type(driver).__name__} has no copy: {error}") from error
    return Frozen(out.getvalue(), freezer.shared)


_thawing: list[list[Any]] = []


def _the(index: int) -> Any:
    return _thawing[-1][index]


class _Code:
    """What makes a function, but for its cells."""

    def __init__(self, function: types.FunctionType) -> None:
        self.code, self.globals = function.__code__, function.__globals__
        self.name, self.qualname = function.__name__, function.__qualname__


SHARED = (type, types.ModuleType, types.CodeType, torch.dtype, torch.device, Target, _Code)


class _Freezer(pickle.Pickler):
    """``shared``: what a copy takes as it is."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=5)
        self.shared: list[Any] = []
        self._places: dict[int, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        """How ``value`` is written; asked for all but plain values and containers."""
        reduce = _REDUCE.get(type(value))
        if reduce is not None:
            return reduce(self, value)
        if isinstance(value, torch.Tensor):
            return _tensor(self, value)
        if isinstance(value, SHARED):
            return self.share(value)
        return _forwarder(value) if hasattr(type(value), "__getattr__") else NotImplemented

    def share(self, value: Any) -> Any:
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = (_the, (len(self.shared),))
            self.shared.append(value)
        return place


def _forwarder(value: Any) -> Any:
    """What forwards the attributes it lacks: before it has any, it must not be asked for one."""
    kind: Any = type(value)
    if hasattr(kind, "__setstate__") or kind.__reduce_ex__ is not object.__reduce_ex__:
        return NotImplemented
    return object.__new__, (type(value),), vars(value), None, None, _set_attributes


def _set_attributes(value: Any, attributes: dict[str, Any]) -> None:
    vars(value).update(attributes)


def _function(freezer: _Freezer, value: types.FunctionType) -> Any:
    if value.__module__ == __name__:
        return NotImplemented
    owner: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        owner = getattr(owner, name, None)
    if owner is value or not value.__closure__:
        return freezer.share(value)
    state = (value.__defaults__, value.__kwdefaults__, value.__dict__)
    return _make_function, (_Code(value), value.__closure__), state, None, None, _set_function


def _make_function(code: _Code, closure: Any) -> types.FunctionType:
    function = types.FunctionType(code.code, code.globals, code.name, None, closure)
    function.__qualname__ = code.qualname
    return function


def _set_function(function: types.FunctionType, state: Any) -> None:
    function.__defaults__, function.__kwdefaults__, attributes = state
    function.__dict__.update(attributes)


def _cell(freezer: _Freezer, value: types.CellType) -> Any:
    try:
        content = (value.cell_contents,)
    except ValueError:  # it is empty
        return types.CellType, ()
    return types.CellType, (), content, None, None, _set_cell


def _set_cell(cell: types.CellType, content: tuple[Any]) -> None:
    (cell.cell_contents,) = content


def _method(freezer: _Freezer, value: types.MethodType) -> Any:
    return types.MethodType, (value.__func__, value.__self__)


def _builtin(freezer: _Freezer, value: types.BuiltinFunctionType) -> Any:
    if isinstance(value.__self__, types.ModuleType | None):
        return freezer.share(value)
    return getattr, (value.__self__, value.__name__)


def _tensor(freezer: _Freezer, value: torch.Tensor) -> Any:
    if value.device.type != "cpu" or value.layout != torch.strided or value.requires_grad:
        raise CannotCopy(f"a tensor on {value.device}, {value.layout}")
    place = (value.storage_offset(), tuple(value.size()), value.stride())
    return _make_tensor, (value.untyped_storage(), value.dtype, *place)


def _make_tensor(storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, *place)


def _storage(freezer: _Freezer, value: torch.UntypedStorage) -> Any:
    size = value.nbytes()
    return _make_storage, (string_at(value.data_ptr(), size) if size else b"",)


def _make_storage(content: bytes) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(content))  # type: ignore[no-untyped-call]
    if content:
        memmove(storage.data_ptr(), content, len(content))
    return storage


def _reference(freezer: _Freezer, value: weakref.ref[Any]) -> Any:
    return _make_reference, (value(), value.__callback__)


def _make_reference(value: Any, callback: Any) -> weakref.ref[Any]:
    return weakref.ref(_Gone() if value is None else value, callback)


class _Gone:
    """Nobody keeps it: a reference to it is dead at once."""


def _tracker(freezer: _Freezer, value: Tracker) -> Any:
    """It files its pools under their ids, which a copy's pools have others of."""
    state = dict(vars(value))
    pools = [(entry[0](), entry[1]) for entry in state.pop("_pools").values()]
    state["_pools"] = {}
    made = (value.stop, state, [pool for pool in pools if pool[0] is not None])
    return Tracker, (value.stop,), made, None, None, _set_tracker


def _set_tracker(tracker: Tracker, state: Any) -> None:
    _, attributes, pools = state
    vars(tracker).update(attributes)
    for pool, cells in pools:
        tracker.adopt(pool, cells)


_REDUCE: dict[type, Any] = {
    types.FunctionType: _function,
    types.CellType: _cell,
    types.MethodType: _method,
    types.BuiltinFunctionType: _builtin,
    torch.Tensor: _tensor,
    torch.UntypedStorage: _storage,
    weakref.ref: _reference,
    Tracker: _tracker,
    type(Lock()): lambda freezer, value: (Lock, ()),
    type(RLock()): lambda freezer, value: (RLock, ()),
}
