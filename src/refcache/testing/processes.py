"""Worker processes: quiet when the user interrupts, and stdout is not theirs.

Both pools (of ``refcache check`` and of a campaign) start their processes in :func:`starting` and
begin each with :func:`begin`.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[None]:
    """The block starts workers: SIGINT waits until they have begun, and here until the block ends.

    A process inherits what its parent blocks; a worker that imports would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin() -> None:
    """First thing in a worker: SIGINT ends it, what it prints goes to stderr, and one thread."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a job in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    import torch

    torch.set_num_threads(1)
