"""The rules of the simulated machine, numbered as in docs/simulated_machine.md."""

from queue import Empty

import pytest
import torch

from refcache.errors import InvalidArgument, NeverDone
from refcache.runtime import (
    DeadIndex,
    ImmediateRuntime,
    Part,
    RaceFound,
    Region,
    SimulatedRuntime,
    Tracker,
    drawn,
    eager,
    lazy,
)


class Pool:
    """Something to name in a region."""


def cell(pool, slot=0):
    return (Region(pool, 0, 0, slot),)


@pytest.fixture
def machine():
    """Runs nothing until the host waits."""
    return SimulatedRuntime(lazy, Tracker())


@pytest.fixture
def ran(machine):
    return lambda: [access.name for access in machine.history]


def nothing():
    pass


# Rule 1: launches read when they run; a launch only touches bytes.


def test_launch_reads_its_source_and_its_indices_when_it_runs(machine):
    source, index, out = torch.tensor([1, 2]), torch.tensor([0]), torch.zeros(1, dtype=torch.long)
    machine.launch("gather", lambda i: out.copy_(source[i]), indices=(index,))
    source[1] = 7
    index[0] = 1
    machine.synchronize()
    assert out.item() == 7


def test_host_code_runs_at_once_and_leaves_launches_pending(machine, ran):
    machine.launch("late", nothing)
    machine.host_access("now", nothing)
    assert ran() == ["now"]


@pytest.mark.parametrize("what", ["launch", "record", "wait", "query", "synchronize"])
def test_launch_must_not_call_the_machine(machine, what):
    event = machine.Event()
    event.record()
    calls = {
        "launch": lambda: machine.launch("inner", nothing),
        "record": event.record,
        "wait": event.wait,
        "query": event.query,
        "synchronize": event.synchronize,
    }
    machine.launch("outer", calls[what])
    with pytest.raises(InvalidArgument, match="inside 'outer'"):
        machine.synchronize()
    calls[what]()  # the machine is usable again


# Rule 2: streams are FIFOs; the default stream orders only itself.


def test_stream_is_a_fifo(ran):
    machine = SimulatedRuntime(drawn([1, 1, 1, 2, 2, 2]))
    for name in "abc":
        machine.launch(name, nothing)
    machine.synchronize()
    assert [access.name for access in machine.history] == ["a", "b", "c"]


def test_default_stream_orders_only_itself(machine):
    pool, side = Pool(), machine.Stream("side")
    machine.launch("on default", nothing, writes=cell(pool))
    with machine.stream(side), pytest.raises(RaceFound, match=r"'on default'.*'on side'"):
        machine.launch("on side", nothing, writes=cell(pool))


@pytest.mark.parametrize("how", ["wait_stream", "wait_event", "event.wait", "record_event"])
def test_wait_stream_is_record_and_wait(machine, ran, how):
    side, main = machine.Stream("side"), machine.current_stream()
    machine.launch("before", nothing)
    if how == "wait_stream":
        side.wait_stream(main)
    elif how == "record_event":
        side.wait_event(main.record_event())
    else:
        event = machine.Event()
        assert main.record_event(event) is event
        side.wait_event(event) if how == "wait_event" else event.wait(side)
    with machine.stream(side):
        machine.launch("after", nothing)
    side.synchronize()
    assert ran() == ["before", "after"]


def test_wait_stream_does_not_wait_for_later_work(machine, ran):
    side, main = machine.Stream(), machine.current_stream()
    side.wait_stream(main)
    machine.launch("later", nothing)
    with machine.stream(side):
        machine.launch("on side", nothing)
    side.synchronize()
    assert ran() == ["on side"]


# Rule 3: record captures the tail; re-recording replaces; never recorded is done.


def test_event_never_recorded_is_done_and_orders_nothing(machine, ran):
    event, side = machine.Event(), machine.Stream()
    machine.launch("pending", nothing)
    assert event.query()
    event.synchronize()
    side.wait_event(event)
    assert ran() == []
    assert side.query()


