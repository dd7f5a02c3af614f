"""Bugs planted in what ranks agree on: a decision from local state, a call that one rank omits."""

from collections.abc import Callable
from typing import Any

from refcache.planted.bug import PlantedBug

HIRADIX = "refcache.tree.hiradix_cache:HiRadixCache"
Function = Callable[..., Any]


def _finished_here(acks: list[Any]) -> int:
    done = 0
    while done < len(acks) and acks[done].finish_event.query():
        done += 1
    return done


def _own_count(original: Function) -> Function:
    def _finished_everywhere(self: Any, acks: list[Any]) -> int:
        original(self, acks)
        return _finished_here(acks)

    return _finished_everywhere


def _loads_not_reduced(original: Function) -> Function:
    def _finished_everywhere(self: Any, acks: list[Any]) -> int:
        if acks is self.cache_controller.ack_load_queue:
            return _finished_here(acks)
        return int(original(self, acks))

    return _finished_everywhere


def _silent_without_news(original: Function) -> Function:
    def _finished_everywhere(self: Any, acks: list[Any]) -> int:
        return int(original(self, acks)) if _finished_here(acks) else 0

    return _finished_everywhere


def _refused_while_copies_run(original: Function) -> Function:
    def load_back(self: Any, node: Any, mem_quota: int | None = None) -> Any:
        acks = self.cache_controller.ack_load_queue
        if _finished_here(acks) < len(acks):
            return None
        return original(self, node, mem_quota)

    return load_back


def _not_written_while_copies_run(original: Function) -> Function:
    def write_backup(self: Any, node: Any, write_back: bool = False) -> int:
        acks = self.cache_controller.ack_write_queue
        if not write_back and len(acks) - _finished_here(acks) > 1:
            return 0
        return int(original(self, node, write_back))

    return write_backup


def _bug(name: str, report: str, summary: str, attribute: str, replacement: Any) -> PlantedBug:
    return PlantedBug(name, report, summary, f"{HIRADIX}.{attribute}", replacement, "hicache.ranks")


BUGS: tuple[PlantedBug, ...] = (
    _bug(
        "own-acks-counted",
        "sglang#31425",
        "copies are acknowledged when this rank has finished them",
        "_finished_everywhere",
        _own_count,
    ),
    _bug(
        "loads-not-reduced",
        "sglang#31425",
        "only the acknowledgements of writes are agreed between ranks",
        "_finished_everywhere",
        _loads_not_reduced,
    ),
    _bug(
        "reduce-only-with-news",
        "sglang#26923, #30760",
        "a rank without a finished copy leaves out the all-reduce",
        "_finished_everywhere",
        _silent_without_news,
    ),
    _bug(
        "load-decided-here",
        "sglang#33442",
        "a load is refused on a rank whose earlier load is still running",
        "load_back",
        _refused_while_copies_run,
    ),
    _bug(
        "write-decided-here",
        "sglang#22607",
        "a node is not written on a rank whose earlier writes are still running",
        "write_backup",
        _not_written_while_copies_run,
    ),
)
