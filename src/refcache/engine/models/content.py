"""What the stand-in model knows of tokens, and the check of every KV row that is read.

The model has no weights. The hidden state of a token is its *tag* (:mod:`refcache.tags`), a hash of
its whole prefix with its namespace, and its KV row in a layer and plane is the tag plus a constant
of (layer, plane, column), as 64-bit words. So whoever reads a row can tell whose it is. The tags of
every running request are kept in a :class:`TagLedger`, apart from the KV: that is what rows are
compared with, so a cache that hands out wrong rows cannot also change the expectation.

How many rows a forward reads is a :class:`ReadPlan`: all of them, as attention does, or fewer in a
decode of a long replay.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from refcache.errors import RefcacheError
from refcache.tags import explain, namespace_tag, token_terms

if TYPE_CHECKING:
    from refcache.engine.schedule_batch import ModelWorkerBatch


class Cells(NamedTuple):
    """Some cells of a table of request rows: one row and a slice, or two int64 ``[n]``."""

    rows: int | torch.Tensor
    columns: slice | torch.Tensor


class TagLedger:
    """The tag of each token of each running request, by request row and position.

    Attributes:
        tags: int64 ``[rows, max_context_len]``.
    """

    def __init__(self, rows: int, max_context_len: int) -> None:
        self.tags = torch.zeros((rows, max_context_len), dtype=torch.int64)
        self.namespaces = torch.zeros(rows, dtype=torch.int64)

    def open(self, row: int, prefix_ids: "array[int]", extra_key: str | None) -> None:
        """A request takes ``row`` with a cached prefix of these tokens (none is fine)."""
        namespace = namespace_tag(extra_key)
        self.namespaces[row] = namespace
        terms = token_terms(prefix_ids, 0, namespace)
        torch.cumsum(terms, 0, out=self.tags[row, : len(terms)])

    def extend(self, row: int, start: int, input_ids: torch.Tensor) -> torch.Tensor:
        """Tokens ``start ...`` of a row are computed; returns their tags."""
        terms = token_terms(input_ids, start, self.namespaces[row])
        if start:
            terms[0] += self.tags[row, start - 1]
        new = self.tags[row, start : start + len(terms)]
        return torch.cumsum(terms, 0, out=new)

    def decode(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        input_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """One token of each row; positions are 1 or more. Its tags, int64 ``[batch]``, in ``out``.

        >>> ledger, out = TagLedger(2, 8), torch.zeros(1, dtype=torch.int64)
        >>> ledger.open(1, array("I", [5, 6]), "lora-1")
        >>> one = torch.tensor([1])
        >>> ledger.decode(one, torch.tensor([2]), torch.tensor([7]), out)
        >>> from refcache.tags import prefix_tags
        >>> bool(out[0] == prefix_tags([5, 6, 7], "lora-1")[2])
        True
        """
        terms = token_terms(input_ids, positions, self.namespaces[rows])
        torch.add(terms, self.tags[rows, positions - 1], out=out)
        self.tags[rows, positions] = out


class ReadPlan(Protocol):
    """Which KV rows a forward reads and compares, beside the newest of each request."""

    def __call__(self, batch: "ModelWorkerBatch") -> list[Cells]: ...


def read_every_row(batch: "ModelWorkerBatch") -> list[Cells]:
    """All rows of all requests, as attention does."""
    lengths = batch.seq_lens_cpu.tolist()
    return [Cells(row, slice(0, n)) for row, n in zip(batch.rows, lengths, strict=True)]


class SampledRows:
    """A prefill reads all its rows; a decode step the new rows and ``per_step`` that are drawn."""

    def __init__(self, per_step: int = 64, seed: int = 0) -> None:
        self.per_step = per_step
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, batch: "ModelWorkerBatch") -> list[Cells]:
        if batch.forward_mode.is_extend():
            return read_every_row(batch)
        rows, lengths = batch.req_pool_indices.cpu(), batch.seq_lens_cpu
        drawn, column = torch.randint(1 << 62, (2, self.per_step), generator=self.generator)
        drawn = drawn.remainder(len(lengths))
        columns = torch.cat([lengths - 1, column.remainder(lengths[drawn])])
        return [Cells(torch.cat([rows, rows[drawn]]), columns)]


def read_nothing(batch: "ModelWorkerBatch") -> list[Cells]:
    """Compare no row."""
    return []


@dataclass(frozen=True)
class WrongContent:
    """A KV row that is not what the request's own prefix says; the first word that differs.

    Attributes:
        rid, row, position: whose row, and which token of it; ``slot``: where it was read.
        layer, plane, column: of the word; ``found``, ``expected``: its value.
        explanation: whose word it is, as far as running requests can tell.
    """

    rid: str
    row: int
    position: int
    slot: int
    layer: int
    plane: int
    column: int
    found: int
    expected: int
    explanation: str

    def __str__(self) -> str:
        return (
            f"slot {self.slot}, layer {self.layer}, plane {self.plane}, word {self.column}: holds "
            f"{self.explanation}; expected token {self.position} of request {self.rid} "
            f"(row {self.row}, found {self.found}, expected {self.expected})"
        )


class ContentViolation(RefcacheError):
    """A forward read a KV row with the wrong content; ``wrong`` says which."""

    def __init__(self, wrong: WrongContent) -> None:
        super().__init__(str(wrong))
        self.wrong = wrong


OnWrong = Callable[[WrongContent], None]


def raise_violation(wrong: WrongContent) -> None:
    """The default: stop at the first wrong row."""
    raise ContentViolation(wrong)


class RowCheck:
    """Compares the KV rows that a forward reads with the ledger, and counts them.

    Args:
        plan: which rows.
        on_wrong: called with the first wrong word of each piece that differs.

    Attributes:
        rows_checked: rows compared so far; one of each layer and plane counts as one.
    """

    def __init__(
        self, plan: ReadPlan = read_every_row, on_wrong: OnWrong = raise_violation
    ) -> None:
        self.plan = plan
        self.on_wrong = on_wrong
        self.rows_checked = 0

    def compare(
        self,
        ledger: TagLedger,
        batch: "ModelWorkerBatch",
        cells: Cells,
        slots: torch.Tensor,
        words: Sequence[torch.Tensor],
        codes: Sequence[torch.Tensor],
        layer: int,
    ) -> None:
        """Compare the rows at ``slots`` with the tags of ``cells``, in every plane of a layer.

        Args:
            slots: integer ``[n]``, one a cell.
            words: of each plane int64 ``[slots of the pool, width]``.
            codes: of each plane int64 ``[width]``, what (layer, plane, column) adds to a tag.
        """
        tags = ledger.tags[cells.rows, cells.columns]
        for plane, (held, code) in enumerate(zip(words, codes, strict=True)):
            self.rows_checked += slots.shape[0]
            if held.shape[1] == 1:  # in one dimension a gather is three times as fast
                found = held[:, 0].index_select(0, slots).sub_(code)
                right = torch.equal(found, tags)
            else:
                found = held.index_select(0, slots).sub_(code)
                right = torch.equal(found, tags[:, None].expand_as(found))
            if not right:
                found = found.view(len(slots), -1)
                self._report(ledger, batch, cells, slots, found, tags, code, layer, plane)

    def _report(
        self,
        ledger: TagLedger,
        batch: "ModelWorkerBatch",
        cells: Cells,
        slots: torch.Tensor,
        found: torch.Tensor,
        tags: torch.Tensor,
        code: torch.Tensor,
        layer: int,
        plane: int,
    ) -> None:
        """Say what the first word is that differs."""
        at, column = (found != tags[:, None]).nonzero()[0].tolist()
        row, position = self._cell(cells, at)
        known = {
            int(tag): f"token {j} of request {rid}"
            for rid, r, n in zip(batch.rids, batch.rows, batch.seq_lens_cpu.tolist(), strict=True)
            for j, tag in enumerate(ledger.tags[r, :n].tolist())
        }
        value = int(found[at, column] + code[column])
        explanation = explain(value, known, layers=layer + 1, planes=plane + 1, width=len(code))
        self.on_wrong(
            WrongContent(
                rid=batch.rids[batch.rows.index(row)],
                row=row,
                position=position,
                slot=int(slots[at]),
                layer=layer,
                plane=plane,
                column=column,
                found=value,
                expected=int(tags[at] + code[column]),
                explanation=explanation,
            )
        )

    @staticmethod
    def _cell(cells: Cells, at: int) -> tuple[int, int]:
        row = cells.rows if isinstance(cells.rows, int) else int(cells.rows[at])
        if isinstance(cells.columns, slice):
            return row, int(cells.columns.start or 0) + at
        return row, int(cells.columns[at])
