"""The folder that ``refcache check --report`` writes.

``verdict.json`` (what ``--json`` prints) comes last, so a folder that has it is whole. Each failing
suite has two more files: ``SUITE.py``, a program that shows the failure, and ``SUITE.txt``, the
explanation.
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
    elif result.reason:
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
    """Write the folder.

    Raises:
        InvalidArgument: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for result in results:
            if result.failure is not None:
                program = "\n".join(result.failure.steps)
                (folder / f"{result.suite}.py").write_text(f"{program}\n", encoding="utf-8")
                text = result.failure.text
                (folder / f"{result.suite}.txt").write_text(f"{text}\n", encoding="utf-8")
        (folder / "verdict.json").write_text(json.dumps(verdict, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"--report {folder}: cannot be written: {error.strerror}") from None
