"""The published corruption bugs of hierarchical caches, each as its smallest sequence.

Most sequences were run on an engine's release and failed there; the others are made from the cause
that the report names. Here each must pass on the reference, with copies delayed as long as possible
and without delay; the planted bug that models it must fail.
"""

from contextlib import suppress

import pytest
import torch

from programs import play
from refcache.allocator import TokenToKVPoolAllocator
from refcache.controller import HiCacheController
from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.errors import DoubleFree, NotProtected
from refcache.oracle import (
    CacheConfig,
    HiCacheDriver,
    LoopDriver,
    StreamsDriver,
    Violation,
    resolve,
)
from refcache.planted import find, streams
from refcache.pool.host_slots import HostSlots
from refcache.runtime import SimulatedRuntime, eager, lazy
from refcache.testing import hunt
from refcache.tree import HiRadixCache
from refcache.types import EvictParams, ServerArgs

SEQUENCES = {
    # name: (policy, page size, device, host, program, the planted bug that models it)
    "B01-load-back-evicts-its-source": (
        "write_back", 1, 8, 9,
        "admit (1,1,1); cache -1; finish -1; admit (0,0,2,1,1,0); cache -1; decode -1, 0; "
        "finish -1; admit (1,1,1,1); cache -1",
        "load-back-unprotected",
    ),
    "B01-pages-of-two": (
        "write_back", 2, 16, 18,
        "admit (0,2,2,0,1,2,1,2); cache -1; finish -1; admit (0,0,0,1,0,2,2,1,1,2,1); "
        "cache -1; decode -1, 1; finish -1; admit (0,2,2,0,1,2,1,2,1); cache -1",
        "load-back-unprotected",
    ),
    "B02-host-leaf-with-a-child": (
        "write_back", 1, 6, 7,
        "admit (1,1); cache -1; finish -1; evict 1; admit (1,1,0); cache -1; finish -1; "
        "settle; evict 2",
        "host-leaf-with-children",
    ),
    "B03-eviction-below-a-dropped-node": (
        "write_back", 1, 8, 9,
        "admit (0,0,2); cache -1; finish -1; evict 1; admit (0,0,2,1); cache -1; finish -1; "
        "settle; admit (2,1,1,1,1,1); cache -1; finish -1; admit (0,0,2); cache -1",
        "host-leaf-with-children",
    ),
    "B03-host-slot-leaked": (
        "write_back", 1, 8, 9,
        "admit (1,1,1); cache -1; finish -1; evict 1; admit (1,1,1,2,1); cache -1; "
        "decode -1, 1; settle; finish -1; admit (2,1,0,2); cache -1; finish -1; evict 1",
        "host-leaf-with-children",
    ),
    "B06-split-while-the-copy-runs": (
        "write_through", 1, 8, 20,
        "admit (0,1,2,1); cache -1; finish -1; match (0,1,2); match (0,1,0); settle; evict 4",
        "split-forgets-the-copy",
    ),
    "B19-reset-with-a-copy-in-flight": (
        "write_through", 1, 8, 20,
        "admit (0,1,2); cache -1; finish -1; reset; admit (2,2,2,2); cache -1; finish -1; "
        "settle",
        "reset-leaves-copies",
    ),
    "B07-load-over-a-running-forward": (
        "write_through", 1, 4, 20,
        "admit (0,1,2); cache -1; finish -1; settle; evict 3; admit (1,2,1); abort -1; "
        "reload 0; settle",
        "load-not-fenced",
    ),
    "B08-write-before-the-forward": (
        "write_through", 1, 8, 20,
        "insert (0,1); settle",
        "write-start-not-awaited",
    ),
    "B09-read-before-the-load": (
        "write_through", 1, 8, 20,
        "admit (0,1); cache -1; finish -1; settle; evict 2; admit (0,1,2); cache -1; "
        "finish -1; settle",
        "getters-do-not-wait",
    ),
    "B10-last-layer": (
        "write_through", 1, 8, 20,
        "admit (0,1); cache -1; finish -1; settle; evict 2; admit (0,1,2); cache -1; finish -1",
        "last-layer-not-loaded",
    ),
    "B13-host-page-freed-twice": (
        "write_back", 1, 6, 7,
        "admit (1,1,1,1); cache -1; finish -1; evict 4; admit (2,2,2,2); cache -1; finish -1; "
        "evict 4; admit (0,0,0,0); cache -1; finish -1; evict 4",
        "host-page-freed-twice",
    ),
    "B13-pages-of-two": (
        "write_back", 2, 16, 18,
        "admit (0,0,1,1,0,0,1,1); cache -1; finish -1; evict 8; admit (1,1,2,2,1,1,2,2); "
        "cache -1; finish -1; evict 8; admit (2,2,0,0,2,2,0,0); cache -1; finish -1; evict 8",
        "host-page-freed-twice",
    ),
    "B15-aborted-between-chunks": (
        "write_through", 4, 32, 40,
        "admit (0,1,2,0,1,2,0,1,2,0,1,2,0,1,2), None, 4; cache -1; proceed -1, 4; abort -1; "
        "admit (0,1,2,0,1,2,0,1); cache -1; finish -1; match (0,1,2,0,1,2,0,1)",
        "abort-frees-cached-chunks",
    ),
    "B24-host-eviction-empties-the-host": (
        "write_through", 1, 8, 9,
        "admit (0,0,0); cache -1; finish -1; admit (1,1,1); cache -1; finish -1; settle; "
        "evict 6; admit (2,2,2); cache -1; finish -1; settle; evict 3; admit (3,3); cache -1; "
        "finish -1; settle",
        "evict-host-too-much",
    ),
    "B24-parent-not-evicted": (
        "write_back", 1, 8, 9,
        "admit (0,0); cache -1; finish -1; admit (0,0,1,1); cache -1; finish -1; evict 4",
        "evict-parent-not-pushed",
    ),
    "B24-slots-kept-after-the-write-back": (
        "write_back", 1, 8, 9,
        "admit (1,1); cache -1; finish -1; evict 2",
        "write-back-keeps-slots",
    ),
    "B21-writes-not-acknowledged-while-a-load-runs": (
        "write_through", 1, 8, 20,
        "admit (0,1); cache -1; finish -1; settle; evict 2; admit (1,2); cache -1; finish -1; "
        "reload 0; settle",
        "write-acks-not-polled",
    ),
    "B43-host-slots-freed-under-a-running-load": (
        "write_back", 1, 8, 9,
        "admit (0,1); cache -1; finish -1; evict 2; admit (1,2); cache -1; finish -1; evict 2; "
        "reload 0, None, False; reload 0, None, False; start_loads; settle",
        "load-gives-up-its-source",
    ),
    "B45-revived-tokens-not-counted": (
        "write_through", 1, 8, 20,
        "admit (0,1); cache -1; finish -1; settle; evict 2; insert (0,1); settle",
        "revived-not-evictable",
    ),
    "B46-lock-skips-the-node": (
        "write_through", 1, 8, 20,
        "insert (1,2); insert (1,2,2); settle; hold (1,2,2); evict 1",
        "lock-skips-node",
    ),
    "B55-two-loads-in-one-batch": (
        "write_through", 1, 8, 20,
        "admit (0,1); cache -1; finish -1; admit (1,2); cache -1; finish -1; settle; evict 4; "
        "reload 0, None, False; reload 0, None, False; start_loads; settle",
        "merge-reverses-a-side",
    ),
    "B53-second-plane-stays-behind": (
        "write_through", 1, 8, 20,
        "admit (0,1); cache -1; finish -1; settle",
        "second-plane-not-copied",
    ),
    "B54-last-page-dropped": (
        "write_through", 1, 8, 20,
        "admit (0,1,2); cache -1; finish -1; settle",
        "last-page-not-copied",
    ),
    "B26-chunk-aborted": (
        "write_through", 1, 16, 40,
        "admit (0,1,2,0,1,2,0,1), None, 4; cache -1; abort -1; settle; evict 4; match (0,1,2,0)",
        None,
    ),
    "B27-one-request-twice": (
        "write_through_selective", 1, 16, 40,
        "admit (0,1,2,0); cache -1; decode -1, 1; finish -1; settle; evict 16; match (0,1,2,0)",
        "selective-writes-at-once",
    ),
}  # fmt: skip


