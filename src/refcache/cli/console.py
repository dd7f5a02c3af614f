"""What people see while they wait: on stderr, and only on a terminal. Stdout is for verdicts."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def prints_on_stderr() -> Iterator[None]:
    """In the block, what this process prints goes to stderr, also what C code prints."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def status(text: str) -> AbstractContextManager[object]:
    """A spinner with ``text`` while the block runs."""
    return Console(stderr=True).status(text)


def progress() -> Progress:
    """A bar that counts requests."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
