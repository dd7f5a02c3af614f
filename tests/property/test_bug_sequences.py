"""The published corruption bugs of hierarchical caches, each as its smallest sequence.

Most sequences were run on an engine's release and failed there; the others are made from the cause
that the report names. Here each must pass on the reference, with copies delayed as long as possible
and without delay; the planted bug that models it must fail.

Notation: ``A`` admit (match, lock, load back, compute, cache; ``/c`` in chunks of c), ``W`` admit
and do not wait for the forward, ``D x`` decode one token, ``F`` finish with insert, ``X`` abort
without, ``E n`` evict n tokens, ``T`` all copies finish and are acknowledged, ``M`` match, ``R``
reset, ``P n`` the next chunk, ``I`` insert, ``K`` lock, ``L`` load back what is on the host only,
``Q`` queue such a load, ``S`` start loads.
"""

from contextlib import suppress

import pytest
import torch

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
from refcache.oracle.planted import find, streams
from refcache.pool.host_slots import HostSlots
from refcache.runtime import SimulatedRuntime, eager, lazy
from refcache.testing import hunt
from refcache.tree import HiRadixCache
from refcache.types import EvictParams, ServerArgs

SEQUENCES = {
    # name: (policy, page size, device, host, program, the planted bug that models it)
    "B01-load-back-evicts-its-source": (
        "write_back", 1, 8, 9,
        "A 111; F; A 002110; D 0; F; A 1111", "load-back-unprotected",
    ),
    "B01-pages-of-two": (
        "write_back", 2, 16, 18,
        "A 02201212; F; A 00010221121; D 1; F; A 022012121", "load-back-unprotected",
    ),
    "B02-host-leaf-with-a-child": (
        "write_back", 1, 6, 7,
        "A 11; F; E 1; A 110; F; T; E 2", "host-leaf-with-children",
    ),
    "B03-eviction-below-a-dropped-node": (
        "write_back", 1, 8, 9,
        "A 002; F; E 1; A 0021; F; T; A 211111; F; A 002", "host-leaf-with-children",
    ),
    "B03-host-slot-leaked": (
        "write_back", 1, 8, 9,
        "A 111; F; E 1; A 11121; D 1; T; F; A 2102; F; E 1", "host-leaf-with-children",
    ),
    "B06-split-while-the-copy-runs": (
        "write_through", 1, 8, 20,
        "A 0121; F; M 012; M 010; T; E 4", "split-forgets-the-copy",
    ),
    "B19-reset-with-a-copy-in-flight": (
        "write_through", 1, 8, 20,
        "A 012; F; R; A 2222; F; T", "reset-leaves-copies",
    ),
    "B07-load-over-a-running-forward": (
        "write_through", 1, 4, 20,
        "A 012; F; T; E 3; W 121; X; L; T", "load-not-fenced",
    ),
    "B08-write-before-the-forward": (
        "write_through", 1, 8, 20,
        "I 01; T", "write-start-not-awaited",
    ),
    "B09-read-before-the-load": (
        "write_through", 1, 8, 20,
        "A 01; F; T; E 2; A 012; F; T", "getters-do-not-wait",
    ),
    "B10-last-layer": (
        "write_through", 1, 8, 20,
        "A 01; F; T; E 2; A 012; F", "last-layer-not-loaded",
    ),
    "B13-host-page-freed-twice": (
        "write_back", 1, 6, 7,
        "A 1111; F; E 4; A 2222; F; E 4; A 0000; F; E 4", "host-page-freed-twice",
    ),
    "B13-pages-of-two": (
        "write_back", 2, 16, 18,
        "A 00110011; F; E 8; A 11221122; F; E 8; A 22002200; F; E 8", "host-page-freed-twice",
    ),
    "B15-aborted-between-chunks": (
        "write_through", 4, 32, 40,
        "A 012012012012012/4; P 4; X; A 01201201; F; M 01201201", "abort-frees-cached-chunks",
    ),
    "B24-host-eviction-empties-the-host": (
        "write_through", 1, 8, 9,
        "A 000; F; A 111; F; T; E 6; A 222; F; T; E 3; A 33; F; T", "evict-host-too-much",
    ),
    "B24-parent-not-evicted": (
        "write_back", 1, 8, 9,
        "A 00; F; A 0011; F; E 4", "evict-parent-not-pushed",
    ),
    "B24-slots-kept-after-the-write-back": (
        "write_back", 1, 8, 9,
        "A 11; F; E 2", "write-back-keeps-slots",
    ),
    "B21-writes-not-acknowledged-while-a-load-runs": (
        "write_through", 1, 8, 20,
        "A 01; F; T; E 2; A 12; F; L; T", "write-acks-not-polled",
    ),
    "B43-host-slots-freed-under-a-running-load": (
        "write_back", 1, 8, 9,
        "A 01; F; E 2; A 12; F; E 2; Q; Q; S; T", "load-gives-up-its-source",
    ),
    "B45-revived-tokens-not-counted": (
        "write_through", 1, 8, 20,
        "A 01; F; T; E 2; I 01; T", "revived-not-evictable",
    ),
    "B46-lock-skips-the-node": (
        "write_through", 1, 8, 20,
        "I 12; I 122; T; K 122; E 1", "lock-skips-node",
    ),
    "B55-two-loads-in-one-batch": (
        "write_through", 1, 8, 20,
        "A 01; F; A 12; F; T; E 4; Q; Q; S; T", "merge-reverses-a-side",
    ),
    "B53-second-plane-stays-behind": (
        "write_through", 1, 8, 20,
        "A 01; F; T", "second-plane-not-copied",
    ),
    "B54-last-page-dropped": (
        "write_through", 1, 8, 20,
        "A 012; F; T", "last-page-not-copied",
    ),
    "B26-chunk-aborted": (
        "write_through", 1, 16, 40,
        "A 01201201/4; X; T; E 4; M 0120", None,
    ),
    "B27-one-request-twice": (
        "write_through_selective", 1, 16, 40,
        "A 0120; D 1; F; T; E 16; M 0120", "selective-writes-at-once",
    ),
}  # fmt: skip


