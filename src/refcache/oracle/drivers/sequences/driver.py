"""Drives a cache through its sequences, as a scheduler does: start, room, launch, result, end.

Steps are indexed modulo what runs, and one that makes no sense now does nothing. A launch and its
result are two steps, so an abort or a preemption may come between them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from refcache.oracle.drivers.sequences.bench import SequencesBench
from refcache.oracle.drivers.sequences.contents import Running
from refcache.oracle.program.driver import Driver, step
from refcache.oracle.target.base import Target
from refcache.oracle.target.config import SequencesConfig

FRESH = 9
"""A token that no other step uses: what the pool is filled with at the end."""


class SequencesDriver(Driver):
    """See the module docstring. ``waiting``: preempted sequences, which may be resumed."""

    needs = frozenset({"sequences"})
    Config = SequencesConfig
    bench_type = SequencesBench
    bench: SequencesBench
    config: SequencesConfig

    def __init__(self, target: Target, **config: Any) -> None:
        super().__init__(target, **config)
        self.count = 0
        self.waiting: list[Running] = []

    @property
    def running(self) -> list[Running]:
        """The sequences, oldest first."""
        return self.bench.running

    def _new(self, tokens: Iterable[int], namespace: str | None, prompt: int) -> Running:
        self.count += 1
        return Running(self.count - 1, namespace, 0, list(tokens), prompt)

    def _one(self, index: int) -> Running | None:
        return self.running[index % len(self.running)] if self.running else None

    # ---- steps -----------------------------------------------------------------------------------

    @step
    def start(self, tokens: Sequence[int], extra_key: str | None = None) -> None:
        """A sequence with this prompt; nothing when there is no room or enough run."""
        limit = min(self.config.context_length, self.config.size // len(self.bench.traits.windows))
        if 0 < len(tokens) <= limit and len(self.running) < self.config.max_requests:
            space = extra_key if self.bench.traits.namespaces else None
            self.bench.start(self._new(tokens, space, len(tokens)))

    @step
    def launch(self, index: int, count: int | None = None) -> None:
        """Room for up to ``count`` more tokens of those that are known, and a forward of them."""
        seq = self._one(index)
        if seq is not None and seq.computed == seq.launched < len(seq.tokens):
            left = len(seq.tokens) - seq.launched
            end = seq.launched + min(left, max(1, left if count is None else count))
            if self.bench.grow(seq, end):
                self.bench.launch(seq, end)

    @step
    def result(self, index: int) -> None:
        """The result of a launch arrives."""
        seq = self._one(index)
        if seq is not None and seq.computed < seq.launched:
            self.bench.result(seq)

    @step
    def late(self) -> None:
        """The result of a launch arrives whose sequence was aborted."""
        self._late()

    @step
    def decode(self, index: int, token: int) -> None:
        """A token is sampled, if all others are computed; then room, a forward, its result."""
        seq = self._one(index)
        if seq is None or seq.computed < seq.launched:
            return
        if seq.computed == len(seq.tokens) < self.config.context_length:
            seq.tokens.append(token)
        if seq.computed + 1 == len(seq.tokens) and self.bench.grow(seq, len(seq.tokens)):
            self.bench.launch(seq, len(seq.tokens))
            self.bench.result(seq)

    @step
    def run(self, index: int) -> None:
        """Compute everything that is known of a sequence."""
        seq = self._one(index)
        if seq is None:
            return
        self._settle(seq)
        if seq.launched < len(seq.tokens) and self.bench.grow(seq, len(seq.tokens)):
            self.bench.launch(seq, len(seq.tokens))
            self.bench.result(seq)

    @step
    def finish(self, index: int, again: bool = False, last: int | None = None) -> None:
        """A sequence ends; ``again``: its tokens come again at once, and must be found (SQ6).

        ``last``: the token that was sampled last, which has no KV; then they come with one more.
        """
        seq = self._one(index)
        if seq is None:
            return
        self._settle(seq)
        if last is not None and seq.computed == len(seq.tokens) < self.config.context_length:
            seq.tokens.append(last)
        self.bench.end(seq, "finish")
        if again:
            self._probe(seq, () if last is None else (FRESH,))

    @step
    def twin(self, index: int) -> None:
        """The same tokens come while they run; with ``caches_when="computed"`` they are found."""
        seq = self._one(index)
        if seq is not None and self.bench.traits.caches_when == "computed":
            self._settle(seq)
            self._probe(seq)

    @step
    def abort(self, index: int) -> None:
        """A sequence ends at once; the result of its launch comes later."""
        seq = self._one(index)
        if seq is None or self.bench.optional("abort") is None:
            return
        self.bench.end(seq, "abort")
        if seq.computed < seq.launched:
            self.bench.late.append(seq)

    @step
    def preempt(self, index: int) -> None:
        """A sequence gives its pages up."""
        seq = self._one(index)
        if seq is not None and self.bench.optional("preempt") is not None:
            self._settle(seq)
            self.bench.end(seq, "preempt")
            self.waiting.append(seq)

    @step
    def resume(self) -> None:
        """The sequence that was preempted first starts again, with all its tokens."""
        if self.waiting and len(self.running) < self.config.max_requests:
            seq = self.waiting[0]
            seq.tables = []
            if self.bench.start(seq):
                self.waiting.pop(0)

    @step
    def fork(self, index: int) -> None:
        """Another sample of a sequence whose tokens are computed."""
        seq = self._one(index)
        if seq is None or self.bench.optional("fork") is None:
            return
        self._settle(seq)
        if 0 < seq.computed == len(seq.tokens) and len(self.running) < self.config.max_requests:
            self.bench.fork(seq, self._new(seq.tokens, seq.namespace, seq.prompt))

    @step
    def invalidate(self, extra_key: str | None) -> None:
        """A namespace in which nothing runs is not found any more."""
        space = extra_key if self.bench.traits.namespaces else None
        if self.bench.optional("invalidate") is not None and all(
            seq.namespace != space for seq in self.running
        ):
            self.bench.invalidate(space)

    @step
    def reset(self) -> None:
        """Nothing is found any more; only when nothing runs."""
        if self.bench.optional("reset") is not None and not self.running and not self.bench.late:
            self.bench.reset()

    @step
    def wind_down(self) -> None:
        """End everything; then the pool can be filled to the last page (SQ7)."""
        while self.running:
            self._settle(self.running[0])
            self.bench.end(self.running[0], "finish")
        while self.bench.late:
            self._late()
        groups = len(self.bench.traits.windows)
        tokens = self.config.pages // groups * self.config.page_size
        seq = self._new([FRESH] * tokens, None, tokens)
        full = self.bench.start(seq) and self.bench.grow(seq, tokens)
        self.trial.require(full, "SQ7", f"nothing runs, and there is no room for {tokens} tokens")
        self.bench.check()
        self.bench.end(seq, "finish")

    # ---- parts -----------------------------------------------------------------------------------

    def _settle(self, seq: Running) -> None:
        """The result of its launch, if one is out, arrives first."""
        if seq.computed < seq.launched:
            self.bench.result(seq)

    def _late(self) -> None:
        if self.bench.late:
            self.bench.result(self.bench.late.pop(0))

    def _probe(self, seq: Running, more: tuple[int, ...] = ()) -> None:
        """The tokens of ``seq`` start again, are found as far as is promised, and end (SQ6)."""
        bench, size, tokens = self.bench, self.config.page_size, (*seq.tokens, *more)
        if len(tokens) > self.config.size or len(self.running) >= self.config.max_requests:
            return
        room = bench.room() >= bench.pages_for(len(tokens))
        probe = self._new(tokens, seq.namespace, len(tokens))
        if not bench.start(probe):
            return
        known = max(0, min(seq.computed, len(tokens) - 1) - self.config.is_eagle)
        if bench.traits.forgets_duplicates:
            twice = (p for p in range(known) if bench.contents.doubled(seq, p))
            known = next(twice, known)
        promised = known // size * size if bench.traits.windows == (None,) else 0
        self.trial.require(
            probe.computed >= promised or not room or seq.epoch != probe.epoch,
            "SQ6",
            f"{seq} computed {seq.computed} tokens; the same prompt finds {probe.computed}, "
            f"expected {promised} at least",
        )
        bench.end(probe, "finish" if bench.optional("abort") is None else "abort")
