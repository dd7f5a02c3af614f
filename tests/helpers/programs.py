"""Short programs for a driver, in one line: the names of its steps, with their arguments."""

import ast
from typing import Any


def play(driver: Any, program: str) -> None:
    """Make the steps of ``program``, such as ``"admit (1,1,1); evict 2; finish -1"``.

    Steps are separated by ``"; "``; behind the name come its arguments, as in a call. An index of
    -1 is the last request.
    """
    for step in program.split("; ") if program else ():
        name, _, args = step.partition(" ")
        getattr(driver, name)(*(ast.literal_eval(f"({args},)") if args else ()))
