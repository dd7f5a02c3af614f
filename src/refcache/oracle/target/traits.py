"""What a target says of itself, as data: the suites draw within it, and the rules follow it."""

from dataclasses import dataclass
from typing import Literal

from refcache.errors import InvalidArgument

When = Literal["computed", "finished"]


@dataclass(frozen=True)
class Traits:
    """Traits of a cache. The defaults say the least: what no cache is blamed for.

    Attributes:
        page_sizes: tokens a page that it can be built with.
        namespaces: whether prefixes are told apart by namespace (adapter, salt).
        eagle: whether ``is_eagle`` keys by pairs of tokens. None: not said; the tree's suites draw
            it, those of sequences do not.
        caches_when: from when on a prefix is found again for certain: when it is ``"computed"``, or
            only when its sequence is ``"finished"``.
        merges_duplicates: a running sequence's table may change to pages that hold the same KV.
        alloc_evicts: an allocation takes pages that are cached and used by nobody. If not, a
            refusal while such pages may exist is legal.
        abort_is_cached: what an aborted sequence was still computing may be found.
        dummy_page: a page number that is never handed out, or None; with None pages count from 0.
        slot_dtype: of the slots that an allocator gives: ``"int64"`` or ``"int32"``.
        loses_children: a cached page may outlive the page before it, which makes it unreachable.
        forgets_duplicates: of two pages with the same KV, the end of one may take away what the
            other is found by.
        windows: the sliding window of each group of layers in tokens, None for full attention. With
            more than one group, ``table`` gives one table a group, and a page belongs to one group.
        host_tier: whether :meth:`Target.sequences` can build a cache with ``host_size``.
    """

    page_sizes: tuple[int, ...] = (1, 2, 4)
    namespaces: bool = True
    eagle: bool | None = None
    caches_when: When = "finished"
    merges_duplicates: bool = False
    alloc_evicts: bool = True
    abort_is_cached: bool = False
    dummy_page: int | None = 0
    slot_dtype: str = "int64"
    loses_children: bool = False
    forgets_duplicates: bool = False
    windows: tuple[int | None, ...] = (None,)
    host_tier: bool = False

    def __post_init__(self) -> None:
        if not self.page_sizes or any(size < 1 for size in self.page_sizes):
            raise InvalidArgument(f"page_sizes={self.page_sizes}: expected sizes of 1 or more")
        if self.caches_when not in ("computed", "finished"):
            raise InvalidArgument(
                f"caches_when={self.caches_when!r}: expected 'computed' or 'finished'"
            )
        if self.slot_dtype not in ("int64", "int32"):
            raise InvalidArgument(f"slot_dtype={self.slot_dtype!r}: expected 'int64' or 'int32'")
        if not self.windows or any(w is not None and w < 1 for w in self.windows):
            raise InvalidArgument(f"windows={self.windows}: expected None, or 1 and more, a group")
