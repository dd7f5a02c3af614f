"""N1 and N2: the KV events, replayed.

Events carry hashes, and what is hashed is the implementation's business. But each store names the
page before it, so the prefix of every page follows from the events alone, and can be compared with
what the ledger knows is cached.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from refcache.oracle.ledger.ledger import Ledger
from refcache.oracle.rules.violation import Violation
from refcache.oracle.view.tree import TreeView


class EventReplay:
    """Applies events to an empty set. ``resident``: hash of each cached page, to its elements.

    ``above``: the replay of the tier above, where a page's parent may be instead (a write-back
    stores a page before its parent). ``orphans``: a page may be stored whose parent has gone.
    """

    orphans = False

    def __init__(self, above: "Callable[[], EventReplay | None]" = lambda: None) -> None:
        self.above = above
        self.resident: dict[int, tuple[Any, ...]] = {}
        self.named: dict[int, tuple[Any, ...]] = {}

    def apply(self, events: Iterable[Any]) -> None:
        for event in events:
            kind = type(event).__name__
            if kind == "BlockStored":
                self._store(event)
            elif kind == "BlockRemoved":
                for block in event.block_hashes:
                    if block not in self.resident:
                        raise Violation("N2", f"removed page {block}, which is not stored")
                    del self.resident[block]
            elif kind == "AllBlocksCleared":
                self.resident.clear()

    def _store(self, event: Any) -> None:
        """Pages become resident: N2 for the order, N1 for their names."""
        above: tuple[Any, ...] = ()
        if event.parent_block_hash is not None:
            upper = self.above()
            known = self.resident if upper is None else {**upper.resident, **self.resident}
            known = self.named if self.orphans else known
            if event.parent_block_hash not in known:
                raise Violation(
                    "N2",
                    f"stored {list(event.token_ids)} after page {event.parent_block_hash}, which "
                    "is not stored",
                )
            above = known[event.parent_block_hash]
        size = event.block_size
        for i, block in enumerate(event.block_hashes):
            above = above + tuple(event.token_ids[i * size : (i + 1) * size])
            if block in self.resident:
                raise Violation("N2", f"stored page {block} of {list(above)} twice")
            if self.named.setdefault(block, above) != above:
                raise Violation(
                    "N1", f"page {block} is {list(above)}, and was {list(self.named[block])}"
                )
            self.resident[block] = above

    def check(self, ledger: Ledger) -> None:
        """Compare with what is cached; namespaces are inside the hashes, so they are counted.

        Raises:
            Violation: names the shortest prefix that is only on one side.
        """
        seen = Counter(self.resident.values())
        expected = Counter(elements for _, elements in ledger.cached)
        for elements in sorted(expected - seen, key=lambda e: (len(e), e)):
            pages = [page for (_, prefix), page in ledger.cached.items() if prefix == elements]
            raise Violation(
                "N2",
                f"page {pages[0]} is cached for {list(elements)}, and not stored by the events",
            )
        for elements in sorted(seen - expected, key=lambda e: (len(e), e)):
            raise Violation(
                "N2", f"the events leave {list(elements)} stored, and no page is cached for it"
            )


class TierEvents:
    """The events of two tiers, each replayed on its own; what names no medium is for both.

    A write-back stores a page on the host before its parent, which is still on the device.
    """

    def __init__(self) -> None:
        self.device = EventReplay()
        self.host = EventReplay(above=lambda: self.device)

    def apply(self, events: Iterable[Any]) -> None:
        """Each event to its tier, by its ``medium``."""
        for event in events:
            medium = getattr(event, "medium", None)
            if medium in (None, "GPU"):
                self.device.apply([event])
            if medium != "GPU":
                self.host.apply([event])

    def check(self, ledger: Ledger) -> None:
        """N2 on the device."""
        self.device.check(ledger)

    def check_host(self, view: TreeView, page_size: int) -> None:
        """N2 on the host, when no copy runs."""
        seen = sorted(self.host.resident.values())
        expected = sorted(
            elements
            for index, names in view.pages(page_size)
            for _, elements in names
            if view.nodes[index].host is not None
        )
        if seen != expected:
            raise Violation(
                "N2", f"the host's events leave {seen} stored, the host holds {expected}"
            )
