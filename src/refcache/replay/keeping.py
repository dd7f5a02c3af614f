"""Strategies of a replay: by name, of one's own, and three that keep KV by time or by place.

``ttl=S``: what nobody used for S seconds of the trace is gone, though there is room; else LRU.
``retain=S``: what was used again is kept for S seconds after its last use, as long as anything else
can go; else LRU. ``pin=N``: what prompts share of their first N tokens (instructions, tools) goes
last; else LRU. The first two need the trace's times.
"""

import importlib

from refcache.errors import InvalidArgument
from refcache.replay.config import ReplayConfig, kept_by
from refcache.replay.feed import TraceClock
from refcache.tree import RadixCache, TreeNode
from refcache.tree.strategies import EvictionStrategy, LRUStrategy
from refcache.types import EvictParams


class TTLStrategy(LRUStrategy):
    """LRU, and what was not used for ``seconds`` is evicted by :meth:`expire`."""

    def __init__(self, seconds: float, clock: TraceClock) -> None:
        self.seconds, self.clock = seconds, clock
        self._asked = 0.0

    def expire(self, tree: RadixCache) -> None:
        """Evict what is too old. Looks at the nodes once in a 64th of the time to live."""
        now = self.clock.now
        if now - self._asked < self.seconds / 64:
            return
        self._asked = now
        old = sum(
            len(node.key)
            for node in tree.nodes()
            if not node.lock_ref and node.last_access_time < now - self.seconds
        )
        if old:  # who is used uses its ancestors too: the old ones are the first of an LRU
            tree.evict(EvictParams(old))


class RetainStrategy(EvictionStrategy):
    """What two requests used, the last within ``seconds``, goes after everything else.

    The tree has to count hits once a request (``hit_policy="per_request"``).
    """

    def __init__(self, seconds: float, clock: TraceClock) -> None:
        self.seconds, self.clock = seconds, clock

    def get_priority(self, node: TreeNode) -> tuple[bool, float]:
        used = node.last_access_time
        return (node.hit_count > 1 and used > self.clock.now - self.seconds, used)


class PinStrategy(EvictionStrategy):
    """Nodes that end within the first ``tokens`` of their prompts go after everything else.

    What prompts share is a node of its own, so their instructions are one.
    """

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens

    def get_priority(self, node: TreeNode) -> tuple[bool, float]:
        end, above = 0, node
        while above.parent is not None and end <= self.tokens:
            end, above = end + len(above.key), above.parent
        return (end <= self.tokens, node.last_access_time)


def own_strategy(spec: str) -> EvictionStrategy:
    """The strategy that ``pkg.module:Class`` makes.

    Raises:
        InvalidArgument: it does not import, or what it makes has no ``get_priority``.
    """
    module, _, name = spec.partition(":")
    try:
        made: EvictionStrategy = getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise InvalidArgument(f"policy {spec!r}: {error!r}") from error
    if not callable(getattr(made, "get_priority", None)):
        raise InvalidArgument(f"policy {spec!r}: expected a class with get_priority(node)")
    return made


def strategy_of(config: ReplayConfig, clock: TraceClock | None) -> EvictionStrategy | None:
    """What ``config.policy`` asks for; None: one of the tree's own, by its name.

    Raises:
        InvalidArgument: see :func:`own_strategy`.
    """
    if ":" in config.policy:
        return own_strategy(config.policy)
    kept = kept_by(config.policy)
    if kept is None:
        return None
    name, amount = kept
    if name == "pin":
        return PinStrategy(amount)
    assert clock is not None  # the configuration asks for arrivals
    return TTLStrategy(amount, clock) if name == "ttl" else RetainStrategy(amount, clock)
