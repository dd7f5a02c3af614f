"""The folder that a failure leaves: everything somebody needs who has only the target.

* ``repro.py``: the minimal program. It needs the target and refcache, no test framework; it prints
  the violation and exits with 1, or says that there is none and exits with 0.
* ``trace.jsonl``: what the target was asked and answered while the program ran
  (:mod:`refcache.trace`), for a later and better judge.
* ``before.txt``, ``after.txt``: the state before and after the last step, as the ledger has it.
* ``verdict.json``: rule, evidence, steps, versions, and what the judge says of the trace.

A folder appears whole or not at all.
"""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import refcache
from refcache.errors import InvalidArgument, RefcacheError
from refcache.oracle.program.driver import Driver
from refcache.oracle.rules.violation import Violation
from refcache.planted import taken_back
from refcache.trace import judge_trace, record

REPRO = '''"""{rule}: {evidence}

The rule: {sentence}.
Run it with Python where the target can be imported; the current folder counts.
"""

import os
import sys

sys.path.insert(0, os.getcwd())

{imports}
from refcache.oracle import Violation


def main() -> None:
{body}


if __name__ == "__main__":
    try:
        main()
    except Violation as violation:
        print(violation)
        sys.exit(1)
    print("no violation")
'''


def failure_name(suite: str, rule: str, steps: Sequence[str]) -> str:
    """Name of a failure's folder: two failures are one if rule and minimal steps are the same."""
    text = "\n".join((suite, rule, *steps))
    return f"{suite}-{rule}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def write_failure(folder: str | Path, suite: str, steps: Sequence[str]) -> dict[str, Any]:
    """Run a failing program once more and write its folder.

    Args:
        folder: is created; if it exists it must be empty.
        suite: name of the suite that found it.
        steps: the program, a line a step, as a driver's ``program`` gives it.

    Returns:
        What ``verdict.json`` holds. ``verdict`` is ``unknown`` if the program did not fail again.

    Raises:
        InvalidArgument: the folder is not empty, or cannot be written.
    """
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidArgument(f"{folder}: expected a new or an empty folder")
    part = target.parent / f".{target.name}.{os.getpid()}.part"
    try:
        part.mkdir(parents=True)
        try:
            with taken_back():
                verdict = _fill(part, suite, list(steps))
            if target.exists():
                target.rmdir()
            part.rename(target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise InvalidArgument(f"{folder}: cannot be written: {error.strerror}") from None
    return verdict


def _fill(folder: Path, suite: str, steps: list[str]) -> dict[str, Any]:
    start = next(i for i, line in enumerate(steps) if line.startswith("d = "))
    imports, program = steps[:start], steps[start:]
    found, before, after = _run_again(folder / "trace.jsonl", imports, program)
    verdict: dict[str, Any] = {
        "suite": suite,
        "verdict": "unknown" if found is None else "violation",
        "rule": found.id if found else "",
        "sentence": found.sentence if found else "",
        "evidence": found.evidence if found else "the program did not fail when it was run again",
        "steps": steps,
        "versions": {
            "refcache": refcache.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "trace": _judged(folder / "trace.jsonl"),
    }
    body = "\n".join(f"    {line}" for line in program)
    plants = [line for line in imports if not line.startswith(("from ", "import "))]
    text = REPRO.format(
        **{k: str(verdict[k]).replace("\\", "\\\\") for k in ("rule", "evidence", "sentence")},
        imports="\n".join(line for line in imports if line not in plants),
        body="\n".join([*(f"    {line}" for line in plants), body]),
    )
    (folder / "repro.py").write_text(text, encoding="utf-8")
    (folder / "before.txt").write_text(before + "\n", encoding="utf-8")
    (folder / "after.txt").write_text(after + "\n", encoding="utf-8")
    text = json.dumps(verdict, indent=2) + "\n"
    (folder / "verdict.json").write_text(text, encoding="utf-8")
    return verdict


def _run_again(
    trace: Path, imports: list[str], program: list[str]
) -> tuple[Violation | None, str, str]:
    """Run the program, recorded; the violation, and the state before and after the last step."""
    names: dict[str, Any] = {}
    before = ""
    recorder = None
    try:
        exec("\n".join([*imports, program[0]]), names)
        driver: Driver = names["d"]
        if driver.subject is not None:
            recorder = record(driver.subject, trace)
        for line in program[1:]:
            before = driver.describe()
            exec(line, names)
    except Violation as violation:
        after = names["d"].describe() if "d" in names else ""
        return violation, before, after
    finally:
        if recorder is not None:
            recorder.close()
    return None, before, driver.describe()


def _judged(trace: Path) -> dict[str, Any] | None:
    """What the judge of traces says; None where nothing was recorded."""
    if not trace.exists():
        return None
    try:
        verdict = judge_trace(trace)
        lists = {"argument": list(verdict.argument), "notes": list(verdict.notes)}
        return asdict(verdict) | lists
    except RefcacheError as error:
        return {"verdict": "unknown", "damage": str(error)}
