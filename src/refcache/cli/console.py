"""What the commands share: options that would change nothing are refused, and what people see while
they wait goes to stderr, and only on a terminal. Stdout is for verdicts."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from refcache.errors import InvalidArgument


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


def refuse_without_effect(options: Mapping[str, object], why: str) -> None:
    """Refuse the options that have a value (other than None, False, 0, nothing).

    Raises:
        InvalidArgument: names all of them, and why they would change nothing.
    """
    given = [name for name, value in options.items() if value]
    if given:
        raise InvalidArgument(f"{', '.join(given)}: expected no such option, {why}")


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
