"""The contract ``sequences``: five calls a sequence, in an engine's own words.

Nothing else of a cache is observed: no tree, no allocator, no ``free``. A sequence is a number that
is never used for another one. ``tokens`` are all that it has so far, the prompt and what was
sampled; they only grow. A call that says "no room" has changed nothing.

Optional calls, which the suites make where the object has them:

* ``abort(seq)``: the sequence ends at once. Where a launch is still out, its result comes later:
  ``computed`` is then called once more for this number, and must change nothing;
* ``preempt(seq)``: its pages are given up; the same number is started again later;
* ``fork(seq, child)`` -> bool: ``child`` goes on from all that ``seq`` has computed, like the other
  samples of one prompt, or a beam. False: no room, nothing changed;
* ``copies()``: pairs of pages (from, to) that the engine has to copy before its next launch, asked
  for after each ``grow`` and ``fork``; None or nothing where there are none;
* ``invalidate(namespace)``: what is cached there is found no more (new weights of an adapter);
* ``reset()``: nothing is found any more; called when no sequence runs;
* ``events()``: KV events since the last call, as :mod:`refcache.events` has them, or alike;
* ``kv(page, offset)``: the real bytes: int64 tensors (one a layer and plane, say), which the suites
  write and compare. The engine's copies between pages are then made through it as well;
* ``state()``: all that decides later answers, as nested tuples of numbers: a search can end then.
"""

from collections.abc import Sequence
from typing import Protocol

OPTIONAL = (
    "abort",
    "preempt",
    "fork",
    "copies",
    "invalidate",
    "reset",
    "events",
    "kv",
    "state",
)


class Sequences(Protocol):
    """What :meth:`refcache.oracle.Target.sequences` gives."""

    def start(self, seq: int, tokens: Sequence[int], namespace: str | None) -> int | None:
        """Look ``tokens`` up and hold what is found; room for the rest may be taken, too.

        Returns:
            How many leading tokens need no computing: fewer than there are, since the last one is
            computed to get an answer. None: no room, and nothing changed.
        """

    def grow(self, seq: int, tokens: Sequence[int], n: int) -> bool:
        """Room for the first ``n`` tokens, at most all. False: no room, and nothing changed."""

    def computed(self, seq: int, tokens: Sequence[int], n: int) -> None:
        """The first ``n`` tokens have their KV; they may be cached from here on."""

    def finish(self, seq: int, tokens: Sequence[int]) -> None:
        """The sequence ends; what was computed may be cached. The last token may have no KV."""

    def table(self, seq: int) -> Sequence[int]:
        """Its pages in the order of the tokens; with several groups one such list a group."""
