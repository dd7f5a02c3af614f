"""Suite ``sequences.state``: a cache through its sequences, within the traits of the target."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from refcache.oracle import SequencesDriver, Traits
from refcache.testing.machines.base import DriverMachine
from refcache.testing.machines.strategies import (
    chunks,
    index,
    namespaces,
    prompts,
    sequences_configs,
    token,
)


class SequencesMachine(DriverMachine):
    """Sequences over a few pages, so that most steps find room taken, or take it from the cache."""

    d: SequencesDriver
    make = SequencesDriver

    @initialize(data=st.data())
    def begin_within(self, data: Any) -> None:
        traits: Traits = self.target.traits
        self.begin(**data.draw(sequences_configs(traits)))

    @rule(tokens=prompts, extra_key=namespaces)
    def start(self, tokens: Any, extra_key: Any) -> None:
        self.d.start(tokens, extra_key)

    @rule(tokens=prompts, extra_key=namespaces, chunk=chunks)
    def start_twins(self, tokens: Any, extra_key: Any, chunk: Any) -> None:
        """Two sequences compute one prompt; the second one's pages are duplicates."""
        for _ in range(2):
            self.d.start(tokens, extra_key)
        for which in range(len(self.d.running)):
            self.d.launch(which, chunk)

    @rule(tokens=prompts, extra_key=namespaces, other=prompts)
    def crowd(self, tokens: Any, extra_key: Any, other: Any) -> None:
        """Another sequence needs room while one has only what it found."""
        self.one_ends(tokens, extra_key)
        self.d.start(tokens, extra_key)
        self.d.start(other)
        self.d.run(-1)

    def one_ends(self, tokens: Any, extra_key: Any) -> None:
        """A sequence from its beginning to its end, with nothing between."""
        before = len(self.d.running)
        self.d.start(tokens, extra_key)
        if len(self.d.running) > before:
            self.d.run(-1)
            self.d.finish(-1)

    @precondition(lambda self: self.d.bench.optional("invalidate"))
    @rule(tokens=prompts, extra_key=namespaces)
    def new_weights(self, tokens: Any, extra_key: Any) -> None:
        """A namespace is invalidated; then a beginning of what was there is computed anew."""
        self.one_ends(tokens, extra_key)
        self.d.invalidate(extra_key)
        self.one_ends(tokens[: self.d.config.page_size], extra_key)
        self.d.start(tokens, extra_key)

    @precondition(lambda self: self.d.bench.optional("abort"))
    @rule(tokens=prompts, extra_key=namespaces, late=st.booleans())
    def cut_off(self, tokens: Any, extra_key: Any, late: bool) -> None:
        """A sequence is aborted while its launch is out, and comes again before its result."""
        before = len(self.d.running)
        self.d.start(tokens, extra_key)
        if len(self.d.running) > before:
            self.d.launch(-1, self.d.config.page_size)
            self.d.result(-1)
            self.d.launch(-1)
            self.d.abort(-1)
        self.d.start(tokens, extra_key)
        if late:
            self.d.late()

    @precondition(lambda self: self.d.running)
    @rule(index=index, chunk=chunks)
    def launch(self, index: int, chunk: Any) -> None:
        self.d.launch(index, chunk)

    @precondition(lambda self: self.d.running)
    @rule(index=index)
    def result(self, index: int) -> None:
        self.d.result(index)

    @precondition(lambda self: self.d.running)
    @rule(index=index)
    def run_all(self, index: int) -> None:
        self.d.run(index)

    @precondition(lambda self: self.d.running)
    @rule(index=index, token=token, count=st.integers(1, 3))
    def decode(self, index: int, token: int, count: int) -> None:
        for _ in range(count):
            self.d.decode(index, token)

    @precondition(lambda self: self.d.running)
    @rule(index=index, again=st.booleans(), last=st.sampled_from([None, 0, 1]))
    def finish(self, index: int, again: bool, last: Any) -> None:
        self.d.finish(index, again, last)

    @precondition(lambda self: self.d.running)
    @rule(index=index)
    def twin(self, index: int) -> None:
        self.d.twin(index)

    @precondition(lambda self: self.d.running)
    @rule(index=index)
    def abort(self, index: int) -> None:
        self.d.abort(index)

    @precondition(lambda self: self.d.bench.late)
    @rule()
    def late(self) -> None:
        self.d.late()

    @precondition(lambda self: self.d.running)
    @rule(index=index)
    def preempt(self, index: int) -> None:
        self.d.preempt(index)

    @precondition(lambda self: self.d.waiting)
    @rule()
    def resume(self) -> None:
        self.d.resume()

    @precondition(lambda self: self.d.running and self.d.bench.optional("fork"))
    @rule(index=index, tokens=st.tuples(token, token))
    def fork(self, index: int, tokens: Any) -> None:
        """Two samples of one prompt go on, each its own way."""
        self.d.run(index)
        self.d.fork(index)
        self.d.decode(index, tokens[0])
        self.d.decode(len(self.d.running) - 1, tokens[1])

    @precondition(lambda self: self.d.bench.optional("fork"))
    @rule(tokens=prompts, extra_key=namespaces, other=prompts)
    def fork_stays(self, tokens: Any, extra_key: Any, other: Any) -> None:
        """One sample of a prompt goes on while another sequence needs the room of the other."""
        first = len(self.d.running)
        self.d.start(tokens, extra_key)
        if len(self.d.running) > first:
            self.d.run(-1)
            self.d.fork(-1)
            self.d.finish(first)
            self.d.start(other)
            self.d.run(-1)

    @precondition(lambda self: self.d.bench.optional("invalidate"))
    @rule(extra_key=namespaces)
    def invalidate(self, extra_key: Any) -> None:
        self.d.invalidate(extra_key)

    @precondition(lambda self: not self.d.running and self.d.bench.optional("reset"))
    @rule()
    def reset(self) -> None:
        self.d.reset()
