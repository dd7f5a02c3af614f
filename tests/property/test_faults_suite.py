"""Suite ``hicache.faults``: silent on the reference, and what it must see it sees."""

import pytest
import torch

from refcache.allocator import TokenToKVPoolAllocator
from refcache.oracle import HiCacheDriver, Violation, resolve
from refcache.oracle.target.naive import NaiveTarget
from refcache.oracle.target.reference import RefcacheTarget
from refcache.planted import all_bugs
from refcache.testing import hunt, run_suite


def test_the_reference_leaves_nothing_behind():
    result = run_suite("hicache.faults", resolve("refcache"), max_examples=100, seed=1)
    assert result.verdict == "ok", result.failure and result.failure.text
    assert result.faults >= 500
    assert result.pairs >= 100


def test_every_kind_of_call_and_step_is_met():
    pairs = set()
    for policy in ("write_through", "write_back"):
        for fault in (1, 2, 3, 5, 8):
            for every in (1, 2, 3, 5):
                d = HiCacheDriver(
                    resolve("refcache"), size=8, page_size=2, host_size=16, fault=fault,
                    write_policy=policy, fault_calls=every, enable_kv_cache_events=True,
                )  # fmt: skip
                d.admit((1, 1, 1, 1, 2))
                d.cache(0)
                d.decode(0, 1)
                d.decode(0, 1)
                d.finish(0)
                d.poll()
                d.settle()
                d.evict(8)
                d.reload(0, None, False)
                d.start_loads()
                d.settle()
                d.copy_by_hand(1)
                d.serve(((1, 1, 1), (1, 1, 2)))
                d.reset()
                d.wind_down()
                pairs |= {(call, step) for call, step, _ in d.bench.faults.pairs}
    calls = {call for call, _ in pairs}
    assert calls >= {
        "alloc", "alloc_extend", "cache_unfinished_req", "cache_finished_req", "evict", "write",
        "init_load_back", "ready_to_load_host_cache", "check_hicache_events", "reset", "load",
        "start_loading", "step", "free", "evict_host of slots",
    }  # fmt: skip
    assert {step for _, step in pairs} == {
        "device slots", "device slots back", "host slots", "host slots back", "row", "row back",
        "launch", "event", "hash",
    }  # fmt: skip
    assert ("cache_finished_req", "device slots back") in pairs


@pytest.mark.parametrize(
    "bug", [b for b in all_bugs() if b.suite == "hicache.faults"], ids=lambda b: b.name
)
def test_a_planted_bug_is_caught(bug):
    caught = hunt(bug)
    assert caught.counts, caught.failure and caught.failure.text


class TakesFirst(TokenToKVPoolAllocator):
    def alloc(self, need_size):
        self.free_pages = self.free_pages.roll(0)
        self.free_pages = self.free_pages[need_size:]
        return torch.zeros(need_size, dtype=torch.int64)


class Outsider(RefcacheTarget):
    """Another target that declares the capability, and does not keep it."""

    def _allocator(self, config, pool, runtime):
        return TakesFirst(config.size, torch.int64, "cpu", pool, config.need_sort, runtime)


def test_another_target_is_held_to_it():
    d = HiCacheDriver(Outsider(), size=8, host_size=9, fault=1, fault_tensors=True)
    with pytest.raises(Violation, match="Z3: alloc raised at its inner step 'tensor'"):
        d.admit((1, 1))


def test_a_target_without_the_capability_is_skipped():
    result = run_suite("hicache.faults", NaiveTarget(), max_examples=5)
    assert (result.verdict, "faults" in result.reason) == ("skipped", True)
