"""``refcache judge``: could a legal cache have produced this trace?"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

EXIT = {"ok": 0, "violation": 1, "unknown": 3}


def judge(
    trace: Annotated[
        Path, typer.Argument(help="A recorded trace, or a stream of KV events; compressed too.")
    ],
    form: Annotated[
        str | None, typer.Option("--format", help="The form of the events, if not recognised.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Whose liberties the events may take, if not recognised.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> int:
    """Judge a recorded trace, or a stream of KV events.

    Names the first record that no legal cache could have produced, and why. A damaged file is
    judged up to the damage.
    """
    from refcache.trace import judge_file

    verdict = judge_file(trace, format=form, engine=engine)
    print(json.dumps(asdict(verdict), indent=2) if as_json else verdict)
    return EXIT[verdict.verdict]