def test_second_record_replaces_the_capture(machine, ran):
    event = machine.Event()
    event.record()
    machine.launch("a", nothing)
    event.record()
    assert not event.query()
    event.synchronize()
    assert ran() == ["a"]


def test_wait_issued_before_a_second_record_keeps_the_old_capture(machine, ran):
    event, side = machine.Event(), machine.Stream("side")
    machine.launch("a", nothing)
    event.record()
    side.wait_event(event)
    machine.launch("b", nothing)
    event.record()
    with machine.stream(side):
        machine.launch("c", nothing)
    side.synchronize()
    assert ran() == ["a", "c"]


def test_query_is_true_iff_the_captured_work_is_done(machine):
    event = machine.Event()
    machine.launch("captured", nothing)
    event.record()
    machine.launch("not captured", nothing)
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert not machine.current_stream().query()
    machine.synchronize()
    assert machine.current_stream().query()


def test_capture_includes_the_waits_before_it(machine):
    side, event = machine.Stream(), machine.Event()
    machine.launch("a", nothing)
    side.wait_stream(machine.current_stream())
    event.record(side)
    assert not event.query()
    event.synchronize()
    assert [access.name for access in machine.history] == ["a"]


# Rule 4: happens-before edges of the host.


def write_on_default_then_on(machine, between):
    """Two writes of one cell on two streams; only the host, in ``between``, can order them."""
    pool, side, event = Pool(), machine.Stream("side"), machine.Event()
    machine.launch("first", nothing, writes=cell(pool))
    event.record()
    between(event)
    with machine.stream(side):
        machine.launch("second", nothing, writes=cell(pool))
    machine.synchronize()


def test_synchronize_orders_the_host_and_what_it_issues(machine):
    write_on_default_then_on(machine, lambda event: event.synchronize())


def test_true_query_orders_the_host():
    machine = SimulatedRuntime(eager, Tracker())
    write_on_default_then_on(machine, lambda event: event.query())


def test_false_query_gives_no_edge(machine):
    with pytest.raises(RaceFound):
        write_on_default_then_on(machine, lambda event: event.query())


def test_work_that_is_done_but_was_not_asked_about_gives_no_edge():
    machine = SimulatedRuntime(eager, Tracker())
    with pytest.raises(RaceFound):
        write_on_default_then_on(machine, lambda event: None)


def test_launch_comes_after_what_the_host_did_before_issuing_it(machine):
    pool = Pool()
    machine.host_access("fill", nothing, writes=cell(pool))
    machine.launch("read", nothing, reads=cell(pool))
    machine.synchronize()
    machine.launch("late", nothing, reads=cell(pool))
    with pytest.raises(RaceFound, match="'overwrite'"):
        machine.host_access("overwrite", nothing, writes=cell(pool))


def test_host_threads_are_actors_with_their_own_clock(machine):
    pool = Pool()
    with machine.actor("io"):
        machine.host_access("io writes", nothing, writes=cell(pool))
    with pytest.raises(RaceFound, match=r"host thread 'io'.*host thread 'main'"):
        machine.host_access("main reads", nothing, reads=cell(pool))


def test_host_thread_starts_after_what_its_starter_did(machine):
    pool = Pool()
    machine.host_access("main writes", nothing, writes=cell(pool))
    with machine.actor("io"):
        machine.host_access("io reads", nothing, reads=cell(pool))
    machine.host_access("main reads", nothing, reads=cell(pool))
    with machine.actor("io"), pytest.raises(RaceFound):
        machine.host_access("io writes", nothing, writes=cell(pool))


def test_host_threads_have_their_own_current_stream(machine):
    side = machine.Stream()
    with machine.stream(side):
        with machine.actor("io"):
            assert machine.current_stream() is machine.default_stream()
        assert machine.current_stream() is side


def test_lock_orders_host_threads(machine):
    pool, lock = Pool(), machine.Lock()
    with machine.actor("io"), lock:
        machine.host_access("io writes", nothing, writes=cell(pool))
    with lock:
        machine.host_access("main reads", nothing, reads=cell(pool))


