"""The engine's device module, on whichever simulated machine is current.

An engine keeps one device module for the life of the process (``torch.cuda`` on a GPU); a suite
builds a new machine for every case. So this module forwards to the machine that was installed
last by :func:`use`. One cache at a time may be running.
"""

from contextlib import AbstractContextManager
from typing import Any

from refcache.errors import InvalidArgument
from refcache.runtime import Runtime

_machine: list[Runtime] = []


def use(machine: Runtime) -> None:
    """From now on the engine's streams, events and copies belong to ``machine``."""
    _machine[:] = [machine]


def machine() -> Runtime:
    """The current machine.

    Raises:
        InvalidArgument: none was installed: an engine's two-tier cache needs one.
    """
    if not _machine:
        raise InvalidArgument("the device module has no machine: call use(machine) first")
    return _machine[0]


class DeviceModule:
    """The part of ``torch.cuda`` that an engine's cache uses."""

    @staticmethod
    def Stream(*_: Any, **__: Any) -> Any:
        return machine().Stream()

    @staticmethod
    def Event(*_: Any, **__: Any) -> Any:
        return machine().Event()

    @staticmethod
    def current_stream(*_: Any) -> Any:
        return machine().current_stream()

    @staticmethod
    def stream(stream: Any) -> AbstractContextManager[Any]:
        return machine().stream(stream)

    @staticmethod
    def synchronize(*_: Any) -> None:
        machine().synchronize()


device_module = DeviceModule()
"""What the engine's ``get_device_module`` returns."""
