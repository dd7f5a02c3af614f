"""Machines: who runs a launch, and when. See :mod:`refcache.runtime.api`."""

from refcache.runtime.api import Event, Flags, Part, Region, Runtime, Stream, Thread
from refcache.runtime.cuda import CudaRuntime
from refcache.runtime.immediate import ImmediateRuntime
from refcache.runtime.simulated.choices import all_orders, drawn, eager, lazy
from refcache.runtime.simulated.machine import SimulatedRuntime
from refcache.runtime.simulated.tracker import DeadIndex, RaceFound, Tracker

__all__ = [
    "CudaRuntime",
    "DeadIndex",
    "Event",
    "Flags",
    "ImmediateRuntime",
    "Part",
    "RaceFound",
    "Region",
    "Runtime",
    "SimulatedRuntime",
    "Stream",
    "Thread",
    "Tracker",
    "all_orders",
    "drawn",
    "eager",
    "lazy",
]
