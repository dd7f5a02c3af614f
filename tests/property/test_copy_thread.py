"""Copies that a thread issues: nothing is done before the thread has recorded it, and a thread that
fails leaves nobody waiting."""

import gc
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refcache.allocator import TokenToKVPoolAllocator
from refcache.controller import HiCacheController
from refcache.engine import (
    ModelConfig,
    RowCheck,
    SamplingParams,
    Scheduler,
    TokenizedGenerateReqInput,
)
from refcache.engine.scheduling import recovery
from refcache.errors import CopyFailed, NeverDone
from refcache.pool import MHATokenToKVPool, host_pool_for
from refcache.runtime import (
    DeadIndex,
    ImmediateRuntime,
    RaceFound,
    SimulatedRuntime,
    Tracker,
    drawn,
    eager,
    lazy,
)
from refcache.runtime.threads import IssuingThread, PromisedEvent
from refcache.tags import greedy
from refcache.types import ServerArgs

LAYERS = 2


def rig(machine):
    pool = MHATokenToKVPool(16, 1, torch.int64, 1, 2, LAYERS, "cpu", runtime=machine)
    allocator = TokenToKVPoolAllocator(16, torch.int64, "cpu", pool, runtime=machine)
    host = host_pool_for(pool, ServerArgs())
    controller = HiCacheController(allocator, host, 1, io_backend="direct")
    return SimpleNamespace(
        machine=machine, pool=pool, allocator=allocator, host=host, controller=controller
    )


def compute(r, slots, value):
    for layer in range(LAYERS):
        rows = (value * 100 + layer * 10 + slots).view(-1, 1, 1).expand(-1, 1, 2)
        r.pool.set_kv_buffer(layer, slots, rows, rows)


def backed_up(r, value):
    slots = r.allocator.alloc(2)
    compute(r, slots, value)
    host_slots = r.controller.write(slots)
    r.controller.ack_write_queue.pop().finish_event.synchronize()
    r.controller.evict_device(slots)
    return slots, host_slots


def read(r, slots):
    """What a forward sees, layer by layer, on the current stream."""
    seen = []
    for layer in range(LAYERS):
        rows = r.pool.get_key_buffer(layer)
        r.machine.launch(
            "attention",
            lambda rows=rows: seen.append(rows[slots][:, 0, 0].tolist()),
            [r.pool.region(0, layer, slots)],
        )
    return seen


def test_a_copy_is_not_done_before_its_thread_has_recorded_it():
    r = rig(SimulatedRuntime(lazy, Tracker()))
    _, host_slots = backed_up(r, 1)
    before = len(r.machine.history)
    r.controller.write(r.allocator.alloc(2))
    r.controller.load(host_slots)
    producer = r.controller.start_loading()
    events = r.controller.layer_done_counter.events[producer]
    acks = r.controller.ack_write_queue[0], r.controller.ack_load_queue[0]
    waits = [ack.finish_event for ack in acks] + [events.finish_event, *events.flags.parts]
    assert not any(event.query() for event in waits)
    assert len(r.machine.history) == before
    r.machine.synchronize()
    assert all(event.query() for event in waits)


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=60))
def test_rows_come_back_in_any_order(choices):
    r = rig(SimulatedRuntime(drawn(choices), Tracker()))
    old, host_slots = backed_up(r, 7)
    r.allocator.alloc(1)  # so that they come back somewhere else
    new = r.controller.load(host_slots)
    r.controller.layer_done_counter.set_consumer(r.controller.start_loading())
    seen = read(r, new)
    r.machine.synchronize()
    assert seen == [(700 + layer * 10 + old).tolist() for layer in range(LAYERS)]
    r.controller.reset()


def test_a_forward_may_be_issued_before_the_thread_has_run():
    r = rig(SimulatedRuntime(lazy, Tracker()))
    old, host_slots = backed_up(r, 3)
    new = r.controller.load(host_slots)
    r.controller.layer_done_counter.set_consumer(r.controller.start_loading())
    seen = read(r, new)
    assert not [a for a in r.machine.history if a.name.startswith("load")]
    r.machine.host_sync()
    assert seen == [(300 + layer * 10 + old).tolist() for layer in range(LAYERS)]