def run(driver, program):
    play(driver, program)
    driver.wind_down()


def driver_for(name, **more):
    policy, page_size, size, host_size, _, _ = SEQUENCES[name]
    return HiCacheDriver(
        resolve("refcache"), page_size=page_size, size=size, host_size=host_size,
        write_policy=policy, **more,
    )  # fmt: skip


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("hit_policy", ["per_visit", "per_request", "chunks_count"])
@pytest.mark.parametrize("name", SEQUENCES)
def test_the_reference_passes(name, delay, hit_policy):
    run(driver_for(name, delay=delay, hit_policy=hit_policy), SEQUENCES[name][4])


@pytest.mark.parametrize("name", [n for n, s in SEQUENCES.items() if s[5]])
def test_its_planted_bug_fails(name):
    with find(SEQUENCES[name][5]).active(), pytest.raises((Violation, NotProtected)):
        run(driver_for(name), SEQUENCES[name][4])


def on_host(driver, tokens):
    found = driver.bench.match(tokens, None)
    return len(found.device_indices) + found.host_hit_length


@pytest.mark.parametrize(
    ("hit_policy", "kept"), [("per_visit", 0), ("per_request", 0), ("chunks_count", 4)]
)
def test_an_aborted_chunk_is_backed_up_only_if_chunks_count(hit_policy, kept):
    """B26 is policy: the default drops a prefix that only chunks of a prefill have visited."""
    d = driver_for("B26-chunk-aborted", hit_policy=hit_policy)
    d.admit((0, 1, 2, 0, 1, 2, 0, 1), None, 4)
    d.cache(0)
    d.abort(0)
    d.settle()
    d.evict(4)
    assert on_host(d, (0, 1, 2, 0)) == kept


