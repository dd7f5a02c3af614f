"""``RadixTree``: the prefix tree itself: nodes, matching, inserting, splitting, accounting.

A radix tree over page-aligned keys. :class:`refcache.tree.radix_cache.RadixCache` adds what a cache
does with it: locks, eviction, requests.
"""

import torch

from refcache.errors import ForeignNode, InvalidArgument, UnknownName
from refcache.events import KVCacheEvent
from refcache.keys import RadixKey
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

    def __init__(self, params: CacheInitParams) -> None:
        if params.page_size < 1:
            raise InvalidArgument(f"page_size={params.page_size}: expected at least 1")
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
        self._next_id = 0
        self.root_node = self._new_node(RadixKey([]))
        self.root_node.value = torch.empty(0, dtype=torch.int64)
        self.root_node.hash_value = []
        self.root_node.lock_ref = 1
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

    def nodes(self) -> list[TreeNode]:
        """Every node but the root, parents before children."""
        found: list[TreeNode] = []
        stack = list(self.root_node.children.values())
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
        key, _ = self.maybe_bigram_convert(params.key)
        key = key.page_aligned(self.page_size)
        if self.disable or len(key) == 0:
            return MatchResult(self._no_slots(), self.root_node, self.root_node)
        values, node = self._match_prefix_helper(self.root_node, key)
        slots = torch.cat(values) if values else self._no_slots()
        return self._match_result(slots, node)

    def insert(self, params: InsertParams) -> InsertResult:
        """Cache ``params.key``; adopt the slots of the part that was not cached yet.

        The slots ``value[:prefix_len]`` were in the tree already (as others): they stay the
        caller's. The tree copies what it adopts. Without a value, which is for trying things out,
        the slots are the numbers of the tokens, and the whole pages of the key are cached.

        Raises:
            InvalidArgument: a key not in whole pages, a value of another length, or a recurrent
                state (``mamba_value``), which this tree does not keep.
        """
        if params.mamba_value is not None:
            raise InvalidArgument("insert of a mamba_value: expected None, it would be lost")
        if self.disable:
            return InsertResult(prefix_len=0)
        key, value = self.maybe_bigram_convert(params.key, params.value)
        if value is None:
            key = key.page_aligned(self.page_size)
            value = torch.tensor(list(key.raw_token_ids()), dtype=torch.int64)[: len(key)]
        if len(key) % self.page_size or len(value) != len(key):
            raise InvalidArgument(
                f"insert of {len(key)} tokens with {len(value)} slots: expected as many, "
                f"in whole pages of {self.page_size}"
            )
        return InsertResult(self._insert_helper(self.root_node, key, value, params))

    def maybe_bigram_convert(
        self, key: RadixKey, value: torch.Tensor | None = None
    ) -> tuple[RadixKey, torch.Tensor | None]:
        """For EAGLE: the bigram view of a token key, and as many of the slots."""
        if self.is_eagle and not key.is_bigram:
            key = RadixKey(key.raw_token_ids(), key.extra_key, is_bigram=True)
            value = None if value is None else value[: len(key)]
        return key, value

    def _match_result(self, slots: torch.Tensor, node: TreeNode) -> MatchResult:
        return MatchResult(slots, node, node)

    def _match_prefix_helper(
        self, node: TreeNode, key: RadixKey
    ) -> tuple[list[torch.Tensor], TreeNode]:
        now = self.clock()
        node.last_access_time = now
        values: list[torch.Tensor] = []
        while len(key):
            child = node.children.get(key.child_key(self.page_size))
            if child is None:
                break
            child.last_access_time = now
            common = child.key.match(key, self.page_size)
            node = child if common == len(child.key) else self._split_node(child, common)
            if node.value is not None:
                values.append(node.value)
            if node is not child:
                break
            key = key[common:]
        return values, node

    def _insert_helper(
        self, node: TreeNode, key: RadixKey, value: torch.Tensor, params: InsertParams
    ) -> int:
        now = self.clock()
        node.last_access_time = now
        node.priority = max(node.priority, params.priority)
        resident = 0
        done = 0
        while len(key):
            child = node.children.get(key.child_key(self.page_size))
            if child is None:
                break
            child.last_access_time = now
            common = child.key.match(key, self.page_size)
            node = child if common == len(child.key) else self._split_node(child, common)
            node.priority = max(node.priority, params.priority)
            done += common
            resident += self._pass(node, value[:common], params, done)
            key, value = key[common:], value[common:]
        if len(key):
            self._add_child(node, key, value, params, done + len(key))
        return resident

    def _pass(self, node: TreeNode, value: torch.Tensor, params: InsertParams, done: int) -> int:
        """An insert passes a whole node that ends ``done`` tokens from the root.

        Returns how many of its tokens were on the device before.
        """
        self._inc_hit_count(node, params, done)
        return len(node.key)

    def _add_child(
        self, parent: TreeNode, key: RadixKey, value: torch.Tensor, params: InsertParams, done: int
    ) -> TreeNode:
        node = self._new_node(key, params.priority)
        node.parent = parent
        node.value = value.to(torch.int64, copy=True)
        parent.children[key.child_key(self.page_size)] = node
        self.evictable_size_ += len(key)
        self._update_leaf_status(node)
        self._update_leaf_status(parent)
        self.events.stored(node)
        self._inc_hit_count(node, params, done)
        return node

    def _inc_hit_count(self, node: TreeNode, params: InsertParams, done: int) -> None:
        """Count a visit, as the hit policy says (``HIT_POLICIES``)."""
        if params.chunked and self.hit_policy != "chunks_count":
            return
        if self.hit_policy == "per_request" and done <= params.counted_len:
            return
        node.hit_count += 1

    def _split_node(self, child: TreeNode, split_len: int) -> TreeNode:
        """Cut ``child`` after ``split_len`` tokens; returns the new upper half."""
        upper = self._new_node(child.key[:split_len], child.priority)
        upper.hit_count = child.hit_count
        upper.lock_ref = child.lock_ref
        upper.host_ref_counter = child.host_ref_counter
        upper.parent = child.parent
        if child.value is not None:
            upper.value, child.value = (
                child.value[:split_len].clone(),
                child.value[split_len:].clone(),
            )
        if child.host_value is not None:
            upper.host_value = child.host_value[:split_len].clone()
            child.host_value = child.host_value[split_len:].clone()
        if child.hash_value is not None:
            pages = split_len // self.page_size
            upper.hash_value, child.hash_value = child.hash_value[:pages], child.hash_value[pages:]
        assert upper.parent is not None
        upper.parent.children[child.key.child_key(self.page_size)] = upper
        child.parent = upper
        child.key = child.key[split_len:]
        upper.children[child.key.child_key(self.page_size)] = child
        return upper

    # ---- helpers -------------------------------------------------------------------------------

    def _new_node(self, key: RadixKey, priority: int = 0) -> TreeNode:
        node = TreeNode(self._next_id, priority, self.clock(), key)
        self._next_id += 1
        return node

    def _no_slots(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.device)

    def _path(self, node: TreeNode) -> list[TreeNode]:
        """The node and its ancestors without the root."""
        path: list[TreeNode] = []
        step: TreeNode | None = node
        while step is not None and step is not self.root_node:
            path.append(step)
            step = step.parent
        if step is None:
            raise ForeignNode(f"{node} is not in this tree")
        return path

    def _unlink(self, node: TreeNode) -> None:
        """Take a leaf out of the tree."""
        parent = node.parent
        assert parent is not None
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
