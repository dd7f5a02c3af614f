"""A search on disk: what going on from each state has found, a line each, in order.

So a search can be stopped at any moment and gone on with later: the lines are entered again, which
takes no call on the target, and what was left is left. The first line says whose search it is. A
line that a kill has torn is cut off.
"""

import json
import os
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

import refcache
from refcache.errors import InvalidArgument
from refcache.oracle.explore.fingerprint import Move
from refcache.oracle.explore.search import Child, Expansion, Search


class InUse(InvalidArgument):
    """The file of a search that another process goes on with."""


class Journal:
    """The file of one search; ``state`` is the search as far as it has come.

    Raises:
        InvalidArgument: the file cannot be read or written, is none, or is of another search.
        InUse: another process has it.
    """

    def __init__(self, path: Path, target: str, state: Search) -> None:
        self.path, self.state = path, state
        about = {"scope": state.scope.name, "target": target, "refcache": refcache.__version__}
        head = json.dumps({"search": about}).encode() + b"\n"
        try:
            raw = path.read_bytes() if path.exists() else b""
            whole = raw[: raw.rfind(b"\n") + 1]
            if not whole:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(head)
            elif not whole.startswith(head):
                raise InvalidArgument(f"{path}: expected {head.decode().strip()} as its first line")
            elif whole != raw:
                os.truncate(path, len(whole))
            self._file = open(path, "ab")  # noqa: SIM115 - lives as long as the search
            try:
                flock(self._file, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                self._file.close()
                raise InUse(f"{path}: another process goes on with this search") from None
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}") from None
        self._lines = whole.splitlines()[1:]

    def enter_all(self) -> None:
        """Enter what the file has into the search, which has begun."""
        for number, line in enumerate(self._lines, start=2):
            try:
                self.state.enter(_expansion(json.loads(line)))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise InvalidArgument(f"{self.path}, line {number}: {error!r}") from None
        self._lines = []

    def add(self, found: Expansion) -> None:
        """Write down what going on from the next state has found."""
        row = found._asdict()
        row["children"] = [[c.move, c.digest.hex(), c.ends] for c in found.children]
        self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _expansion(row: dict[str, Any]) -> Expansion:
    children = [
        Child(_calls(move), bytes.fromhex(digest), ends) for move, digest, ends in row["children"]
    ]
    failing = row["failing"]
    return Expansion(
        children,
        row["programs"],
        row["whole"],
        row["copied"],
        None if failing is None else list(_calls(failing)),
        row["died"],
    )


def _calls(move: Any) -> Move:
    return tuple((name, _tuples(args)) for name, args in move)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