def test_queue_orders_host_threads(machine):
    pool, queue = Pool(), machine.Queue()
    with pytest.raises(Empty):
        queue.get_nowait()
    with machine.actor("io"):
        machine.host_access("io writes", nothing, writes=cell(pool))
        queue.put("written")
        machine.host_access("io writes more", nothing, writes=cell(pool, 1))
    assert not queue.empty()
    assert queue.get_nowait() == "written"
    assert queue.empty()
    machine.host_access("main reads", nothing, reads=cell(pool))
    with pytest.raises(RaceFound):  # put after the second write would have been needed
        machine.host_access("main reads on", nothing, reads=cell(pool, 1))


# Rule 5: pageable copies.


def test_h2d_from_pageable_memory_reads_its_source_at_the_call(machine):
    source, out = torch.tensor([1]), torch.zeros(1, dtype=torch.long)
    machine.h2d(out, source)
    source[0] = 2
    assert out.item() == 0  # it returned at once
    machine.synchronize()
    assert out.item() == 1


def test_h2d_from_pinned_memory_reads_late(machine):
    source, out = torch.tensor([1]), torch.zeros(1, dtype=torch.long)
    machine.h2d(out, source, pinned=True)
    source[0] = 2
    machine.synchronize()
    assert out.item() == 2


def test_overwriting_a_pinned_source_that_was_not_copied_yet_is_a_race(machine):
    source, out = torch.tensor([1]), torch.zeros(1, dtype=torch.long)
    machine.h2d(out, source, pinned=True)
    with pytest.raises(RaceFound):
        machine.host_access("reuse", nothing, writes=cell(source))


def test_overwriting_a_pageable_source_is_not(machine):
    source, out = torch.tensor([1]), torch.zeros(1, dtype=torch.long)
    machine.h2d(out, source)
    machine.host_access("reuse", nothing, writes=cell(source))
    machine.synchronize()


def test_d2h_to_pageable_memory_blocks_and_to_pinned_does_not(machine, ran):
    source, out = torch.tensor([1]), torch.zeros(1, dtype=torch.long)
    machine.d2h(out, source, pinned=True)
    assert ran() == []
    machine.d2h(out, source)
    assert ran() == ["d2h", "d2h"]
    machine.host_access("use", nothing, reads=cell(out))


def test_reading_the_result_of_a_pinned_d2h_early_is_a_race(machine):
    source, out = torch.tensor([1]), torch.zeros(1, dtype=torch.long)
    machine.d2h(out, source, pinned=True)
    with pytest.raises(RaceFound, match="slot 0"):
        machine.host_access("use", nothing, reads=cell(out))


def test_host_sync_waits_for_the_current_stream_only(machine, ran):
    side = machine.Stream()
    with machine.stream(side):
        machine.launch("side", nothing)
    machine.launch("current", nothing)
    machine.host_sync()
    assert ran() == ["current"]


# Rule 6: a free is no access; history survives reuse.


def test_new_owner_must_come_after_the_old_owners_last_access(machine):
    pool, side = Pool(), machine.Stream("side")
    machine.launch("old owner", nothing, writes=cell(pool))
    # The slot is freed and handed out again here: no access, nothing to report.
    with machine.stream(side), pytest.raises(RaceFound):
        machine.launch("new owner", nothing, writes=cell(pool))


def test_history_of_a_dropped_index_tensor_is_forgotten(machine):
    for stream in (machine.Stream(), machine.Stream()):
        with machine.stream(stream):
            # The same address, and often the same object id, twice.
            machine.launch("use", nothing, writes=cell(torch.zeros(1)))
    machine.synchronize()
    assert not machine.tracker._pools


# Rule 7: inner signals.


def test_launch_signals_its_parts_in_any_order(machine, ran):
    flags, out = machine.flags(3), []
    assert all(event.query() for event in flags.parts)  # never launched
    parts = [Part(f"part {i}", lambda i=i: out.append(i), (), ()) for i in range(3)]
    machine.launch("before", lambda: out.append("before"))
    machine.launch_parts("load", parts, flags, nothing)
    machine.launch("after", lambda: out.append("after"))
    assert out == []
    flags.parts[1].synchronize()
    assert out == ["before", 1]
    assert not flags.parts[0].query()
    assert not flags.finished.query()
    flags.finished.synchronize()
    assert out == ["before", 1, 0, 2]
    machine.synchronize()
    assert ran() == ["before", "load part 1", "load part 0", "load part 2", "after"]


