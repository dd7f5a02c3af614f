"""Machines: who runs a launch, and when. See :mod:`refcache.runtime.api`."""

from refcache.runtime.api import Event, Region, Runtime, Stream
from refcache.runtime.immediate import ImmediateRuntime

__all__ = ["Event", "ImmediateRuntime", "Region", "Runtime", "Stream"]
