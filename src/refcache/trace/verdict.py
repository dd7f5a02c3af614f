"""What judging a trace comes to, as data and as text."""

from dataclasses import dataclass

from refcache.oracle.rules.violation import Violation


@dataclass(frozen=True)
class TraceVerdict:
    """What became of a trace.

    Attributes:
        verdict: ``ok``, ``violation`` or ``unknown`` (damaged, or not enough was recorded).
        records: how many were judged, the failing one included.
        n, op: number and name of the record that no legal cache could have produced.
        rule, evidence: the broken rule and what was seen.
        argument: what the evidence rests on, as records before it.
        damage: why the rest of the file could not be judged.
        notes: what was assumed or skipped.
    """

    verdict: str
    records: int
    n: int = 0
    op: str = ""
    rule: str = ""
    evidence: str = ""
    argument: tuple[str, ...] = ()
    damage: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.records:,} records judged"]
        if self.verdict == "violation":
            lines.append(f"record {self.n}, {self.op}: no legal cache could have produced it")
            lines.append(str(Violation(self.rule, self.evidence)))
            if self.argument:
                lines.append("because:")
                lines += [f"  {line}" for line in self.argument]
        lines += self.notes
        if self.damage is not None:
            lines.append(f"the rest was not judged: {self.damage}")
        return "\n".join(lines)
