"""The CUDA machine passes everything on to torch; here on a recording stand-in."""

from contextlib import nullcontext
from threading import Thread

import pytest
import torch

from refcache.errors import InvalidArgument
from refcache.runtime import CudaRuntime, Part, Runtime


class FakeCuda:
    """Records the calls of the module it stands for."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, args))
            return nullcontext(self) if name == "stream" else self

        return call


def test_every_call_becomes_torchs():
    cuda = FakeCuda()
    machine: Runtime = CudaRuntime("cuda:1", cuda)
    stream, event = machine.Stream("load"), machine.Event()
    with machine.stream(stream), machine.actor("io"), machine.Lock():
        machine.current_stream()
        machine.default_stream()
    machine.host_sync()
    machine.synchronize()
    assert cuda.calls == [
        ("Stream", ("cuda:1",)),
        ("Event", ()),
        ("stream", (stream,)),
        ("current_stream", ("cuda:1",)),
        ("default_stream", ("cuda:1",)),
        ("current_stream", ("cuda:1",)),
        ("synchronize", ()),
        ("synchronize", ("cuda:1",)),
    ]
    assert event is cuda


def test_launches_are_issued():
    cuda, out = FakeCuda(), []
    machine = CudaRuntime(None, cuda)
    machine.launch("a", lambda i: out.append(i.tolist()), indices=(torch.tensor([3]),))
    machine.host_access("b", lambda: out.append("b"))
    assert out == [[3], "b"]
    assert cuda.calls == []


def test_parts_are_one_launch_and_streams_wait_for_the_flags_epoch(monkeypatch):
    cuda, waits = FakeCuda(), []
    machine = CudaRuntime("cpu", cuda)
    monkeypatch.setattr("refcache_ops.driver.wait_flag", lambda *args: waits.append(args))
    flags = machine.flags(2)
    # The host waits: no stream may see the values before they are 0.
    assert "synchronize" in [name for name, _ in cuda.calls]
    flags.parts[1].wait()
    assert waits == []  # nothing was launched
    parts = [Part("never run", None, (), ())] * 2
    for epoch in (1, 2):
        cuda.calls.clear()

        def at_once(values: torch.Tensor, index: torch.Tensor) -> None:
            cuda.calls.append(("at once", ()))
            values.add_(index)

        machine.launch_parts("load", parts, flags, at_once, (torch.tensor([3, 4]),))
        assert [name for name, _ in cuda.calls] == ["at once", "current_stream", "record"]
        assert flags.values.tolist() == [3 * epoch, 4 * epoch]
        flags.parts[1].wait("consumer")
    flags.parts[0].wait()
    assert [wait[1:] for wait in waits] == [(1, 1, "consumer"), (1, 2, "consumer"), (0, 2, cuda)]
    assert all(wait[0] is flags.values for wait in waits)
    cuda.calls.clear()
    assert flags.parts[0].query() is cuda  # the host asks the event behind the launch
    flags.parts[0].synchronize()
    assert [name for name, _ in cuda.calls] == ["query", "synchronize"]
    with pytest.raises(InvalidArgument, match="record of a flag"):
        flags.parts[0].record()


def test_no_stream_waits_for_a_part_that_the_thread_has_yet_to_issue(monkeypatch):
    calls, machine = [], CudaRuntime("cpu", FakeCuda())
    monkeypatch.setattr("refcache_ops.driver.wait_flag", lambda *args: calls.append("wait"))
    monkeypatch.setattr("refcache_ops.driver.raise_flag", lambda *args: calls.append("raise"))
    flags = machine.flags(2)
    machine.expect(flags, "load")
    waiting = Thread(target=flags.parts[1].wait, daemon=True)
    waiting.start()
    machine.raise_flag(flags, 0)
    waiting.join(0.05)
    assert (waiting.is_alive(), calls) == (True, ["raise"])
    machine.raise_flag(flags, 1)
    waiting.join(10)
    assert (waiting.is_alive(), calls) == (False, ["raise", "raise", "wait"])


def test_part_whose_flag_the_driver_refuses_lets_no_host_thread_wait(monkeypatch):
    def refused(*args):
        raise RuntimeError("no flag")

    machine = CudaRuntime("cpu", FakeCuda())
    monkeypatch.setattr("refcache_ops.driver.raise_flag", refused)
    monkeypatch.setattr("refcache_ops.driver.wait_flag", lambda *args: None)
    flags = machine.flags(1)
    machine.expect(flags, "load")
    with pytest.raises(RuntimeError, match="no flag"):
        machine.raise_flag(flags, 0)
    flags.parts[0].wait()


def test_copies_block_the_host_only_into_pageable_memory():
    class Recorder(torch.Tensor):
        def copy_(self, source, non_blocking=False):
            self.non_blocking = non_blocking
            return super().copy_(source)

    machine, source = CudaRuntime(None, FakeCuda()), torch.tensor([3])
    for copy, pinned, non_blocking in [
        (machine.h2d, False, True),  # torch stages a pageable source before it returns
        (machine.h2d, True, True),
        (machine.d2h, False, False),
        (machine.d2h, True, True),
    ]:
        target = torch.zeros(1, dtype=torch.long).as_subclass(Recorder)
        copy(target, source, pinned=pinned)
        assert (target.item(), target.non_blocking) == (3, non_blocking)


def test_record_stream_is_for_device_tensors():
    recorded = []

    class OnDevice:
        is_cuda = True

        def record_stream(self, stream):
            recorded.append(stream)

    machine = CudaRuntime(None, FakeCuda())
    machine.record_stream(torch.zeros(1), "load")
    machine.record_stream(OnDevice(), "write")
    assert recorded == ["write"]
    queue = machine.Queue()
    queue.put(1)
    assert queue.get_nowait() == 1
