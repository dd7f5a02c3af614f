"""A radix cache of one's own, over refcache's allocators; judge it with

refcache check my_radix_cache:MyTarget
"""

from itertools import count

import torch

from refcache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.keys import RadixKey
from refcache.oracle import Target
from refcache.types import (
    DecLockRefResult,
    EvictResult,
    IncLockRefResult,
    InsertResult,
    MatchResult,
)


class Node:
    """A run of pages: ``key`` has an element for each slot, children go by namespace and page."""

    def __init__(self, parent, space, key, slots):
        self.parent, self.space, self.key, self.slots = parent, space, key, slots
        self.children, self.locks, self.used = {}, 0, 0


class MyRadixCache:
    """SGLang's names and arguments; everything else is ours."""

    disable = False

    def __init__(self, config, allocator, rows):
        self.page_size, self.is_eagle = config.page_size, config.is_eagle
        self.token_to_kv_pool_allocator, self.req_to_token_pool = allocator, rows
        self.clock = count(1)
        self.reset()

    def reset(self):
        self.root_node = Node(None, None, (), torch.empty(0, dtype=torch.int64))

    # ---- the tree ----

    def elements(self, key):
        """What is matched: tokens, or pairs of them under EAGLE; whole pages only."""
        found = tuple(RadixKey(key.token_ids, key.extra_key, self.is_eagle))
        return found[: len(found) // self.page_size * self.page_size]

    def file(self, node):
        node.parent.children[node.space, node.key[: self.page_size]] = node

    def walk(self, space, key):
        """The last node on the path of ``key``, split where they part, and the length so far."""
        node, end, size = self.root_node, 0, self.page_size
        while child := node.children.get((space, key[end : end + size])):
            whole, same = len(child.key), size
            while same < whole and child.key[same : same + size] == key[end + same :][:size]:
                same += size
            node, end = self.split(child, same), end + same
            node.used = next(self.clock)
        return node, end

    def split(self, node, at):
        if at == len(node.key):
            return node
        upper = Node(node.parent, node.space, node.key[:at], node.slots[:at])
        upper.locks = node.locks
        node.parent, node.key, node.slots = upper, node.key[at:], node.slots[at:]
        self.file(upper)
        self.file(node)
        return upper

    def nodes(self):
        stack = [*self.root_node.children.values()]
        while stack:
            yield (node := stack.pop())
            stack += node.children.values()

    def match_prefix(self, params):
        last, _ = self.walk(params.key.extra_key, self.elements(params.key))
        return MatchResult(self.slots_to(last), last, last)

    def slots_to(self, node):
        path = []
        while node is not None:
            path.append(node.slots)
            node = node.parent
        return torch.cat(path[::-1])

    def insert(self, params):
        return InsertResult(self.add(params.key.extra_key, self.elements(params.key), params.value))

    def add(self, space, key, slots):
        node, known = self.walk(space, key)
        if known < len(key):
            leaf = Node(node, space, key[known:], slots[known : len(key)].clone())
            leaf.used = next(self.clock)
            self.file(leaf)
        return known

    def evict(self, params):
        freed = 0
        while freed < params.num_tokens:
            leaves = [n for n in self.nodes() if not n.children and not n.locks]
            if not leaves:
                break
            victim = min(leaves, key=lambda n: n.used)
            self.token_to_kv_pool_allocator.free(victim.slots)
            del victim.parent.children[victim.space, victim.key[: self.page_size]]
            freed += len(victim.slots)
        return EvictResult(freed)

    # ---- locks and sizes ----

    def inc_lock_ref(self, node):
        return IncLockRefResult(-self.lock(node, 1))

    def dec_lock_ref(self, node, params=None):
        return DecLockRefResult(self.lock(node, -1))

    def lock(self, node, by):
        """Lock or unlock a path; how many tokens were not locked before, or are not any more."""
        changed = 0
        while node.parent is not None:
            changed += len(node.key) if 0 in (node.locks, node.locks + by) else 0
            node.locks += by
            node = node.parent
        return changed

    def evictable_size(self):
        return sum(len(n.key) for n in self.nodes() if not n.locks)

    def protected_size(self):
        return sum(len(n.key) for n in self.nodes() if n.locks)

    def total_size(self):
        return sum(len(n.key) for n in self.nodes())

    # ---- requests ----

    def cache_finished_req(self, req, is_insert=True):
        key, slots = self.computed(req, req.pop_committed_kv_cache())
        known = self.add(req.extra_key, key, slots) if is_insert else len(key)
        ours = torch.cat([slots[req.cache_protected_len : known], slots[len(key) :]])
        self.token_to_kv_pool_allocator.free(ours)
        self.dec_lock_ref(req.last_node)

    def cache_unfinished_req(self, req, chunked=False):
        key, slots = self.computed(req, len(req.fill_ids))
        known = self.add(req.extra_key, key, slots)
        self.token_to_kv_pool_allocator.free(slots[req.cache_protected_len : known])
        last, _ = self.walk(req.extra_key, key)
        cached = self.slots_to(last)
        row = (req.req_pool_idx, slice(req.cache_protected_len, len(key)))
        self.req_to_token_pool.write(row, cached[req.cache_protected_len :])
        self.inc_lock_ref(last)
        self.dec_lock_ref(req.last_node)
        req.prefix_indices = torch.cat([cached, slots[len(key) :]])
        req.cache_protected_len, req.last_node = len(key), last

    def computed(self, req, length):
        """The elements of a request's first ``length`` tokens, and their slots."""
        tokens = (req.origin_input_ids + req.output_ids)[:length]
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, :length]
        return self.elements(RadixKey(tokens, req.extra_key)), row.to(torch.int64)


class MyTarget(Target):
    """How refcache makes one."""

    name = "mine"
    capabilities = frozenset({"allocator", "tree"})

    def allocator(self, config):
        if config.page_size == 1:
            return TokenToKVPoolAllocator(config.size, torch.int64, "cpu", None, False)
        return PagedTokenToKVPoolAllocator(
            config.size, config.page_size, torch.int64, "cpu", None, False
        )

    def tree(self, config, allocator, req_to_token_pool):
        return MyRadixCache(config, allocator, req_to_token_pool)