def test_the_fence_is_the_forward_stream_as_of_the_call():
    # A later forward waits for this load: if the load waited for it, neither would ever run.
    r = rig(SimulatedRuntime(lazy, Tracker()))
    forward = r.machine.Stream("forward")
    r.controller.register_forward_stream(forward)
    old, host_slots = backed_up(r, 3)
    new = r.controller.load(host_slots)
    r.controller.layer_done_counter.set_consumer(r.controller.start_loading())
    with r.machine.stream(forward):
        seen = read(r, new)
    forward.synchronize()
    assert seen == [(300 + layer * 10 + old).tolist() for layer in range(LAYERS)]


def test_reset_waits_for_the_threads():
    r = rig(SimulatedRuntime(lazy, Tracker()))
    _, host_slots = backed_up(r, 3)
    r.controller.load(host_slots)
    r.controller.start_loading()
    r.controller.reset()
    assert [a.name for a in r.machine.history][-1].startswith("load layer")
    assert not r.machine.runnable()


def test_index_tensors_are_kept_until_the_copies_ran():
    r = rig(SimulatedRuntime(lazy, Tracker()))
    r.machine.record_stream = lambda tensor, stream: None
    slots = r.allocator.alloc(2)
    r.controller.write(slots)
    with pytest.raises(DeadIndex, match="'backup'"):
        r.machine.synchronize()


@pytest.mark.parametrize("driver", [eager, lazy, drawn([2, 1, 2, 3, 2, 1])])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_thread_that_fails_raises_its_flags_and_says_so(driver, failing, monkeypatch):
    r = rig(SimulatedRuntime(driver, Tracker()))
    _, host_slots = backed_up(r, 3)
    raise_flag = r.machine.raise_flag

    def refused(flags, part):
        if part == failing:
            monkeypatch.setattr(r.machine, "raise_flag", raise_flag)
            raise OSError("the driver refused a copy")
        raise_flag(flags, part)

    monkeypatch.setattr(r.machine, "raise_flag", refused)
    new = r.controller.load(host_slots)
    r.controller.layer_done_counter.set_consumer(r.controller.start_loading())
    r.pool.get_key_buffer(LAYERS - 1)
    r.machine.host_sync()  # nobody waits for ever
    r.controller.ack_load_queue[0].finish_event.synchronize()
    assert len(new) == 2
    with pytest.raises(CopyFailed, match=r"load between the tiers, by the copy engine.*refused"):
        raise r.controller.failure
    assert isinstance(r.controller.failure.__cause__, OSError)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("failing", ["load", "write"])
def test_requests_whose_copy_failed_are_computed_instead(overlap, failing, monkeypatch):
    machine = SimulatedRuntime(drawn([2, 1, 3, 1] * 40), Tracker())
    args = ServerArgs(
        max_total_tokens=24, max_running_requests=2, context_length=32, chunked_prefill_size=4,
        enable_hierarchical_cache=True, hicache_ratio=4, hicache_io_backend="direct",
        hicache_write_policy="write_through", disable_overlap_schedule=not overlap,
    )  # fmt: skip
    wrong = []
    scheduler = Scheduler(
        args, ModelConfig(num_hidden_layers=2, vocab_size=3), runtime=machine,
        check=RowCheck(on_wrong=lambda found: wrong.append(found.rid)),
    )  # fmt: skip
    scheduler.tree_cache.load_back_threshold = 1
    controller = scheduler.tree_cache.cache_controller
    host = scheduler.tree_cache.token_to_kv_pool_host
    name = {
        "load": "load_to_device_by_copy_engine",
        "write": "backup_from_device_all_layer",
    }[failing]
    original = getattr(host, name)

    def refused(*args):
        if args[-1] != "kernel" and not failed:
            failed.append(len(scheduler.finished_reqs))
            raise OSError("the driver refused a copy")
        original(*args)

    failed = []
    monkeypatch.setattr(host, name, refused)
    prompts = [[0, 1, 2, 0, 1, 2, 0, 1], [2] * 9, [1] * 9, [0, 1, 2, 0, 1, 2, 0, 1, 2]]
    for i, tokens in enumerate(prompts):
        scheduler.submit(TokenizedGenerateReqInput(f"r{i}", tokens, SamplingParams(3)))
        while not scheduler.is_idle():
            if scheduler.step() is None:
                machine.synchronize()
    assert failed
    assert bool(wrong) == (failing == "load")  # a forward did read rows that never came
    for req in scheduler.finished_reqs:
        prompt = list(req.origin_input_ids)
        assert list(req.output_ids) == greedy(prompt, 3, 3)
        assert req.retraction_count >= (req.rid in wrong)
    assert controller.failure is None
    assert controller.io_backend == "kernel"
    machine.synchronize()


