"""One KV event as every form says it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

Hash = int | str
"""The name of a block: an integer of any size, or text; bytes become hex text."""

DEVICE = "GPU"
"""The medium of an event that names none."""


class Bad(Exception):
    """A value that is not of the form; the reader adds file and line."""

    def __init__(self, field: str | None, problem: str) -> None:
        super().__init__(problem)
        self.field, self.problem = field, problem


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """What happened to some blocks.

    Attributes:
        op: ``stored``, ``removed``, ``cleared``, ``moved``, or ``other`` (an unknown kind).
        kind: its name in the stream.
        hashes: the blocks, each after the one before.
        parent: the block before the first; None: there is none, or it is not told.
        contents: what each block holds, as far as the event tells: its tokens, or a hash of them.
            None: not told, as when a block moves to a lower tier.
        misfit: how the number of tokens contradicts the number of blocks, or None.
        medium: where; None: wherever they are. ``cleared``: None is everywhere.
        group: the cache group (a hybrid model has several), or None.
        rank: the worker or data-parallel rank, or None.
        adapter: LoRA adapter, salt or tenant the blocks belong to, or None.
        raw: the event as it stood in the stream.
    """

    op: str
    kind: str
    hashes: tuple[Hash, ...] = ()
    parent: Hash | None = None
    contents: tuple[Any, ...] | None = None
    misfit: str | None = None
    medium: str | None = None
    group: Any = None
    rank: Any = None
    adapter: Any = None
    raw: Any = None


class EventBatch(NamedTuple):
    """Events that were published together.

    Attributes:
        line: where it stands, from 1 (frames count as lines).
        source: who published it (topic, worker), or None.
        seq: its number, one more than that of the batch before from the same source; or None.
        from_zero: numbers of this form start at 0, so a larger first one means a late joiner.
        form: the name of the form.
        engine: that the form or a field tells, or None.
        events: in order.
        wrap: the batch's other fields, so that it can be written again; None: it has none.
    """

    line: int
    source: Any
    seq: int | None
    from_zero: bool
    form: str
    engine: str | None
    events: tuple[BlockEvent, ...]
    wrap: Any
