"""The bound of a file backend: what was used longest ago goes.

Writes are counted; the directory is listed only when the count passes the bound, and then a
sixteenth more than needed is freed. A removal is not synced: if a crash brings the file back, it is
a whole page, and the next start makes room again.
"""

from collections import Counter
from collections.abc import Set

from refcache.storage.disk import Disk, discard
from refcache.storage.page_format import PageFormat

SLACK = 16


class FileRoom:
    """Room for files of one shape in a directory, temporary ones included.

    Args:
        max_bytes: of the files, headers included; None: no bound.
        counts: ``evicted`` is counted there.

    Attributes:
        used: bytes, as last listed and counted since.
    """

    def __init__(
        self, disk: Disk, form: PageFormat, max_bytes: int | None, counts: Counter[str]
    ) -> None:
        self.disk = disk
        self.form = form
        self.max_bytes = max_bytes
        self.counts = counts
        self.used = 0
        if max_bytes is not None:
            self.evict(0, frozenset())

    def take(self, need: int, keep: Set[str]) -> bool:
        """Count ``need`` bytes more, after an eviction if they pass the bound; False: no room."""
        if self.max_bytes is None:
            return True
        if self.used + need > self.max_bytes:
            self.evict(need, keep)
        if self.used + need > self.max_bytes:
            return False
        self.used += need
        return True

    def evict(self, need: int, keep: Set[str]) -> None:
        """List the files; remove those used longest ago, but not ``keep``, until ``need`` bytes
        fit. Nothing is removed for a page that cannot fit."""
        bound = self.max_bytes or 0
        entries = self.disk.entries()
        pages = [e for e in entries if self.form.owns(e.name)]
        free = [e for e in pages if e.name not in keep]
        unfinished = sum(e.size for e in entries if self.form.owns_temporary(e.name))
        self.used = unfinished + sum(e.size for e in pages)
        if self.used - sum(e.size for e in free) + need > bound:
            return
        if self.used + need > bound:
            bound -= bound // SLACK
        for entry in sorted(free, key=lambda entry: (entry.used, entry.name)):
            if self.used + need <= bound:
                break
            if discard(self.disk, entry.name):
                self.used -= entry.size
                self.counts["evicted"] += 1
