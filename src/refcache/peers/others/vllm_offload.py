"""vLLM's offloading managers behind the contract ``offload``: one tier (LRU, ARC), and two tiers.

Every call gets a request of its own; a store is completed with the request that began it. The
manager of two tiers has vLLM's own example of a second tier, and after every call the scheduler's
step ends.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from refcache.oracle.target.base import Target
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.offload.contract import Key, OffloadTraits
from refcache.peers.others.sources import module


class Manager:
    """An ``OffloadingManager`` of vLLM as the contract's."""

    def __init__(self, manager: Any) -> None:
        self.base = module("vllm", "v1.kv_offload.base")
        self.manager, self.count = manager, 0
        self.requests: dict[Key, Any] = {}

    def request(self) -> Any:
        self.count += 1
        request = self.base.ReqContext(req_id=str(self.count))
        self.manager.on_new_request(request)
        return request

    def keys(self, keys: Sequence[Key]) -> list[Any]:
        return [self.base.make_offload_key(key, 0) for key in keys]

    def lookup(self, keys: Sequence[Key]) -> int:
        request, hit = self.request(), self.base.LookupResult.HIT
        found = [self.manager.lookup(key, request) is hit for key in self.keys(keys)]
        return [*found, False].index(False)

    def prepare_store(self, keys: Sequence[Key]) -> dict[Key, int] | None:
        request = self.request()
        answer = self.manager.prepare_store(self.keys(keys), request)
        if answer is None:
            return None
        stored = map(self.base.get_offload_block_hash, answer.keys_to_store)
        slots = dict(zip(stored, answer.store_spec.block_ids.tolist(), strict=True))
        self.requests |= dict.fromkeys(slots, request)
        return slots

    def complete_store(self, keys: Sequence[Key], ok: bool) -> None:
        self.manager.complete_store(self.keys(keys), self.requests[keys[0]], ok)

    def prepare_load(self, keys: Sequence[Key]) -> list[int]:
        spec = self.manager.prepare_load(self.keys(keys), self.request())
        return [*map(int, spec.block_ids)]

    def complete_load(self, keys: Sequence[Key]) -> None:
        self.manager.complete_load(self.keys(keys), self.request())

    def touch(self, keys: Sequence[Key]) -> None:
        self.manager.touch(self.keys(keys), self.request())

    def reset(self) -> None:
        self.manager.reset_cache()
        self.manager.on_reset_flushed()

    def events(self) -> list[tuple[str, Key]]:
        seen = [event for event in self.manager.take_events() if not event.metadata_only]
        return [("removed" if e.removed else "stored", key[:-4]) for e in seen for key in e.keys]


class Tiers(Manager):
    """After every call the scheduler's step ends."""

    def __init__(self, manager: Any) -> None:
        super().__init__(manager)
        for name in ("lookup", "prepare_store", "complete_store", "prepare_load", "complete_load"):
            setattr(self, name, self.then_ends(getattr(self, name)))

    def then_ends(self, call: Any) -> Any:
        def made(*args: Any) -> Any:
            result = call(*args)
            self.manager.on_schedule_end(self.base.ScheduleEndContext((), ()))
            return result

        return made


class LruOffload(Target):
    """``CPUOffloadingManager`` with its LRU policy: a load alone is no use of a block there."""

    name = "vllm 0.33.0 CPUOffloadingManager (lru)"
    capabilities = frozenset({"offload"})
    policy = "lru"
    offload_traits = OffloadTraits(uses=frozenset({"store", "touch"}))

    def offload(self, config: CacheConfig) -> Manager:
        found = module("vllm", "v1.kv_offload.cpu.manager")
        return Manager(found.CPUOffloadingManager(config.pages, self.policy, enable_events=True))


class ArcOffload(LruOffload):
    """The same with its ARC policy, whose victims are of two lists."""

    name = "vllm 0.33.0 CPUOffloadingManager (arc)"
    policy = "arc"
    offload_traits = OffloadTraits()


class TieredOffload(Target):
    """``TieringOffloadingManager`` over a first tier (LRU) and vLLM's example of a second one."""

    name = "vllm 0.33.0 TieringOffloadingManager"
    capabilities = frozenset({"offload"})
    offload_traits = OffloadTraits(tiers=True, whole_jobs=True)

    def offload(self, config: CacheConfig) -> Manager:
        tiering = module("vllm", "v1.kv_offload.tiering.manager")
        example = module("vllm", "v1.kv_offload.tiering.example.manager")
        view = memoryview(bytearray(8 * config.pages)).cast("B", (config.pages, 8))
        region = SimpleNamespace(create_kv_memoryview=lambda: view, cleanup=lambda: None)
        first = tiering.CPUPrimaryTierOffloadingManager(config.pages, region, enable_events=True)
        second = example.ExampleSecondaryTierManager(None, view, "example")
        return Tiers(tiering.TieringOffloadingManager(first, [second]))