def run(driver, program):
    run_on(driver, program)
    driver.wind_down()


def run_on(driver, program):
    for step in program.split("; "):
        call, _, rest = step.partition(" ")
        text, _, chunk = rest.partition("/")
        tokens = tuple(int(c) for c in text) if call in "AWMIK" else ()
        last = len(driver.requests) - 1
        match call:
            case "A":
                driver.admit(tokens, None, int(chunk) if chunk else None)
                driver.cache(len(driver.requests) - 1)
            case "W":
                driver.admit(tokens)
            case "D":
                driver.decode(last, int(text))
            case "F":
                driver.finish(last)
            case "X":
                driver.abort(last)
            case "E":
                driver.evict(int(text))
            case "T":
                driver.settle()
            case "M":
                driver.match(tokens)
            case "R":
                driver.reset()
            case "P":
                driver.proceed(last, int(text))
            case "I":
                driver.insert(tokens)
            case "K":
                driver.hold(tokens)
            case "L" | "Q":
                driver.reload(0, None, call == "L")
            case "S":
                driver.start_loads()


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
    run_on(d, "I 01; T; E 2; Q; S")
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
        run_on(d, "T; E 8; L; L; L; L")
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
    run_on(d, "T; E 16")
    waits = waits_of(d)
    run_on(d, "L; L; L")
    assert not waits
    assert sum(transfer.kind == "load" for transfer in d.bench.host().transfers) == 3
    run_on(d, "L")
    assert len(waits) == 1
    run_on(d, "L; L")
    assert len(waits) == 1
    while d.machine.runnable():
        d.work((0,))
    d.poll()
    run_on(d, "L; L")  # what is acknowledged is finished
    assert len(waits) == 1
    run_on(d, "T")
    d.wind_down()


def test_a_forward_that_is_waited_for_ends_the_loads_before_it(monkeypatch):
    target = resolve("refcache")
    less = target.capabilities - {"load_slots", "fences"}
    monkeypatch.setattr(type(target), "capabilities", less)
    d = HiCacheDriver(target, size=16, host_size=40)
    for token in range(6):
        d.insert((token, 0))
    run_on(d, "T; E 16; L; L")
    waits = waits_of(d)
    d.admit((2, 0, 1))  # the third load, and a forward
    run_on(d, "L; L; L")
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
