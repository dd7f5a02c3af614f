"""What a reader of requests yields, before ids are completed and times are sorted."""

from collections.abc import Iterator
from typing import NamedTuple


class Row(NamedTuple):
    """One request of a file.

    Attributes:
        line: where it stands, from 1.
        timestamp: milliseconds from the start of the trace.
        input_length, output_length: tokens, each at least 1.
        ids: of its blocks, or None where the file does not tell.
    """

    line: int
    timestamp: int
    input_length: int
    output_length: int
    ids: tuple[int, ...] | None


class Options(NamedTuple):
    """What a caller asks of a reader; the arguments of ``read_requests``."""

    block_size: int | None = None
    limit: int | None = None
    tokenizer: str | None = None


class Tally:
    """Counts what a reader had to make up, and says it as notes once the rows are read."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.counts: dict[str, int] = {}

    def add(self, sentence: str) -> None:
        """One more request of which ``sentence`` is true; it starts with a verb."""
        self.counts[sentence] = self.counts.get(sentence, 0) + 1

    def over(self, rows: Iterator[Row]) -> Iterator[Row]:
        """The rows; after the last one the notes are complete."""
        yield from rows
        for sentence, count in self.counts.items():
            self.notes.append(f"{count:,} request{'s' if count > 1 else ''} {sentence}")