@pytest.mark.parametrize("waited", [0, 1])
def test_inner_signal_orders_its_part_and_no_other(machine, waited):
    pool, side, flags = Pool(), machine.Stream("side"), machine.flags(2)
    parts = [Part(f"part {i}", nothing, (), cell(pool, i)) for i in range(2)]
    with machine.stream(side):
        machine.launch_parts("load", parts, flags, nothing)
    flags.parts[waited].wait()
    machine.launch("read the part", nothing, reads=cell(pool, waited))
    machine.synchronize()
    machine.launch("read the other", nothing, reads=cell(pool, 1 - waited))
    machine.synchronize()  # ordered through the host
    with machine.stream(side):
        machine.launch_parts("load", parts, flags, nothing)
    flags.parts[waited].wait()
    with pytest.raises(RaceFound, match=rf"'load part {1 - waited}' .*'read the other early'"):
        machine.launch("read the other early", nothing, reads=cell(pool, 1 - waited))


def test_launch_of_parts_comes_after_and_before_the_rest_of_its_stream(machine):
    pool, flags, side = Pool(), machine.flags(2), machine.Stream("side")
    parts = [Part(f"part {i}", nothing, (), cell(pool, i)) for i in range(2)]
    for _ in range(2):
        machine.launch("before", nothing, writes=cell(pool, 0) + cell(pool, 1))
        machine.launch_parts("load", parts, flags, nothing)
        machine.launch("after", nothing, reads=cell(pool, 0) + cell(pool, 1))
    with machine.stream(side):
        flags.finished.wait()
        machine.launch("behind", nothing, reads=cell(pool, 0) + cell(pool, 1))
    machine.synchronize()


def test_driver_is_asked_after_a_launch_of_parts():
    asked = []

    def driver(machine, point):
        asked.append((point, len(machine.runnable())))
        return 1

    machine = SimulatedRuntime(driver)
    parts = [Part(f"part {i}", nothing, (), ()) for i in range(2)]
    machine.launch_parts("load", parts, machine.flags(2), nothing)
    assert asked == [("call", 2)]


@pytest.mark.parametrize("count", [1, 3])
def test_parts_and_flags_that_do_not_match_are_refused_before_anything_is_issued(count):
    parts = [Part(f"part {i}", nothing, (), ()) for i in range(count)]
    machine = SimulatedRuntime(lazy)
    flags = machine.flags(2)
    with pytest.raises(InvalidArgument, match=f"'load' of {count} parts: expected 2"):
        machine.launch_parts("load", parts, flags, nothing)
    assert machine.runnable() == []
    assert all(event.query() for event in flags.parts)


def test_two_streams_that_wait_for_each_others_past_lose_no_launch(machine, ran):
    # Asking whether one may go on asks the other, which asks the first one again.
    a, b, first = machine.Stream("a"), machine.Stream("b"), machine.Event()
    machine.launch("slow", nothing)
    first.record()
    b.wait_event(first)
    of_b = b.record_event()
    a.wait_event(of_b)
    b.wait_event(a.record_event())
    with machine.stream(a):
        machine.launch("on a", nothing)
    machine.synchronize()
    assert ran() == ["slow", "on a"]


# Rule 8: lifetime of index tensors.


def test_index_tensor_dropped_before_the_launch_ran_is_reported(machine):
    machine.launch("copy", lambda i: None, indices=(torch.tensor([1, 2]),))
    with pytest.raises(DeadIndex, match="index tensor 0 of 'copy'"):
        machine.synchronize()


def test_record_stream_keeps_it_alive(machine):
    seen = []
    index = torch.tensor([9, 1, 2])
    machine.launch("copy", lambda i: seen.append(i.tolist()), indices=(index[1:],))
    machine.record_stream(index, machine.current_stream())
    del index
    machine.synchronize()
    assert seen == [[1, 2]]