def test_ranks_do_not_compute_again_on_their_own():
    failure = CopyFailed("load")
    scheduler = SimpleNamespace(tp_cpu_group=object(), tree_cache=None)
    assert recovery.failed_copy(scheduler) is None
    with pytest.raises(CopyFailed):
        recovery.compute_again(scheduler, failure)


def test_an_order_that_no_thread_will_keep_is_reported():
    machine = SimulatedRuntime(lazy, Tracker())
    event = machine.promise(machine.default_stream())
    assert not event.query()
    with pytest.raises(NeverDone, match="no thread has a job left"):
        event.synchronize()


def test_race_behind_a_promise_is_found_when_the_launch_runs():
    # The consumer waits for the first layer's flag and reads the second.
    r = rig(SimulatedRuntime(lazy, Tracker()))
    _, host_slots = backed_up(r, 3)
    new = r.controller.load(host_slots)
    events = r.controller.layer_done_counter.events[r.controller.start_loading()]
    events.wait(0)
    r.machine.launch("attention", lambda: None, [r.pool.region(0, 1, new)])
    with pytest.raises(RaceFound, match=r"read by 'attention'.*write by 'load layer 1'"):
        r.machine.synchronize()


def test_on_the_immediate_machine_a_job_has_run():
    r = rig(ImmediateRuntime())
    old, host_slots = backed_up(r, 5)
    new = r.controller.load(host_slots)
    r.controller.start_loading()
    assert r.pool.get_key_buffer(1)[new][:, 0, 0].tolist() == (510 + old).tolist()


# ---- the real machine's thread and event ---------------------------------------------------------


class Done:
    """An event of a device that is always ready."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, args)) or True


def test_promised_event_is_done_after_it_was_recorded():
    inner = Done()
    event = PromisedEvent(inner)
    assert event.query()  # never expected: as CUDA has it
    event.expect()
    assert not event.query()
    waited = threading.Thread(target=event.synchronize)
    waited.start()
    event.record("load")
    waited.join(30)
    assert not waited.is_alive()
    assert event.query()
    event.wait("consumer")
    assert ("record", ("load",)) in inner.calls
    assert inner.calls[-1] == ("wait", ("consumer",))


def test_issuing_thread_runs_jobs_in_order_and_ends_with_its_owner():
    seen = []
    thread = IssuingThread("load thread", lambda: seen.append(threading.current_thread().name))
    thread.drain()
    assert seen == []  # it starts with the first job
    for number in range(3):
        thread.submit(lambda number=number: seen.append(number))
    thread.drain()
    assert seen == ["load thread", 0, 1, 2]
    [running] = [t for t in threading.enumerate() if t.name == "load thread"]
    del thread
    gc.collect()
    running.join(30)
    assert not running.is_alive()


def test_a_thread_that_could_not_be_prepared_still_runs_its_jobs():
    def refused():
        raise OSError("no context")

    seen = []
    thread = IssuingThread("load thread", refused)
    thread.submit(lambda: seen.append(1))
    thread.drain()
    assert seen == [1]
