"""The environment of a program that a test starts."""

import os
import sys


def environment(*folders: object, **variables: str) -> dict[str, str]:
    """What this process imports (``folders`` first), what measures coverage, and ``variables``."""
    paths = [*map(str, folders), *(path for path in sys.path if path)]
    measured = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
    return {"PYTHONPATH": os.pathsep.join(paths), **measured, **variables}
