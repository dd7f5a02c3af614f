"""The state's part of a replay's checks: sums after every step, every rule now and then.

At replay sizes (tens of thousands of pages) exact ownership is a mask over pages instead of lists,
and a check of every rule comes so rarely that its cost, spread over the steps, does not grow with
the cache.
"""

from typing import Any

import torch

from refcache.engine.hybrid import supports_mamba, supports_swa
from refcache.engine.scheduling.scheduler import Scheduler
from refcache.oracle.rules.check import CHECKS, check_state, check_sums
from refcache.oracle.target.base import Target
from refcache.oracle.view.scheduler import private_tokens, running, state_of
from refcache.oracle.view.state import State
from refcache.oracle.view.tree import inspect_radix
from refcache.tree import HiRadixCache, TreeNode

STATE_EVERY = 256  # steps between two checks of every rule, or
TOKENS_A_STEP = 12_000  # as many as the cached tokens divided by this
OWNERSHIP = ("P0", "P1")


class StateCheck:
    """Checks a scheduler's cache after each step; one that is broken raises a ``Violation``.

    Args:
        mode: "every" (ownership of each page after each step), "sampled" or "off".
        target: whose tree it is; None: the reference's. A target that does not show its nodes
            (``inspect``), or whose free pages are not known, is asked for its sums alone.

    Attributes:
        checked: how often every rule was checked.
    """

    def __init__(self, scheduler: Scheduler, mode: str, target: Target | None = None) -> None:
        self.scheduler = scheduler
        self.tree: Any = scheduler.tree_cache
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.page = scheduler.page_size
        self.size = scheduler.server_args.max_total_tokens or 0
        self.mode = mode
        self.target = target
        self.shown = target is None or (
            "inspect" in target.capabilities and target.free_lists(self.allocator) is not None
        )
        self.shown = self.shown and not (supports_swa(self.tree) or supports_mamba(self.tree))
        self.checked = 0
        self.since = 0

    def after_step(self) -> None:
        if self.mode == "off":
            return
        private = private_tokens(self.scheduler)
        if supports_swa(self.tree) or supports_mamba(self.tree):
            self.hybrid_sums(private)
            return
        evictable, protected = self.tree.evictable_size(), self.tree.protected_size()
        free = self.allocator.available_size()
        check_sums(free, evictable, protected, private, self.size)
        self.since += 1
        if self.since >= max(STATE_EVERY, (evictable + protected) // TOKENS_A_STEP):
            self.every_rule()
        elif self.mode == "every":
            self.ownership()

    def hybrid_sums(self, private: int) -> None:
        """Sums of a hybrid tree: tokens, and states or window slots."""
        tree, allocator = self.tree, self.allocator
        full = tree.full_evictable_size(), tree.full_protected_size()
        reqs = running(self.scheduler)
        if supports_mamba(tree):
            check_sums(allocator.available_size(), *full, private, self.size)
            pool = tree.req_to_token_pool.mamba_pool
            held = len(reqs) * (1 + tree.req_to_token_pool.mamba_ping_pong_track_buffer_size)
            mamba = tree.mamba_evictable_size(), tree.mamba_protected_size()
            check_sums(pool.available_size(), *mamba, held, pool.size)
            return
        check_sums(allocator.full_available_size(), *full, private, self.size)
        gone = sum(max(0, r.swa_evicted_seqlen - r.cache_protected_len) for r in reqs)
        swa = tree.swa_evictable_size(), tree.swa_protected_size()
        check_sums(allocator.swa_available_size(), *swa, private - gone, allocator.size_swa)

    def every_rule(self) -> None:
        """Check every rule now; nothing when switched off or not shown."""
        if self.mode == "off" or not self.shown:
            return
        self.ownership()
        check_state(self.state(), [rule for rule in CHECKS if rule not in OWNERSHIP])
        self.checked += 1
        self.since = 0

    def ownership(self) -> None:
        """P0 and P1: lists, which name the page, only when the mask says that something is off."""
        if self.shown and (self.target is not None or not self.one_owner_each()):
            check_state(self.state(), OWNERSHIP)

    def one_owner_each(self) -> bool:
        """Whether every page has exactly one owner: free, the tree, or one request."""
        table, page = self.scheduler.req_to_token_pool.req_to_token, self.page
        slots = [node.value[::page] for node in self.tree.nodes() if node.value is not None]
        for req in running(self.scheduler):
            own = table[req.req_pool_idx, req.cache_protected_len : req.kv_allocated_len : page]
            slots.append(own.long())
        owners = [self.allocator.free_pages, self.allocator.release_pages]
        if slots:
            owners.append(torch.cat(slots) // page)
        num_pages = self.allocator.num_pages
        owned = torch.zeros(num_pages + 1, dtype=torch.bool)
        for pages in owners:
            if len(pages):
                low, high = pages.aminmax()
                if int(low) < 1 or int(high) > num_pages:
                    return False
                owned[pages] = True
        # as many as there are, and each at least once: each once
        return sum(map(len, owners)) == num_pages and bool(owned[1:].all())

    def transfer_holders(self) -> list[TreeNode]:
        """The nodes that copies in flight have locked."""
        if not isinstance(self.tree, HiRadixCache):
            return []
        copies = [
            *self.tree.ongoing_load_back.values(),
            *self.tree.ongoing_write_through.values(),
        ]
        return [nodes[-1] for nodes in copies]

    def state(self) -> State:
        """What the rules about a state look at."""
        if self.target is not None:
            free = [
                page for pages in self.target.free_lists(self.allocator) or () for page in pages
            ]
            view = self.target.inspect(self.tree)
            return state_of(self.scheduler, view, self.size // self.page, free)
        page = self.page
        return state_of(
            self.scheduler,
            inspect_radix(self.tree, lambda key: key.child_key(page)),
            self.allocator.num_pages,
            torch.cat([self.allocator.free_pages, self.allocator.release_pages]),
            holders=self.transfer_holders(),
        )