@pytest.mark.parametrize(
    ("hit_policy", "kept"), [("per_visit", 4), ("per_request", 0), ("chunks_count", 4)]
)
def test_one_request_counts_twice_unless_hits_are_per_request(hit_policy, kept):
    """B27 is policy: by default one request passes its own prompt twice, which is "selective"."""
    d = driver_for("B27-one-request-twice", hit_policy=hit_policy)
    d.admit((0, 1, 2, 0))
    d.cache(0)
    d.decode(0, 1)
    d.finish(0)
    d.settle()
    d.evict(16)
    assert on_host(d, (0, 1, 2, 0)) == kept


LOOP = {
    # name: (configuration, calls, the planted bug that models it)
    "B20-draft-slots-not-recorded": (
        {}, (("submit", (0, 1), 4), ("submit", (1, 2), 4), ("run", 6)), "draft-slots-not-recorded",
    ),
    "B32-tail-released-twice": (
        {"page_size": 2}, (("submit", (0, 1), 2), ("run", 4)), "tail-released-twice",
    ),
    "B34-chunk-computed-again": (
        {"chunk_pages": 1}, (("submit", (0, 1, 2), 1, "a"), ("run", 3)), "chunk-computed-again",
    ),
    "B39-looked-up-without-its-namespace": (
        {}, (("submit", (0, 1, 2)), ("run", 3), ("submit", (0, 1, 2, 0), 1, "a"), ("run", 2)),
        "request-key-without-namespace",
    ),
}  # fmt: skip


def run_loop(name):
    config, calls, _ = LOOP[name]
    d = LoopDriver(resolve("refcache"), **config)
    for call, *args in calls:
        getattr(d, call)(*args)
    d.wind_down()


@pytest.mark.parametrize("name", LOOP)
def test_the_loop_passes_and_its_planted_bug_fails(name):
    run_loop(name)
    with find(LOOP[name][2]).active(), pytest.raises(Violation) as caught:
        run_loop(name)
    assert caught.value.id != "crash"


def decode_after_a_load(delay=True):
    """B59: a load has started; a decode reads its slots, as a captured graph without waits does."""
    d = HiCacheDriver(resolve("refcache"), size=8, host_size=20, delay=delay)
    play(d, "insert (0,1); settle; evict 2; reload 0, None, False; start_loads")
    row = d.bench.match((0, 1), None).device_indices.tolist()
    forwards = d.bench.forwards
    with d.machine.stream(forwards.stream):
        forwards.stream.wait_stream(d.machine.default_stream())
        forwards.counter.set_consumer(-1)
        forwards.counter.wait_all()
        d.bench.content.forward(d.machine, row, 2, (0, 1), None, d.trial.note)
    d.wind_down()


