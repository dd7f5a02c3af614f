"""``HybridRadixCache``: a plain prefix tree whose nodes have more than KV.

What is here is what the components (:mod:`refcache.tree.components`) have a say in; matching,
inserting, cutting and evicting are the plain tree's.

Order of use is counted, node by node: what a call uses, it uses from the root down, so an ancestor
is less recent than what hangs from it. Values that only lengthen a prefix go first.
"""

from collections.abc import Iterable
from dataclasses import replace

from refcache.errors import AmbiguousSize, InvalidArgument, UnknownName
from refcache.tree.components.component import TreeComponent
from refcache.tree.components.node import HybridTreeNode
from refcache.tree.insert_plan import Halves
from refcache.tree.node import TreeNode
from refcache.tree.radix_cache import RadixCache
from refcache.types import (
    HIT_REFRESHES,
    CacheInitParams,
    CacheReq,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
)


class HybridRadixCache(RadixCache):
    """See the module docstring.

    Eviction is by order of use only, and there are no KV events, as in SGLang 0.5.10: an event says
    that KV is cached, which is not yet that a prefix is usable.

    Attributes:
        components: what its nodes have beside their KV.
        hit_refreshes: see :class:`~refcache.types.CacheInitParams`.

    Raises:
        InvalidArgument: an eviction policy other than lru; as :class:`RadixCache`.
        UnknownName: a rule of refreshing that does not exist.
    """

    node_class = HybridTreeNode
    components: tuple[TreeComponent, ...]

    def __init__(self, params: CacheInitParams) -> None:
        """``params.clock`` is not read: the order of use is what counts."""
        if params.eviction_policy.lower() != "lru":
            raise InvalidArgument(
                f"eviction_policy={params.eviction_policy!r} of {type(self).__name__}: expected "
                "'lru', the only order that its components have"
            )
        if params.hit_refreshes not in HIT_REFRESHES:
            raise UnknownName("hit_refreshes", params.hit_refreshes, HIT_REFRESHES)
        self.hit_refreshes = params.hit_refreshes
        super().__init__(replace(params, clock=None, enable_kv_cache_events=False))

    def _new_components(self) -> tuple[TreeComponent, ...]:
        """The components of an empty tree."""
        raise NotImplementedError

    def _new_root(self) -> TreeNode:
        root = super()._new_root()
        assert isinstance(root, HybridTreeNode)
        for component in self._new_components():
            root.component(component.name).lock_ref = 1
        return root

    def _plant(self, root: TreeNode) -> None:
        super()._plant(root)
        self.components = self._new_components()

    # ---- sizes, and what is to be seen -----------------------------------------------------------

    def component(self, name: str) -> TreeComponent:
        """The component of that name, other than ``full``.

        Raises:
            InvalidArgument: there is none.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise InvalidArgument(f"component {name!r}: expected {[c.name for c in self.components]}")

    def least_recent(self, name: str = "full") -> list[TreeNode]:
        """The nodes that have a value of a component, in the order of an eviction."""
        if name == "full":
            return sorted(self.nodes(), key=lambda node: node.last_access_time)
        return list(self.component(name).lru)

    def evictable_size(self) -> int:
        """There is one for each component.

        Raises:
            AmbiguousSize: always.
        """
        raise self._ambiguous("evictable_size")

    def protected_size(self) -> int:
        """As :meth:`evictable_size`."""
        raise self._ambiguous("protected_size")

    def _ambiguous(self, name: str) -> AmbiguousSize:
        kinds = ["full", *(component.name for component in self.components)]
        return AmbiguousSize(f"{name}: expected one of {[f'{kind}_{name}' for kind in kinds]}")

    def full_evictable_size(self) -> int:
        """Tokens whose KV nobody holds."""
        return self.evictable_size_

    def full_protected_size(self) -> int:
        """Tokens whose KV somebody holds."""
        return self.protected_size_

    def available_and_evictable_str(self) -> str:
        """What can be evicted, in words, for a message."""
        sizes = {"full": self.evictable_size_}
        sizes |= {component.name: component.evictable_size for component in self.components}
        return "".join(f"Evictable {name}: {size}\n" for name, size in sizes.items())

    def sanity_check(self) -> None:
        """Refuse accounts of a component that differ from what the nodes have.

        Raises:
            BrokenAccounts: they do.
        """
        for component in self.components:
            component.check(list(self.nodes()))

    def _describe(self, node: TreeNode) -> str:
        text = super()._describe(node)
        for component in self.components:
            data = component.of(node)
            value = "-" if data.value is None else data.value[:10].tolist()
            text += f", {component.name} {value} lock {data.lock_ref}"
        return text

    # ---- match and insert ------------------------------------------------------------------------

    def _usable(self, path: list[TreeNode]) -> list[TreeNode]:
        found = list(path)
        while found and not all(component.usable(found) for component in self.components):
            found.pop()
        return found

    def _refresh(self, entered: list[TreeNode], found: list[TreeNode], now: float) -> None:
        """Only what was found is recent, not what lies beyond it."""
        for node in found:
            node.last_access_time = self.clock()
        for component in self.components:
            used = component.used(found) if self.hit_refreshes == "used" else found
            for node in used:
                component.use(node)

    def _use(self, nodes: Iterable[TreeNode]) -> None:
        """Each of these nodes is the most recent one, in turn."""
        for node in nodes:
            node.last_access_time = self.clock()
            for component in self.components:
                component.use(node)

    def _halve(self, child: TreeNode, split_len: int) -> Halves | None:
        halves = super()._halve(child, split_len)
        if halves is not None:
            for component in self.components:
                component.halve(child, halves.upper)
        return halves

    def _split_node(self, halves: Halves) -> TreeNode:
        upper = super()._split_node(halves)
        for component in self.components:
            component.split(halves.child, upper)
        self._use([upper, halves.child])
        return upper

    def _add_child(self, leaf: TreeNode, params: InsertParams, done: int) -> None:
        super()._add_child(leaf, params, done)
        self._use([leaf])

    def _check_given(self, params: InsertParams) -> None:
        """Refuse a ``prev_prefix_len`` that ends inside a page."""
        before = params.prev_prefix_len
        if before < 0 or before % self.page_size:
            raise InvalidArgument(
                f"insert with prev_prefix_len={before}: expected whole pages of {self.page_size}"
            )

    # ---- lock and evict --------------------------------------------------------------------------

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        """Lock a node: its KV and that of its path, and of each component what a holder needs.

        Raises:
            ForeignNode: the node is not (or no longer) in this tree.
            StaleMatch: a component's value is gone since the match; match again.
        """
        if self.disable:
            return IncLockRefResult()
        path = self._path(node)
        taken = [component.to_lock(path) for component in self.components]
        delta = super().inc_lock_ref(node).delta
        uuids = [c.lock(nodes) for c, nodes in zip(self.components, taken, strict=True)]
        return IncLockRefResult(delta, next((uuid for uuid in uuids if uuid is not None), None))

    def dec_lock_ref(
        self, node: TreeNode, params: DecLockRefParams | None = None
    ) -> DecLockRefResult:
        """Undo one ``inc_lock_ref`` of the same node.

        Raises:
            ForeignNode: the node is not (or no longer) in this tree.
            LockUnderflow: it is not locked.
            InvalidArgument: not the ``swa_uuid_for_lock`` that the lock returned.
        """
        if self.disable:
            return DecLockRefResult()
        given = self._to_unlock(node, params)
        result = super().dec_lock_ref(node)
        for component, nodes in zip(self.components, given, strict=True):
            component.unlock(nodes)
        return result

    def _to_unlock(self, node: TreeNode, params: DecLockRefParams | None) -> list[list[TreeNode]]:
        path = self._locked_path(node)
        uuid = None if params is None else params.swa_uuid_for_lock
        return [list(component.to_unlock(path, uuid)) for component in self.components]

    def _check_lock(self, req: CacheReq) -> None:
        self._to_unlock(req.last_node, None)

    def _hold(self, req: CacheReq, node: TreeNode) -> IncLockRefResult:
        self._refresh([], self._path(node)[::-1], 0.0)
        return super()._hold(req, node)

    def evict(self, params: EvictParams) -> EvictResult:
        """Free leaves until ``num_tokens`` of KV are free; then of each component what is asked.

        A leaf takes all that it has with it, and so do the tombstones that it leaves without
        children. For a component, the least recently used value that nobody holds goes: alone, if
        its node has children.

        Returns how much each pool got, whatever it was asked for.
        """
        if self.disable:
            return EvictResult()
        before = self._sizes()
        super().evict(params)
        for component, held in zip(self.components, before[1:], strict=True):
            left = component.wanted(params, held - self._held(component))
            while left > 0 and (node := component.first_unlocked()) is not None:
                size = self._held(component)
                if node.children:
                    component.evict(node)
                else:
                    self._evict_upwards(node)
                left -= size - self._held(component)
        freed = [was - now for was, now in zip(before, self._sizes(), strict=True)]
        return self._evict_result(*freed)

    def _evict_result(self, tokens: int, of_component: int) -> EvictResult:
        raise NotImplementedError

    def _held(self, component: TreeComponent) -> int:
        return component.evictable_size + component.protected_size

    def _sizes(self) -> list[int]:
        """What the tree has: tokens of KV, and of each component."""
        tokens = self.evictable_size_ + self.protected_size_
        return [tokens, *(self._held(component) for component in self.components)]

    def _evict_upwards(self, leaf: TreeNode) -> tuple[int, TreeNode | None]:
        """A tombstone without children is of no use: it goes as well."""
        tokens, parent = super()._evict_upwards(leaf)
        while parent in self.evictable_leaves and not all(c.holds(parent) for c in self.components):
            freed, parent = super()._evict_upwards(parent)
            tokens += freed
        return tokens, parent

    def _evict_leaf(self, node: TreeNode) -> int:
        tokens = super()._evict_leaf(node)
        for component in self.components:
            component.leave(node)
        return tokens
