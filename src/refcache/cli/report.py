"""The folder that ``refcache check --report`` writes.

Each violation has a folder, as :mod:`refcache.testing.report` writes it. ``verdict.json`` (what
``--json`` prints) comes last, so a report that has it is whole; each of its failing rows names its
folder.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refcache.errors import InvalidArgument


def as_dict(result: Any) -> dict[str, Any]:
    """One row of the verdict, for JSON; a failure or a reason where there is one."""
    row: dict[str, Any] = {
        "suite": result.suite,
        "cases": result.cases,
        "steps": result.steps,
        "verdict": result.verdict,
    }
    if result.failure is not None:
        row["rule"] = result.failure.rule
        row["evidence"] = result.failure.evidence
        row["program"] = list(result.failure.steps)
    if result.reason:
        row["reason"] = result.reason
    return row


def refuse_unless_new(folder: Path) -> None:
    """Refuse a report folder that has something in it, before any work is done.

    Raises:
        InvalidArgument: it is a file, or not empty.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists():
        raise InvalidArgument(f"--report {folder}: expected a new or an empty folder")


def write(folder: Path, verdict: dict[str, Any], results: Sequence[Any]) -> None:
    """Write the folder; runs each failing program once more.

    Raises:
        InvalidArgument: it cannot be written.
    """
    from refcache.testing.report import failure_name, write_failure

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for row, result in zip(verdict["suites"], results, strict=True):
            if result.failure is not None:
                steps = result.failure.steps
                row["folder"] = failure_name(result.suite, result.failure.rule, steps)
                write_failure(folder / row["folder"], result.suite, steps)
        (folder / "verdict.json").write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--report {folder}: cannot be written: {error.strerror}") from None
