"""``RadixTree``: the prefix tree itself: nodes, matching, inserting, splitting, accounting.

A radix tree over page-aligned keys. :class:`refcache.tree.radix_cache.RadixCache` adds what a cache
does with it: locks, eviction, requests.
"""

from dataclasses import fields, replace

import torch

from refcache.arguments import shown, slot_list, slots_inside, truth, whole_number, with_attributes
from refcache.errors import ForeignNode, InvalidArgument, InvalidSlot, UnknownName
from refcache.events import KVCacheEvent
from refcache.keys import RadixKey
from refcache.tree.insert_plan import Halves, InsertPlan, MatchPlan
from refcache.tree.kv_events import EventLog
from refcache.tree.node import TreeNode
from refcache.types import (
    HIT_POLICIES,
    CacheInitParams,
    InsertParams,
    InsertResult,
    LogicalClock,
    MatchPrefixParams,
    MatchResult,
)


class RadixTree:
    """See the module docstring.

    Attributes:
        root_node: the empty prefix; always locked.
        evictable_leaves: device-resident, unlocked, without a device-resident child.

    Raises:
        UnknownName: a hit policy that does not exist.
        InvalidArgument: page size below 1, or a time to live.
    """

    node_class = TreeNode

    def __init__(self, params: CacheInitParams) -> None:
        whole_number("page_size", params.page_size, 1)
        if params.hit_policy not in HIT_POLICIES:
            raise UnknownName("hit policy", params.hit_policy, HIT_POLICIES)
        if params.cache_ttl_seconds is not None:
            raise InvalidArgument(
                f"cache_ttl_seconds={params.cache_ttl_seconds}: expected None, nothing expires here"
            )
        self.disable = params.disable
        self.page_size = params.page_size
        self.is_eagle = params.is_eagle
        self.hit_policy = params.hit_policy
        self.clock = params.clock or LogicalClock()
        self.token_to_kv_pool_allocator = allocator = params.token_to_kv_pool_allocator
        device = "cpu" if allocator is None else allocator.device
        self.device: torch.device = torch.device(device) if isinstance(device, str) else device
        self.enable_kv_cache_events = params.enable_kv_cache_events
        self.events = EventLog(params.page_size, params.enable_kv_cache_events)
        self.reset()

    # ---- state ---------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything. The allocator is the caller's to clear."""
        self._plant(self._new_root())

    def _new_root(self) -> TreeNode:
        root = self.node_class(0, now=self.clock(), key=RadixKey([]))
        root.value = torch.empty(0, dtype=torch.int64)
        root.hash_value = []
        root.lock_ref = 1
        return root

    def _plant(self, root: TreeNode) -> None:
        """An empty tree from this root."""
        self.root_node = root
        self._next_id = 1
        self.evictable_size_ = 0
        self.protected_size_ = 0
        self.evictable_leaves: set[TreeNode] = set()
        self.events.cleared()

    def evictable_size(self) -> int:
        """Tokens on the device that nobody has locked."""
        return self.evictable_size_

    def protected_size(self) -> int:
        """Tokens on the device that somebody has locked."""
        return self.protected_size_

    def full_evictable_size(self) -> int:
        """As ``evictable_size``: every layer attends to all tokens."""
        return self.evictable_size()

    def full_protected_size(self) -> int:
        """As ``protected_size``."""
        return self.protected_size()

    def swa_evictable_size(self) -> int:
        """No sliding window: 0."""
        return 0

    def swa_protected_size(self) -> int:
        """No sliding window: 0."""
        return 0

    def available_and_evictable_str(self) -> str:
        """What an allocation can have, in words, for a message."""
        available_size = self.token_to_kv_pool_allocator.available_size()
        evictable_size = self.evictable_size()
        both = available_size + evictable_size
        return f"Available tokens: {both} ({available_size=} + {evictable_size=})\n"

    def supports_swa(self) -> bool:
        """No layer with a sliding window."""
        return False

    def supports_mamba(self) -> bool:
        """No layer with a recurrent state."""
        return False

    def is_chunk_cache(self) -> bool:
        """A tree, not the cache that only holds the chunks of running prompts."""
        return False

    def is_tree_cache(self) -> bool:
        """A tree."""
        return True

    def total_size(self) -> int:
        """Tokens on the device, counted in the tree."""
        return sum(len(node.key) for node in self.nodes() if not node.evicted)

    def nodes(self, below: TreeNode | None = None) -> list[TreeNode]:
        """Every node below that one (the root by default), parents before children."""
        found: list[TreeNode] = []
        below = self.root_node if below is None else below
        with_attributes("nodes", below, "children")
        stack = list(below.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack.extend(node.children.values())
        return found

    def all_values_flatten(self) -> torch.Tensor:
        """Every device slot the tree owns, int64."""
        values = [node.value for node in self.nodes() if node.value is not None]
        return torch.cat(values) if values else self._no_slots()

    @property
    def kv_event_queue(self) -> list[KVCacheEvent]:
        """The KV events that nobody has taken yet."""
        return self.events.queue

    def take_events(self) -> list[KVCacheEvent]:
        """The KV events since the last call; empty unless ``enable_kv_cache_events``."""
        return self.events.take()

    def pretty_print(self) -> None:
        """Print the tree, a node a line."""
        stack = [(self.root_node, 0)]
        while stack:
            node, depth = stack.pop()
            print("  " * depth + (self._describe(node) if depth else "root"))
            stack.extend((child, depth + 1) for child in reversed(node.children.values()))
        print(f"{self.total_size()} tokens")

    # ---- match and insert ----------------------------------------------------------------------

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """The longest cached prefix of ``params.key``, in whole pages.

        Refreshes the access time of the path; may split one node. See :class:`MatchResult` for how
        long the slots stay valid.
        """
        with_attributes("match_prefix", params, "key")
        key, _ = self.maybe_bigram_convert(params.key)
        key = key.page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return MatchResult(self._no_slots(), self.root_node, self.root_node)
        return self._match_result(*self._match_prefix_helper(self.root_node, key))

    def insert(self, params: InsertParams) -> InsertResult:
        """Cache ``params.key``; adopt the slots of the part that was not cached yet.

        The slots ``value[:prefix_len]`` were in the tree already (as others): they stay the
        caller's. The tree copies what it adopts. Without a value, which is for trying things out,
        the slots are the numbers of the tokens, and the whole pages of the key are cached.
        ``priority`` None is 0.

        Raises:
            InvalidArgument: a key not in whole pages, a value of another length or that is not
                integers, or a recurrent state (``mamba_value``), which this tree does not keep.
        """
        with_attributes("insert", params, *(field.name for field in fields(InsertParams)))
        if params.mamba_value is not None:
            raise InvalidArgument("insert of a mamba_value: expected None, it would be lost")
        if self.disable:
            return InsertResult(prefix_len=0)
        self._check_slots(params.value)
        plan = self._plan_insert(params)
        return InsertResult(self._insert_helper(plan))

    def maybe_bigram_convert(
        self, key: RadixKey, value: torch.Tensor | None = None
    ) -> tuple[RadixKey, torch.Tensor | None]:
        """For EAGLE: the bigram view of a token key, and as many of the slots."""
        if not isinstance(key, RadixKey):
            raise InvalidArgument(f"key {shown(key)}: expected a RadixKey")
        if self.is_eagle and not key.is_bigram:
            key = RadixKey(key.raw_token_ids(), key.extra_key, is_bigram=True)
            value = None if value is None else value[: len(key)]
        return key, value

    def _match_result(self, slots: torch.Tensor, node: TreeNode) -> MatchResult:
        return MatchResult(slots, node, node)

    def _walk(self, node: TreeNode, key: RadixKey) -> tuple[list[TreeNode], int, RadixKey]:
        """Where ``key`` leads from ``node``: the nodes that it enters, how far it gets into the
        last one, and what is left of it."""
        path: list[TreeNode] = []
        common = 0
        while len(key):
            child = node.children.get(key.child_key(self.page_size))
            if child is None:
                break
            common = child.key.match(key, self.page_size)
            path.append(child)
            key = key[common:]
            if common < len(child.key):
                break
            node = child
        return path, common, key

    def _match_prefix_helper(self, node: TreeNode, key: RadixKey) -> tuple[torch.Tensor, TreeNode]:
        return self._match(self._plan_match(node, key))

    def _plan_match(self, node: TreeNode, key: RadixKey) -> MatchPlan:
        """Where ``key`` leads from ``node``, with nothing changed yet."""
        entered, common, _ = self._walk(node, key)
        now = self.clock()
        halves = self._halve(entered[-1], common) if entered else None
        path = entered if halves is None else [*entered[:-1], halves.upper]
        found = self._usable(path)
        values = [step.value for step in found if step.value is not None]
        slots = torch.cat(values) if values else self._no_slots()
        return MatchPlan(now, halves, [node, *entered], path, found, slots)

    def _match(self, plan: MatchPlan) -> tuple[torch.Tensor, TreeNode]:
        """Carry a plan out; returns the slots, and the last node that was found."""
        if plan.halves is not None:
            self._split_node(plan.halves)
        self._refresh(plan.entered, plan.found, plan.now)
        return plan.slots, plan.found[-1] if plan.found else plan.entered[0]

    def _usable(self, path: list[TreeNode]) -> list[TreeNode]:
        """The part of a path behind whose end a request can go on: all, if KV is what it needs."""
        return path

    def _refresh(self, entered: list[TreeNode], found: list[TreeNode], now: float) -> None:
        """A key has entered these nodes, and found some of them: all that it entered are recent."""
        for node in entered:
            node.last_access_time = now

    def _plan_insert(self, params: InsertParams) -> InsertPlan:
        """Everything an insert needs, with nothing changed yet. Raises as :meth:`insert`."""
        key, value = self.maybe_bigram_convert(params.key, params.value)
        if value is None:
            key = key.page_aligned(self.page_size)
            value = torch.tensor(list(key.raw_token_ids()), dtype=torch.int64)[: len(key)]
        # a tree without an allocator hands its slots to nobody: they may be anything
        slots = self.token_to_kv_pool_allocator is None and isinstance(value, torch.Tensor)
        if slots and value.dim() == 1:
            value = value.to(torch.int64)
        slot_list("insert", value)
        if len(key) % self.page_size or len(value) != len(key):
            raise InvalidArgument(
                f"insert of {len(key)} tokens with {len(value)} slots: expected as many, "
                f"in whole pages of {self.page_size}"
            )
        priority = 0 if params.priority is None else whole_number("priority", params.priority, None)
        whole_number("counted_len", params.counted_len)
        truth("chunked", params.chunked)
        path, common, rest = self._walk(self.root_node, key)
        now = self.clock()
        halves = self._halve(path[-1], common) if path else None
        if halves is not None:
            path[-1] = halves.upper
        own: list[torch.Tensor | None] = []
        start = 0
        for node in path:
            end = start + len(node.key)
            own.append(value[start:end].to(torch.int64, copy=True) if node.evicted else None)
            start = end
        leaf = None
        if len(rest):
            leaf = self._new_leaf(
                path[-1] if path else self.root_node, rest, value[start:], priority
            )
        self.events.prepare([*path, *([leaf] if leaf else [])])
        params = replace(params, key=key)
        return InsertPlan(params, priority, now, halves, path, own, leaf, value)

    def _check_slots(self, value: torch.Tensor | None) -> None:
        """The slots of an insert are whole pages of the allocator's, each once.

        Of slots on the CPU only: to read others the host would wait.
        """
        last, size = getattr(self.token_to_kv_pool_allocator, "size", None), self.page_size
        if not isinstance(last, int) or value is None:
            return
        slots = slot_list("insert", value)
        if slots.device.type != "cpu" or len(slots) % size:
            return
        slots_inside("insert of slots", slots, size, last + size)
        pages = slots.to(torch.int64).view(-1, size)
        first = pages[:, 0]
        whole = torch.equal(pages, first[:, None] + torch.arange(size))
        if not whole or bool((first % size).any()) or len(torch.unique(first)) < len(first):
            raise InvalidSlot(f"insert of slots {shown(slots.tolist())}: expected pages, each once")

    def _insert_helper(self, plan: InsertPlan) -> int:
        """Carry a plan out; returns how many tokens were on the device before."""
        params, priority = plan.params, plan.priority
        entered = plan.path
        if plan.halves is not None:
            entered = [*plan.path[:-1], plan.halves.child]
        self._refresh([self.root_node, *entered], entered, plan.now)
        if plan.halves is not None:
            self._split_node(plan.halves)
        for node in (self.root_node, *plan.path):
            node.priority = max(node.priority, priority)
        resident = done = 0
        for node, own in zip(plan.path, plan.own, strict=True):
            done += len(node.key)
            resident += self._pass(node, own, params, done)
        if plan.leaf is not None:
            self._add_child(plan.leaf, params, done + len(plan.leaf.key))
        self._visited(plan)
        return resident

    def _pass(
        self, node: TreeNode, own: torch.Tensor | None, params: InsertParams, done: int
    ) -> int:
        """An insert passes a whole node that ends ``done`` tokens from the root.

        ``own``: the slots it takes over, if it is not on the device. Returns how many of its tokens
        were on the device before.
        """
        self._inc_hit_count(node, params, done)
        return len(node.key)

    def _visited(self, plan: InsertPlan) -> None:
        """An insert is done."""

    def _new_leaf(
        self, parent: TreeNode, key: RadixKey, value: torch.Tensor, priority: int
    ) -> TreeNode:
        """A node with these slots (copied) that knows its parent, but not the other way round."""
        leaf = self._new_node(key, priority)
        leaf.value = value.to(torch.int64, copy=True)
        leaf.parent = parent
        return leaf

    def _add_child(self, leaf: TreeNode, params: InsertParams, done: int) -> None:
        parent = self._parent(leaf)
        parent.children[leaf.key.child_key(self.page_size)] = leaf
        self.evictable_size_ += len(leaf.key)
        self._update_leaf_status(leaf)
        self._update_leaf_status(parent)
        self.events.stored(leaf)
        self._inc_hit_count(leaf, params, done)

    def _inc_hit_count(self, node: TreeNode, params: InsertParams, done: int) -> None:
        """Count a visit, as the hit policy says (``HIT_POLICIES``)."""
        if params.chunked and self.hit_policy != "chunks_count":
            return
        if self.hit_policy == "per_request" and done <= params.counted_len:
            return
        node.hit_count += 1

    def _halve(self, child: TreeNode, split_len: int) -> Halves | None:
        """``child``, to be cut after ``split_len`` tokens; None when that is all of it."""
        if split_len == len(child.key):
            return None
        upper = self._new_node(child.key[:split_len], child.priority)
        upper.hit_count = child.hit_count
        upper.lock_ref = child.lock_ref
        upper.host_ref_counter = child.host_ref_counter
        upper.parent = child.parent
        upper.value, value = _cut(child.value, split_len)
        upper.host_value, host_value = _cut(child.host_value, split_len)
        hashes = child.hash_value
        if hashes is not None:
            pages = split_len // self.page_size
            upper.hash_value, hashes = hashes[:pages], hashes[pages:]
        return Halves(child, upper, child.key[split_len:], value, host_value, hashes)

    def _split_node(self, halves: Halves) -> TreeNode:
        """Cut a node; returns the new upper half."""
        child, upper = halves.child, halves.upper
        self._parent(upper).children[child.key.child_key(self.page_size)] = upper
        child.parent = upper
        child.key, child.value, child.host_value, child.hash_value = halves[2:]
        upper.children[child.key.child_key(self.page_size)] = child
        return upper

    # ---- helpers -------------------------------------------------------------------------------

    def _new_node(self, key: RadixKey, priority: int = 0) -> TreeNode:
        node = self.node_class(self._next_id, priority, self.clock(), key)
        self._next_id += 1
        return node

    def _no_slots(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.device)

    def _path(self, node: TreeNode) -> list[TreeNode]:
        """The node and its ancestors without the root."""
        if not isinstance(node, TreeNode):
            raise ForeignNode(f"{shown(node)}: expected a node of this tree")
        path: list[TreeNode] = []
        step: TreeNode | None = node
        while step is not None and step is not self.root_node:
            path.append(step)
            step = step.parent
        if step is None:
            raise ForeignNode(f"{node} is not in this tree")
        return path

    def _parent(self, node: TreeNode) -> TreeNode:
        if not isinstance(node, TreeNode) or node.parent is None:
            raise ForeignNode(f"{node} has no parent: expected a node of this tree, not its root")
        return node.parent

    def _unlink(self, node: TreeNode) -> None:
        """Take a leaf out of the tree."""
        parent = self._parent(node)
        del parent.children[node.key.child_key(self.page_size)]
        node.parent = None
        self.evictable_leaves.discard(node)
        self._update_leaf_status(parent)

    def _update_leaf_status(self, node: TreeNode) -> None:
        if (
            node.evicted
            or node.lock_ref > 0
            or any(not child.evicted for child in node.children.values())
        ):
            self.evictable_leaves.discard(node)
        else:
            self.evictable_leaves.add(node)

    def _describe(self, node: TreeNode) -> str:
        tokens = list(node.key)[:10]
        text = f"node {node.id}: {len(node.key)} tokens {tokens}, lock {node.lock_ref}"
        text += f", hits {node.hit_count}"
        for tier, slots in (("device", node.value), ("host", node.host_value)):
            text += "" if slots is None else f", {tier} {slots[:10].tolist()}"
        return text if node.key.extra_key is None else f"{text}, namespace {node.key.extra_key!r}"


def _cut(slots: torch.Tensor | None, at: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if slots is None else (slots[:at].clone(), slots[at:].clone())