@pytest.mark.parametrize("delay", [True, False])
def test_a_decode_right_after_a_load_waits_for_all_of_it(delay):
    decode_after_a_load(delay)


def test_a_decode_that_waits_for_all_layers_but_the_last_is_found():
    with find("decode-does-not-wait").active(), pytest.raises(Violation) as caught:
        decode_after_a_load()
    assert caught.value.id == "X5"
    assert "read by 'attention'" in str(caught.value)
    assert "layer 1" in str(caught.value)


def test_the_suite_of_orders_finds_it_too():
    d = StreamsDriver(resolve("refcache"))
    d.every_order("decode-load")
    with find("decode-does-not-wait").active(), pytest.raises(Violation) as caught:
        d.every_order("decode-load")
    assert caught.value.id == "X5"
    d = StreamsDriver(resolve("refcache"), without_edge="decode-load")
    with pytest.raises(Violation, match="edge decode-load"):
        d.every_order("decode-load")


NO_RACE = {
    "failing-thread-raises-no-flag": "PROGRESS",  # the loop waits for ever
    "failing-thread-is-believed": "C-READ",
    "retracted-load-unprotected": "P3",
}
"""Bugs of the streams that are no race, with the rule that they break; all others break X5."""


@pytest.mark.parametrize("bug", streams.BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_of_the_streams_are_caught(bug):
    caught = hunt(bug)
    assert caught.counts, caught.failure and caught.failure.text
    assert caught.by == NO_RACE.get(bug.name, "X5")


def locks_in_a_decode_phase():
    """B21: the copy is done, and nothing but decodes comes; writes that are still locked."""
    args = ServerArgs(
        max_total_tokens=24, enable_hierarchical_cache=True, hicache_write_policy="write_through"
    )
    scheduler = Scheduler(args, ModelConfig(vocab_size=3), runtime=SimulatedRuntime(lazy))
    scheduler.submit(TokenizedGenerateReqInput("r", [0, 1, 2], SamplingParams(12)))
    for _ in range(3):
        scheduler.step()
    scheduler.runtime.synchronize()
    before = len(scheduler.tree_cache.ongoing_write_through)
    scheduler.step()
    return before, len(scheduler.tree_cache.ongoing_write_through)


def test_a_decode_phase_acknowledges_writes(monkeypatch):
    assert locks_in_a_decode_phase() == (1, 0)
    monkeypatch.setattr(HiRadixCache, "check_hicache_events", lambda self: None)
    assert locks_in_a_decode_phase() == (1, 0)  # not only where a prefill is tried
    monkeypatch.setattr(HiRadixCache, "flush_write_through_acks", lambda self: None)
    assert locks_in_a_decode_phase() == (1, 1)


# ---- what needs more than legal calls ------------------------------------------------------------


def full_and_pinned():
    """B23: four tokens on the host, four on the device without a copy; the host is in use."""
    d = HiCacheDriver(
        resolve("refcache"), size=6, host_size=7, write_policy="write_back", delay=False
    )
    d.insert((1, 1, 1, 1))
    d.evict(4)
    d.insert((2, 2, 2, 2))
    for node in d.tree.nodes():
        node.protect_host()  # as a write to a tier below the host would
    return d


def test_write_back_with_the_host_full_and_pinned_drops_the_leaf():
    d = full_and_pinned()
    with d.ledger.permits(d.ledger.only_unlocked):
        assert d.tree.evict(EvictParams(4)).num_tokens_evicted == 4
    for node in d.tree.nodes():
        node.release_host()
    d.check()
    assert on_host(d, (1, 1, 1, 1)) == 4
    assert on_host(d, (2, 2, 2, 2)) == 0
    d.wind_down()


def test_a_node_queued_although_it_was_not_written_is_found():
    with find("write-back-without-room").active():
        d = full_and_pinned()
        with d.ledger.permits(d.ledger.only_unlocked):
            d.tree.evict(EvictParams(4))
        for node in d.tree.nodes():
            node.release_host()
        with pytest.raises(Violation) as caught:
            d.check()
    assert caught.value.id == "T2"


@pytest.mark.parametrize("delay", [True, False])
def test_a_fourth_load_waits_for_the_first(delay, monkeypatch):
    """B31: four prefixes on the host, four loads, none finished; there are three slots."""

    def four_loads():
        d = HiCacheDriver(resolve("refcache"), size=8, host_size=20, delay=delay)
        for token in range(4):
            d.insert((token, 0))
        play(d, "settle; evict 8; reload 0; reload 0; reload 0; reload 0")
        return d.tree.cache_controller

    controller = four_loads()
    assert controller.load_slot_waits == delay
    monkeypatch.setattr(HiCacheController, "_wait_for_load_slot", lambda self: None)
    if delay:  # the load that finds no slot is given up, where nothing may be freed
        with pytest.raises(Violation, match="P1: page 7 is cached for"):
            four_loads()


def waits_of(driver):
    """A list that grows with each wait of the host for the whole machine."""
    waits, synchronize = [], driver.machine.synchronize
    driver.machine.synchronize = lambda: (waits.append(len(driver.log)), synchronize())
    return waits


def test_no_fourth_load_is_asked_of_a_target_that_does_not_wait_for_a_slot(monkeypatch):
    """B31: a loop has at most as many loads running as there are slots."""
    target = resolve("refcache")
    monkeypatch.setattr(type(target), "capabilities", target.capabilities - {"load_slots"})
    monkeypatch.setattr(HiCacheController, "_wait_for_load_slot", lambda self: None)
    d = HiCacheDriver(target, size=16, host_size=40)
    for token in range(8):
        d.insert((token, 0))
    play(d, "settle; evict 16")
    waits = waits_of(d)
    play(d, "reload 0; reload 0; reload 0")
    assert not waits
    assert sum(transfer.kind == "load" for transfer in d.bench.host().transfers) == 3
    play(d, "reload 0")
    assert len(waits) == 1
    play(d, "reload 0; reload 0")
    assert len(waits) == 1
    while d.machine.runnable():
        d.work((0,))
    d.poll()
    play(d, "reload 0; reload 0")  # what is acknowledged is finished
    assert len(waits) == 1
    play(d, "settle")
    d.wind_down()


def test_a_forward_that_is_waited_for_ends_the_loads_before_it(monkeypatch):
    target = resolve("refcache")
    less = target.capabilities - {"load_slots", "fences"}
    monkeypatch.setattr(type(target), "capabilities", less)
    d = HiCacheDriver(target, size=16, host_size=40)
    for token in range(6):
        d.insert((token, 0))
    play(d, "settle; evict 16; reload 0; reload 0")
    waits = waits_of(d)
    d.admit((2, 0, 1))  # the third load, and a forward
    play(d, "reload 0; reload 0; reload 0")
    assert not waits


def unchecked_host_free(self, indices):
    self.free_slots = torch.cat([self.free_slots, indices])
    return len(indices)


def test_a_host_page_freed_twice_is_refused(monkeypatch):
    """B13 in the pool: 18 slots, 4 taken, 4 freed, 2 of them freed again."""

    def freed_again():
        slots = HostSlots(18, 2, SimulatedRuntime(eager))
        taken = slots.alloc(4)
        slots.free(taken)
        with suppress(DoubleFree):
            slots.free(taken[:2])
        return slots.available_size()

    assert freed_again() == 18
    monkeypatch.setattr(HostSlots, "free", unchecked_host_free)
    assert freed_again() == 20


def test_a_device_page_freed_twice_is_refused(monkeypatch):
    """B13 in the device allocator: 8 tokens, 4 taken, 4 freed, 1 of them freed again."""

    def freed_again():
        allocator = resolve("refcache").allocator(CacheConfig(size=8))
        taken = allocator.alloc(4)
        allocator.free(taken)
        with suppress(DoubleFree):
            allocator.free(taken[:1])
        return allocator.available_size()

    assert freed_again() == 8

    def unchecked(self, slots):
        self.free_pages, self.release_pages = self._given_back(slots)

    monkeypatch.setattr(TokenToKVPoolAllocator, "free", unchecked)
    assert freed_again() == 9


def test_fill_takes_all_the_room_that_is_not_locked() -> None:
    d = HiCacheDriver(resolve("refcache"), size=8)
    d.insert((0, 1))
    d.hold((0, 1))
    d.insert((1, 1, 1))
    d.settle()  # while they are written, nodes are locked
    d.fill()
    assert [len(req.origin_input_ids) for req in d.requests] == [6]
    assert d.allocator.available_size() == d.tree.evictable_size() == 0