def test_record_stream_of_another_stream_does_not(machine):
    index = torch.tensor([1, 2])
    machine.launch("copy", lambda i: None, indices=(index,))
    machine.record_stream(index, machine.Stream())
    del index
    with pytest.raises(DeadIndex):
        machine.synchronize()


def test_record_stream_holds_only_until_the_stream_gets_there(machine):
    index = torch.tensor([1, 2])
    machine.launch("copy", lambda i: None, indices=(index,))
    machine.record_stream(index, machine.current_stream())
    machine.launch("later", lambda i: None, indices=(index,))
    del index
    with pytest.raises(DeadIndex, match="'later'"):
        machine.synchronize()


def test_dead_index_that_is_only_collected_runs_on_the_copy():
    machine, seen = SimulatedRuntime(lazy, Tracker(stop=False)), []
    machine.launch("copy", lambda i: seen.append(i.tolist()), indices=(torch.tensor([1, 2]),))
    machine.synchronize()
    assert seen == [[1, 2]]
    assert [type(report) for report in machine.tracker.reports] == [DeadIndex]


# Rule 9: choices.


def two_streams(driver):
    machine = SimulatedRuntime(driver)
    for stream in ("s", "t"):
        with machine.stream(machine.Stream(stream)):
            for number in range(2):
                machine.launch(f"{stream}{number}", nothing)
    machine.synchronize()
    return [access.name for access in machine.history]


@pytest.mark.parametrize(
    ("choices", "order"),
    [
        ([], ["s0", "s1", "t0", "t1"]),
        ([0, 0, 0, 0], ["s0", "s1", "t0", "t1"]),
        # Nothing at the calls; then one of the ready streams at a time.
        ([1, 1, 1, 1, 3, 3, 2, 2], ["t0", "t1", "s0", "s1"]),
        ([1, 1, 1, 1, 2, 3, 2, 3], ["s0", "t0", "s1", "t1"]),
        # At the fourth call: two launches, then no more.
        ([1, 1, 1, 3, 2, 1, 3, 2], ["t0", "s0", "t1", "s1"]),
    ],
)
def test_drawn_choices_pick_streams_and_zero_runs_everything(choices, order):
    assert two_streams(drawn(choices)) == order


def test_eager_runs_each_launch_at_its_call():
    machine, out = SimulatedRuntime(eager), []
    machine.launch("a", lambda: out.append("a"))
    assert out == ["a"]


def test_lazy_runs_only_what_the_host_waits_for(machine, ran):
    streams = [machine.Stream(name) for name in "abc"]
    for stream in streams:
        with machine.stream(stream):
            machine.launch(stream.name, nothing)
    streams[2].wait_stream(streams[1])
    streams[2].synchronize()
    assert ran() == ["c", "b"]
    machine.synchronize()
    assert ran() == ["c", "b", "a"]


# Rule 10: the pool says which tier a slot is of.


def test_equal_slots_of_two_pools_are_different_cells(machine):
    device, host = Pool(), Pool()
    machine.launch("one", nothing, writes=cell(device))
    with machine.stream(machine.Stream()):
        machine.launch("two", nothing, writes=cell(host))
    machine.synchronize()


# Rule 11: the tracker is optional.


def test_without_a_tracker_nothing_is_reported_and_regions_are_not_looked_at():
    machine = SimulatedRuntime(lazy)
    machine.host_access("touch", nothing, writes=[None])
    for _ in range(2):
        with machine.stream(machine.Stream()):
            machine.launch("write", lambda i: None, writes=[None], indices=(torch.zeros(1),))
    machine.synchronize()


# Rule 12: what a thread has promised is not done before it is kept.


def test_job_comes_after_its_submit_and_the_jobs_before_it(machine, ran):
    pool, thread = Pool(), machine.Thread("io")
    machine.host_access("before", lambda: None, writes=cell(pool))
    for name in ("first", "second"):
        thread.submit(lambda name=name: machine.launch(name, lambda: None, reads=cell(pool)))
    assert ran() == ["before"]
    thread.drain()
    machine.synchronize()
    assert ran() == ["before", "first", "second"]
    machine.host_access("after", lambda: None, writes=cell(pool))


