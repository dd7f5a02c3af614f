"""The schema of a trace, for programs in other languages: as JSON Schema, and as a validator.

The schema is that of :mod:`refcache.trace.format`, version by version: a field that is added or
changed makes a new version. A file keeps it when its first line is a header, every other line one
call, numbered from 1 on, and the last one ``end``. What the calls mean is not looked at here:
``refcache judge`` does.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from refcache.errors import InvalidTrace
from refcache.trace.file import TraceReader
from refcache.trace.format import FORMAT, VERSION, Header, Line


@dataclass(frozen=True)
class SchemaVerdict:
    """``lines``: how many keep the schema, the header included; ``error``: what the next one lacks,
    None if there is none."""

    lines: int
    error: str | None = None

    def __str__(self) -> str:
        told = f"{self.lines:,} lines keep {FORMAT} version {VERSION}"
        return f"ok: {told}" if self.error is None else f"violation: {told}; {self.error}"


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of a line: the header, or a record."""
    variants, components = msgspec.json.schema_components(
        [Header, Line], ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{FORMAT} version {VERSION}: the first line is a Header, every other one a Line",
        "oneOf": list(variants),
        "$defs": components,
    }


def validate(path: str | Path) -> SchemaVerdict:
    """Read a file to its first line that does not keep the schema.

    Raises:
        InvalidTrace: it cannot be opened.
    """
    try:
        reader = TraceReader(path)
    except InvalidTrace as error:
        if not Path(path).is_file():
            raise
        return SchemaVerdict(0, str(error))
    lines = 1 + sum(1 for _ in reader)
    if reader.damage is None:
        return SchemaVerdict(lines + 1)  # the end record
    return SchemaVerdict(lines, reader.damage)
