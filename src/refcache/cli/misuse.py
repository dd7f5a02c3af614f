"""``refcache misuse``: what comes of each kind of call that breaks the contract."""

from typing import Annotated

import typer


def misuse(
    target: Annotated[str, typer.Argument(help="Named as for `refcache check`.")] = "refcache",
    explain: Annotated[
        bool, typer.Option(help="The program of each kind that is not refused.")
    ] = False,
) -> int:
    """Try each kind of misuse alone; going on shows what it did.

    One line a kind: refused, ignored, accepted (with the damage) or crash. The exit code is 1 when
    one was accepted or crashed, or ignored by a target that declares refuses_misuse.
    """
    from refcache.oracle import resolve
    from refcache.oracle.drivers.kinds import misuse_by_kind

    found = resolve(target)
    bad = {"accepted", "crash"}
    if "refuses_misuse" in found.capabilities:
        bad.add("ignored")
    code = 0
    for one in misuse_by_kind(found):
        print(f"{one.kind:<20} {one.outcome:<9} {one.evidence}")
        if explain and one.outcome != "refused":
            print("".join(f"    {line}\n" for line in one.steps), end="")
        code = max(code, int(one.outcome in bad))
    return code