def test_promised_event_is_not_done_before_a_thread_recorded_it(machine):
    stream, thread = machine.Stream("io"), machine.Thread("io")
    event = machine.promise(stream)
    assert not event.query()
    thread.submit(lambda: event.record(stream))
    event.synchronize()
    assert event.query()


def test_wait_for_a_promise_orders_what_was_issued_before_it_was_kept(machine, ran):
    pool, stream, thread = Pool(), machine.Stream("io"), machine.Thread("io")
    event = machine.promise(stream)

    def copy():
        with machine.stream(stream):
            machine.launch("copy", lambda: None, writes=cell(pool))
            event.record()

    machine.current_stream().wait_event(event)
    machine.launch("read", lambda: None, reads=cell(pool))
    other = machine.Stream("other")
    other.wait_stream(machine.current_stream())  # what waits for the waiter is ordered as well
    with machine.stream(other):
        machine.launch("write", lambda: None, writes=cell(pool))
    thread.submit(copy)
    machine.synchronize()
    assert ran() == ["copy", "read", "write"]


def test_flags_of_a_thread_are_raised_one_by_one(machine):
    stream, thread, flags = machine.Stream("io"), machine.Thread("io"), machine.flags(2)
    assert flags.parts[1].query()
    machine.expect(flags, stream)
    assert flags.epoch == 1
    assert not any(event.query() for event in (*flags.parts, flags.finished))

    def job(part):
        with machine.stream(stream):
            machine.raise_flag(flags, part)

    for part in (1, 0):
        thread.submit(lambda part=part: job(part))
        flags.parts[part].synchronize()
        assert [event.query() for event in flags.parts] == [part == 0, True]
    assert not flags.finished.query()


def test_wait_that_nothing_ends_is_reported(machine):
    machine.current_stream().wait_event(machine.promise(machine.Stream("io")))
    machine.launch("never", lambda: None)
    with pytest.raises(NeverDone, match="no thread has a job left"):
        machine.host_sync()


def test_immediate_machine_has_the_whole_vocabulary():
    machine, out = ImmediateRuntime(), []
    stream, event = machine.Stream("s"), machine.Event()
    with machine.stream(stream), machine.actor("io"), machine.Lock():
        assert machine.current_stream() is stream
        machine.launch("a", lambda i: out.append(i.tolist()), indices=(torch.tensor([1]),))
        flags = machine.flags(1)
        machine.launch_parts(
            "b", [Part("part", nothing, (), ())], flags, lambda values: out.append(values.tolist())
        )
    machine.host_access("c", lambda: out.append("c"))
    assert out == [[1], [0], "c"]
    assert flags.parts[0].query()
    assert flags.epoch == 1
    assert machine.current_stream() is machine.default_stream()
    event.record(stream)
    event.wait()
    stream.wait_event(event)
    stream.wait_stream(machine.default_stream())
    assert stream.record_event(event) is event
    assert stream.record_event().query()
    assert stream.query()
    source, there, back = torch.tensor([1]), torch.zeros(1).long(), torch.zeros(1).long()
    machine.h2d(there, source)
    machine.d2h(back, there, pinned=True)
    assert back.item() == 1
    queue = machine.Queue()
    queue.put(1)
    assert queue.get_nowait() == 1
    machine.record_stream(source, stream)
    for wait in (event.synchronize, stream.synchronize, machine.host_sync, machine.synchronize):
        wait()


def test_run_next_runs_one_launch_of_a_stream_that_can_go_on(machine, ran):
    side, blocked = machine.Stream("side"), machine.Stream("blocked")
    with machine.stream(side):
        machine.launch("a", nothing)
        machine.launch("b", nothing)
    blocked.wait_stream(side)
    with machine.stream(blocked):
        machine.launch("c", nothing)
    machine.run_next(side)
    assert ran() == ["a"]
    for stream in (blocked, machine.default_stream()):
        with pytest.raises(InvalidArgument, match="may run"):
            machine.run_next(stream)
    machine.run_next(side)
    machine.run_next(blocked)
    assert ran() == ["a", "b", "c"]
