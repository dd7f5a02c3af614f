"""``SchedulePolicy``: the order in which waiting requests are tried.

===============  ===================================================================================
``fcfs``         first come, first served
``lpm``          the longest cached prefix first; a request that shares its start with one before
                 it in the queue, and has little cached, goes last: it will find that one's prefix
``dfs-weight``   depth first through the tree, the branch with the most waiting requests first
``lof``          the longest output first
``random``       shuffled, the same way in every run
``routing-key``  the routing key that most running requests have first
===============  ===================================================================================

With priorities (``enable_priority_scheduling``) ``fcfs`` and ``lof`` serve the highest first.
Models SGLang 0.5.10's class; ``lpm`` counts what is on the host as cached, too.
"""

import random
from collections import Counter, defaultdict
from enum import Enum
from math import inf
from typing import Any

from refcache.engine.req import Req
from refcache.errors import UnknownName
from refcache.keys import RadixKey
from refcache.tree import RadixCache
from refcache.types import SCHEDULE_POLICIES, InsertParams, MatchPrefixParams

LPM_MAX_QUEUE = 128  # longer queues are served first come, first served
IN_BATCH_PREFIX = 32  # tokens: little cached, and much shared, with another request of the queue


class CacheAwarePolicy(Enum):
    """Policies that look prefixes up; without a cache they are ``fcfs``."""

    LPM = "lpm"
    DFS_WEIGHT = "dfs-weight"


class CacheAgnosticPolicy(Enum):
    """Policies that do not."""

    FCFS = "fcfs"
    LOF = "lof"
    RANDOM = "random"
    ROUTING_KEY = "routing-key"


class SchedulePolicy:
    """See the module docstring.

    Attributes:
        policy: the one in use.
        waiting_queue_radix_tree: the prompts of the queue, for what they share.

    Raises:
        UnknownName: no such policy.
    """

    Policy = CacheAwarePolicy | CacheAgnosticPolicy

    def __init__(
        self,
        policy: str,
        tree_cache: Any,
        enable_hierarchical_cache: bool = False,
        enable_priority_scheduling: bool = False,
        schedule_low_priority_values_first: bool = False,
    ) -> None:
        if policy not in SCHEDULE_POLICIES:
            raise UnknownName("schedule_policy", policy, SCHEDULE_POLICIES)
        self.policy: CacheAwarePolicy | CacheAgnosticPolicy = CacheAgnosticPolicy.FCFS
        if policy in {one.value for one in CacheAgnosticPolicy}:
            self.policy = CacheAgnosticPolicy(policy)
        elif not getattr(tree_cache, "disable", False):
            self.policy = CacheAwarePolicy(policy)
        self.tree_cache = tree_cache
        self.enable_hierarchical_cache = enable_hierarchical_cache
        self.enable_priority_scheduling = enable_priority_scheduling
        self.schedule_low_priority_values_first = schedule_low_priority_values_first
        self.priority_sign = 1 if schedule_low_priority_values_first else -1
        self.waiting_queue_radix_tree = RadixCache.create_simulated()
        self._random = random.Random(0)

    def calc_priority(self, waiting_queue: list[Req], running_batch: Any = None) -> bool:
        """Sort in place. Looking a prefix up refreshes its access time.

        Returns:
            Whether prefixes were looked up.
        """
        policy = self.policy
        if policy is CacheAwarePolicy.LPM and len(waiting_queue) > LPM_MAX_QUEUE:
            policy = CacheAgnosticPolicy.FCFS
        if policy is CacheAwarePolicy.LPM:
            self._sort_by_longest_prefix(waiting_queue)
        elif policy is CacheAwarePolicy.DFS_WEIGHT:
            self._sort_by_dfs_weight(waiting_queue)
        elif policy is CacheAgnosticPolicy.RANDOM:
            self._random.shuffle(waiting_queue)
        elif policy is CacheAgnosticPolicy.ROUTING_KEY:
            self._sort_by_routing_key(waiting_queue, running_batch)
        elif policy is CacheAgnosticPolicy.LOF:
            waiting_queue.sort(key=lambda r: (self._priority(r), -r.sampling_params.max_new_tokens))
        elif self.enable_priority_scheduling:
            waiting_queue.sort(
                key=lambda r: (self._priority(r), r.time_stats.wait_queue_entry_time)
            )
        return isinstance(policy, CacheAwarePolicy)

    def _priority(self, req: Req) -> float:
        """The smaller, the sooner; a request without a priority comes last."""
        if not self.enable_priority_scheduling:
            return 0
        return inf if req.priority is None else self.priority_sign * req.priority

    def _sort_by_longest_prefix(self, waiting_queue: list[Req]) -> None:
        self.waiting_queue_radix_tree.reset()
        cached: dict[Req, float] = {}
        for req in waiting_queue:
            req.init_next_round_input(self.tree_cache, cow_mamba=False)
            cached[req] = len(req.prefix_indices) + req.host_hit_length
            if cached[req] <= IN_BATCH_PREFIX:
                key = RadixKey(req.fill_ids, req.extra_key)
                shared = self.waiting_queue_radix_tree.match_prefix(MatchPrefixParams(key))
                if len(shared.device_indices) >= IN_BATCH_PREFIX:
                    cached[req] = -inf
                else:
                    self.waiting_queue_radix_tree.insert(InsertParams(key))
        waiting_queue.sort(key=lambda r: cached[r], reverse=True)

    def _sort_by_dfs_weight(self, waiting_queue: list[Req]) -> None:
        at: dict[Any, list[Req]] = defaultdict(list)
        weight: Counter[Any] = Counter()  # of a node: the requests at it and below
        for req in waiting_queue:
            req.init_next_round_input(self.tree_cache, cow_mamba=False)
            at[req.last_node].append(req)
            node = req.last_node
            while node is not None:
                weight[node] += 1
                node = node.parent
        waiting_queue.clear()
        stack = [(self.tree_cache.root_node, False)]
        while stack:
            node, below_is_done = stack.pop()
            if below_is_done:
                waiting_queue += at[node]
                continue
            stack.append((node, True))
            below = [child for child in node.children.values() if weight[child]]
            below.sort(key=lambda child: -weight[child])
            stack += [(child, False) for child in reversed(below)]

    def _sort_by_routing_key(self, waiting_queue: list[Req], running_batch: Any) -> None:
        running = [] if running_batch is None else running_batch.reqs
        count = Counter(r.routing_key for r in running if r.routing_key)
        if count:
            waiting_queue.sort(
                key=lambda r: (not count[r.routing_key], -count[r.routing_key], r.routing_key or "")
            )
