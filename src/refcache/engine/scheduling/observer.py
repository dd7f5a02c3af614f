"""``SchedulerObserver``: how a test, a replay or an oracle watches the serving loop."""

import logging

from refcache.engine.req import Req
from refcache.engine.schedule_batch import ScheduleBatch
from refcache.errors import CopyFailed


class SchedulerObserver:
    """Told what the loop does; override what you need. Called on the host, at the moment named."""

    def on_batch(self, batch: ScheduleBatch) -> None:
        """A batch is prepared (rows and slots allocated) and about to be launched."""

    def on_retract(self, req: Req) -> None:
        """A request lost its memory and is back in the queue."""

    def on_finish(self, req: Req) -> None:
        """A request ended and holds nothing any more."""

    def on_copy_failed(self, error: CopyFailed) -> None:
        """A copy between the tiers failed; the loop goes on without it. Told once; by default
        logged."""
        logging.getLogger("refcache").warning("%s", error)
