"""From a target's name to the target: a table of names, or anything that can be imported."""

import importlib
from collections.abc import Callable
from typing import Any

from refcache.errors import InvalidArgument
from refcache.oracle.target.base import CAPABILITIES, Target

BUILT_IN = {
    "refcache": "refcache.oracle.target.reference:RefcacheTarget",
    "naive": "refcache.oracle.target.naive:NaiveTarget",
}
FAMILIES = {
    "sglang": "refcache.peers:peer_target",
    "vllm": "refcache.peers.others.named:other_target",
    "nanovllm": "refcache.peers.others.named:other_target",
    "lmcache": "refcache.peers.others.named:other_target",
    "storage": "refcache.oracle.target.backends:storage_target",
}
"""Names with a version or a part behind a colon, or with none: a function of the whole name."""
OPS = "refcache.oracle.target.ops:ops_target"


def resolve(spec: str) -> Target:
    """The target named ``spec``: ``"refcache"``, ``"naive"``, ``"sglang:VERSION"``,
    ``"storage:BACKEND"``, ``"pkg.module:factory"``, or ``"pkg.module:function"`` for one op.

    Raises:
        InvalidArgument: it does not import, the name is missing, or calling it gives no Target.
        MissingExtra: a release that is not unpacked.
    """
    family = spec.partition(":")[0]
    target = _named(FAMILIES[family])(spec) if family in FAMILIES else _made(spec)
    target.spec = spec
    return target


def _named(where: str) -> Any:
    """What stands at ``module:name``."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _made(spec: str) -> Target:
    """What the factory of that name gives, or a target of the op of that name."""
    factory = _factory(spec)
    try:
        target: Any = _named(OPS)(factory)
    except InvalidArgument as error:
        raise InvalidArgument(
            f"target {spec!r}: no factory, which takes no argument; as an op: {error}"
        ) from None
    try:
        target = target or factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InvalidArgument(f"target {spec!r}: calling the factory: {error!r}") from error
    if not isinstance(target, Target):
        raise InvalidArgument(
            f"target {spec!r}: the factory gave {type(target).__name__}, expected a "
            "refcache.oracle.Target"
        )
    unknown = target.capabilities - CAPABILITIES
    if unknown:
        raise InvalidArgument(
            f"target {spec!r}: unknown capabilities {sorted(unknown)}, expected some of "
            f"{sorted(CAPABILITIES)}"
        )
    return target


def _factory(spec: str) -> Callable[..., Any]:
    """Import what the name says, which must be callable."""
    module_name, colon, attribute = BUILT_IN.get(spec, spec).partition(":")
    if not (module_name and colon and attribute):
        raise InvalidArgument(
            f"target {spec!r}: expected one of {', '.join(BUILT_IN)}, sglang[:VERSION], "
            "storage:BACKEND, pkg.module:factory or pkg.module:function"
        )
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InvalidArgument(f"target {spec!r} does not import: {error!r}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise InvalidArgument(f"target {spec!r}: {module_name} has no factory {attribute!r}")
    made: Callable[..., Any] = factory
    return made
