"""The folder that a failure leaves: everything somebody needs who has only the target.

* ``repro.py``: the minimal program. It needs the target and refcache, no test framework; it prints
  the violation and exits with 1, or says that there is none and exits with 0.
* ``trace.jsonl``: what the target was asked and answered while the program ran
  (:mod:`refcache.trace`), for a later and better judge.
* ``before.txt``, ``after.txt``: the state before and after the last step, as the ledger has it.
* ``report.html``: the program step by step: tree, slots of both tiers, streams
  (:mod:`refcache.picture`); ``machine.json``: the simulated machine's launches, for Perfetto, where
  there is one.
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
from refcache.picture import Picture, frame_of, trace_events, write_page, write_trace_events
from refcache.picture.frames import Frame
from refcache.picture.timeline import timeline
from refcache.planted import taken_back
from refcache.runtime.simulated.log import MachineLog
from refcache.runtime.simulated.tracker import RaceFound
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
    again = _Again(imports, program, folder / "trace.jsonl")
    found = again.violation
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
    before, after = ([Frame(text="")] * 2 + again.frames)[-2:]
    (folder / "before.txt").write_text(before["text"] + "\n", encoding="utf-8")
    (folder / "after.txt").write_text(after["text"] + "\n", encoding="utf-8")
    text = json.dumps(verdict, indent=2) + "\n"
    (folder / "verdict.json").write_text(text, encoding="utf-8")
    write_page(_picture(verdict, again), folder / "report.html")
    if again.log.spans:
        write_trace_events(trace_events(again.log), folder / "machine.json")
    return verdict


def _picture(verdict: dict[str, Any], again: "_Again") -> Picture:
    target = again.driver.target.named() if again.driver is not None else ""
    log = again.log
    return Picture(
        title=f"{verdict['rule'] or 'no violation'}: {target}, {verdict['suite']}",
        subtitle=f"{verdict['suite']} on {target}",
        rule=verdict["rule"],
        sentence=verdict["sentence"],
        evidence=verdict["evidence"],
        program=verdict["steps"],
        frames=again.frames,
        timeline=timeline(log, _race(again.violation)) if log.spans else None,
        notes=[f"{name} {version}" for name, version in verdict["versions"].items()],
        page_size=1 if again.driver is None else again.driver.config.page_size,
    )


def _race(error: BaseException | None) -> RaceFound | None:
    """The race that a violation was made of."""
    while error is not None and not isinstance(error, RaceFound):
        error = error.__cause__
    return error


class _Again:
    """A failing program, run once more and recorded.

    Attributes:
        violation: what it ended with; ``frames``: the state after each step, the first step the
            driver's making; ``log``: what the simulated machine did, if there is one.
    """

    def __init__(self, imports: list[str], program: list[str], trace: Path) -> None:
        self.frames: list[Frame] = []
        self.log = MachineLog()
        self.violation: Violation | None = None
        self.driver: Driver | None = None
        names: dict[str, Any] = {}
        recorder = None
        try:
            exec("\n".join([*imports, program[0]]), names)
            driver = self.driver = names["d"]
            if driver.subject is not None:
                recorder = record(driver.subject, trace)
            machine = getattr(driver.bench, "machine", None)
            if machine is not None:
                machine.log = self.log
            self.frames.append(frame_of(driver, program[0]))
            for line in program[1:]:
                self.log.step += 1
                try:
                    exec(line, names)
                finally:
                    self.frames.append(frame_of(driver, line))
        except Violation as violation:
            self.violation = violation
        finally:
            if recorder is not None:
                recorder.close()


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
