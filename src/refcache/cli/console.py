"""What people see while they wait: on stderr, and only on a terminal."""

from contextlib import AbstractContextManager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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
