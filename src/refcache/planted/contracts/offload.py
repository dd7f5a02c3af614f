"""Bugs planted in the reference's offloading manager."""

from collections.abc import Callable
from typing import Any

from refcache.planted.bug import PlantedBug

BLOCKS = "refcache.oracle.target.offload.reference:HostBlocks"
SUITE = "offload.state"
Function = Callable[..., Any]


def _failed_is_found(original: Function) -> Function:
    return lambda self, keys, ok: original(self, keys, ok or len(keys) > 1)


def _failed_leaks(original: Function) -> Function:
    def complete_store(self: Any, keys: Any, ok: bool) -> None:
        if not ok:  # only the first key's page is given back
            for key in keys[1:]:
                del self.blocks[key]
            keys = keys[:1]
        original(self, keys, ok)

    return complete_store


def _found_early(original: Function) -> Function:
    def prepare_store(self: Any, keys: Any) -> Any:
        answer = original(self, keys)
        for key in answer or ():
            self.blocks[key].ready = len(answer) > 2
        return answer

    return prepare_store


def _readers_evicted(original: Function) -> Function:
    def victims(self: Any, count: int, kept: Any) -> Any:
        found = original(self, count, kept)
        if found is None:
            ready = [k for k, block in self.blocks.items() if block.ready and k not in kept]
            found = ready[:count] if count <= len(ready) else None
        return found

    return victims


def _one_ends_all(original: Function) -> Function:
    def complete_load(self: Any, keys: Any) -> None:
        for key in keys:
            self.blocks[key].readers = 0

    return complete_load


def _pin_kept(original: Function) -> Function:
    def complete_load(self: Any, keys: Any) -> None:
        original(self, [key for key in keys if self.blocks[key].readers == 1])

    return complete_load


def _load_is_no_use(original: Function) -> Function:
    def prepare_load(self: Any, keys: Any) -> Any:
        order = list(self.blocks)
        answer = original(self, keys)
        self.blocks = {key: self.blocks[key] for key in order}
        return answer

    return prepare_load


def _offered_evicted(original: Function) -> Function:
    return lambda self, count, kept: original(self, count, kept[:1])


def _stored_twice(original: Function) -> Function:
    def prepare_store(self: Any, keys: Any) -> Any:
        waiting = {key: self.blocks.pop(key) for key in keys if key in self.blocks}
        again = {key for key, block in waiting.items() if not block.ready}
        self.blocks |= {k: b for k, b in waiting.items() if k not in again}
        answer = original(self, keys)
        if answer is None:
            self.blocks |= waiting
        return answer

    return prepare_store


def _evicted_before_refusal(original: Function) -> Function:
    def victims(self: Any, count: int, kept: Any) -> Any:
        found = original(self, count, kept)
        if found is None:
            for key in original(self, 1, kept) or ():
                self.drop(key)
        return found

    return victims


def _one_too_many(original: Function) -> Function:
    def victims(self: Any, count: int, kept: Any) -> Any:
        return original(self, count + 1 if count > 1 else count, kept) or original(
            self, count, kept
        )

    return victims


def _silent_eviction(original: Function) -> Function:
    def drop(self: Any, key: Any) -> None:
        original(self, key)
        if len(self.blocks) > 1 and self._events[-1:] == [("removed", key)]:
            self._events.pop()

    return drop


def _slots_sorted(original: Function) -> Function:
    return lambda self, keys: sorted(original(self, keys))


def _first_layer_only(original: Function) -> Function:
    def write(self: Any, key: Any, data: bytes) -> None:
        again = key in self._written if hasattr(self, "_written") else False
        self._written = {*getattr(self, "_written", ()), key}
        half = len(data) // 2
        old = bytes(8 * (half // 8))
        original(self, key, data[:half] + old if again else data)

    return write


BUGS = (
    PlantedBug(
        "failed-store-is-found",
        "LMCache#4991",
        "a store of several keys that fails counts as one that succeeded",
        f"{BLOCKS}.complete_store",
        _failed_is_found,
        SUITE,
    ),
    PlantedBug(
        "failed-store-leaks",
        "LMCache#4991, #2559",
        "of a store that fails only the first key's slot is free again",
        f"{BLOCKS}.complete_store",
        _failed_leaks,
        SUITE,
    ),
    PlantedBug(
        "found-before-stored",
        "vllm#46278, #31341, #45704",
        "a long store can be loaded from while it is being copied",
        f"{BLOCKS}.prepare_store",
        _found_early,
        SUITE,
    ),
    PlantedBug(
        "evicted-while-read",
        "vllm#42289, sglang#27631, #31427",
        "with nothing else to evict, a block goes that a load still reads",
        f"{BLOCKS}.victims",
        _readers_evicted,
        SUITE,
    ),
    PlantedBug(
        "first-reader-unpins",
        "LMCache#3381, #1858",
        "two loads read one block; when the first is over the block may go",
        f"{BLOCKS}.complete_load",
        _one_ends_all,
        SUITE,
    ),
    PlantedBug(
        "second-reader-stays",
        "LMCache#2559, sglang#9927",
        "the pin of a block that two loads read is taken back once only",
        f"{BLOCKS}.complete_load",
        _pin_kept,
        SUITE,
    ),
    PlantedBug(
        "load-is-no-use",
        "vllm#53498",
        "a block that is loaded is not counted as used, and goes too early",
        f"{BLOCKS}.prepare_load",
        _load_is_no_use,
        SUITE,
    ),
    PlantedBug(
        "offered-block-evicted",
        "sglang#32574, #32459",
        "a store makes room with a block that it offers itself",
        f"{BLOCKS}.victims",
        _offered_evicted,
        SUITE,
    ),
    PlantedBug(
        "stored-twice-at-once",
        "sglang#35769, #35931",
        "a key that is being stored is given a second slot by another store",
        f"{BLOCKS}.prepare_store",
        _stored_twice,
        SUITE,
    ),
    PlantedBug(
        "refused-store-evicts",
        "sglang#27562, vllm#49250",
        "a store that is refused has evicted a block first",
        f"{BLOCKS}.victims",
        _evicted_before_refusal,
        SUITE,
    ),
    PlantedBug(
        "one-evicted-too-many",
        "slip",
        "a store that needs the room of several blocks evicts one more",
        f"{BLOCKS}.victims",
        _one_too_many,
        SUITE,
    ),
    PlantedBug(
        "eviction-untold",
        "sglang#38486, dynamo#14878",
        "the removal of a block is not announced while others stay",
        f"{BLOCKS}.drop",
        _silent_eviction,
        SUITE,
    ),
    PlantedBug(
        "slots-in-another-order",
        "TensorRT-LLM#8813",
        "the slots of a load come in ascending order, not in the order of its keys",
        f"{BLOCKS}.prepare_load",
        _slots_sorted,
        SUITE,
    ),
    PlantedBug(
        "second-store-half-copied",
        "sglang#37870, LMCache#2826",
        "when a block is stored again only its first layer is copied",
        f"{BLOCKS}.write",
        _first_layer_only,
        SUITE,
    ),
)
