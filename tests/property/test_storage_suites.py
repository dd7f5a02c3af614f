"""Suites ``storage.state`` and ``storage.faults``; and many operations with real threads."""

import os
import random
import resource
import threading

import pytest

from refcache.oracle import TierDriver, Violation, resolve
from refcache.oracle.drivers.tier.store import QUERIES, READS, WRITES, WatchedStore
from refcache.planted import all_bugs, find
from refcache.runtime import ImmediateRuntime
from refcache.runtime.threads import IssuingThread
from refcache.testing import hunt, run_suite
from storage_rig import Rig

BUGS = [bug for bug in all_bugs() if bug.suite in ("storage.state", "storage.faults")]
QUICK = {"failed-read-has-no-end", "keys-without-namespace", "aborted-prefetch-occupies"}


@pytest.mark.parametrize("suite", ["storage.state", "storage.faults"])
def test_silence(suite):
    result = run_suite(suite, resolve("refcache"), max_examples=40, seed=7)
    assert result.verdict == "ok", result.failure and result.failure.text
    assert result.steps > 5 * result.cases > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("suite", ["storage.state", "storage.faults"])
def test_silence_for_long(suite, seed):
    result = run_suite(suite, resolve("refcache"), max_examples=2000, seed=seed)
    assert result.verdict == "ok", result.failure and result.failure.text


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, marks=() if b.name in QUICK else pytest.mark.nightly) for b in BUGS],
    ids=lambda b: b.name,
)
def test_a_planted_bug_is_caught(bug):
    caught = hunt(bug)
    assert caught.counts, caught.failure and caught.failure.text


def test_there_are_enough_bugs_and_most_model_a_report():
    assert len(BUGS) >= 13
    assert sum(bug.report != "slip" for bug in BUGS) > len(BUGS) / 2


def test_a_program_by_hand():
    d = TierDriver(resolve("refcache"), page_size=2, size=8, host_size=32)
    d.insert((1, 2, 3, 4))
    d.settle()
    d.forget()
    d.queue((1, 2, 3, 4, 5))
    d.progress(0)
    assert len(d.bench.waiting) == 1
    d.settle()
    assert not d.bench.waiting
    assert d.bench.on_host_only(0) == ((1, 2, 3, 4), None)
    d.wind_down()


def test_a_request_that_nobody_lets_go_is_found_by_name():
    with find("failed-query-has-no-answer").active():
        d = TierDriver(resolve("refcache"), page_size=2, size=8, host_size=32, fault_rate=0.99)
        d.queue((1, 2, 3, 4, 5))
        with pytest.raises(Violation, match="ST9"):
            d.settle()


class RealThreads(ImmediateRuntime):
    """Copies are done at once; storage has threads of the system."""

    def Thread(self, name):
        return IssuingThread(name, lambda: None)


class Storm:
    """Operations in an order that is drawn, on a cache whose store meets every fault at 10 %."""

    def __init__(self, seed):
        self.random, self.broken = random.Random(seed), []
        note = lambda rule, evidence: self.broken.append((rule, evidence))  # noqa: E731
        self.store = WatchedStore(0.1, seed, note)
        self.rig = Rig(self.store, "wait_complete", size=64, host=512, runtime=RealThreads())
        self.waiting, self.count, self.taken = {}, 0, 0

    def run(self, operations):
        names = ["insert", "queue", "queue", "poll", "poll", "progress", "progress", "abort"]
        for number in range(operations):
            name = self.random.choice(names)
            if number % 997 == 0:
                name = "detach"
            if number % 1499 == 0:
                name = "reset"
            getattr(self, name)()
        self.settle()

    def prompt(self):
        first = self.random.randrange(40)
        return [first, *[first * 7 % 50 + i for i in range(self.random.randrange(1, 12))]]

    def insert(self):
        tokens = self.prompt()
        tokens = tokens[: len(tokens) // 2 * 2]
        if self.rig.allocator.available_size() < 2 * len(tokens):
            self.rig.forget()
        if tokens and self.rig.match(tokens) == (0, 0):
            self.rig.insert(tokens)

    def queue(self):
        rid, self.count = f"q{self.count}", self.count + 1
        tokens = self.prompt()
        self.rig.prefetch(rid, tokens)
        if rid in self.rig.tree.ongoing_prefetch:
            self.waiting[rid] = tokens

    def poll(self):
        self.rig.poll()

    def progress(self):
        for rid in list(self.waiting):
            if self.rig.tree.check_prefetch_progress(rid):
                tokens = self.waiting.pop(rid)
                came = self.rig.tree.pop_prefetch_loaded_tokens(rid)
                self.taken += came
                if came:
                    assert self.rig.rows(tokens) == tokens[: len(self.rig.rows(tokens))]

    def abort(self):
        for rid in list(self.waiting)[:1]:
            self.rig.tree.release_aborted_request(rid)
            del self.waiting[rid]

    def detach(self):
        assert self.rig.tree.detach_storage_backend()[0]
        assert all(self.rig.tree.check_prefetch_progress(rid) for rid in self.waiting)
        self.waiting.clear()
        options = '{"prefetch_threshold": 2}'
        assert self.rig.tree.attach_storage_backend(self.store, options, None, "wait_complete")[0]

    def reset(self):
        self.rig.tree.reset()
        self.rig.allocator.clear()
        assert all(self.rig.tree.check_prefetch_progress(rid) for rid in self.waiting)
        self.waiting.clear()

    def settle(self):
        for _ in range(4):
            for thread in ("prefetch_thread", "prefetch_io_aux_thread", "backup_thread"):
                getattr(self.rig.storage, thread).drain()
            self.rig.poll()
            self.progress()
        assert not self.waiting
        assert not self.rig.tree.ongoing_backup
        self.rig.forget()
        self.rig.poll()
        assert self.rig.host.available_size() == self.rig.host.size
        assert self.rig.storage.prefetch_tokens_occupied == 0
        assert self.rig.tree.detach_storage_backend()[0]


def held():
    """Threads of this process, and handles."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("operations", [3_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_many_operations_with_every_fault(operations):
    before = held()
    storm = Storm(seed=operations)
    storm.run(operations)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"{operations} operations, faults {dict(storm.store.met)}, {storm.taken} tokens taken, "
          f"{storm.rig.storage.failed} operations failed, peak memory {peak} MiB")  # fmt: skip
    assert not storm.broken
    assert set(storm.store.met) == {*READS, *WRITES, *QUERIES}
    assert storm.taken > operations / 100
    assert held() == before
