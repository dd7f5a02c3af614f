"""What is told of an exception that came out of a target: itself, and where it arose.

The place is the innermost frame of the target's own files: where it called refcache or a library
wrongly, that is the line to look at. Without one (the target is refcache), the innermost of all.
"""

import sysconfig
from pathlib import Path
from traceback import extract_tb

PACKAGE = Path(__file__).parents[2]
STANDARD = Path(sysconfig.get_path("stdlib"))


def told(error: BaseException) -> str:
    """``error`` with its place, ``KeyError(3) (my_cache.py:12, in evict)``.

    >>> told(KeyError(3))
    'KeyError(3)'
    """
    frames = extract_tb(error.__traceback__)
    own = [frame for frame in frames if _theirs(frame.filename)] or frames
    if not own:
        return repr(error)
    place = own[-1]
    return f"{error!r} ({Path(place.filename).name}:{place.lineno}, in {place.name})"


def _theirs(file: str) -> bool:
    parts = Path(file).parts
    if "site-packages" in parts:
        return parts[parts.index("site-packages") + 1] not in ("torch", "numpy", "hypothesis")
    return not file.startswith("<") and not {PACKAGE, STANDARD} & {*Path(file).parents}
