"""A request of a model with recurrent states, as its tree sees it."""

from typing import Any

from refcache.oracle.drivers.tree.request import Request


class MambaRequest(Request):
    """Names are SGLang's.

    Attributes:
        mamba_pool_idx: its running slot, int64 without dimensions; None while it has none.
        mamba_ping_pong_track_buffer: int64 slots of its buffers; ``mamba_next_track_idx``: which is
            written next.
        mamba_last_track_seqlen: where the last state was taken; None when the tree has it, or there
            is none.
        mamba_branching_seqlen: where the match asks for a state.
    """

    mamba_pool_idx: Any = None
    mamba_ping_pong_track_buffer: Any = None
    mamba_next_track_idx: int | None = None
    mamba_last_track_seqlen: int | None = None
    mamba_branching_seqlen: int | None = None
    is_chunked = 0

    @property
    def running(self) -> int | None:
        """Its running slot."""
        return None if self.mamba_pool_idx is None else int(self.mamba_pool_idx)

    @property
    def buffers(self) -> list[int]:
        """Its buffers' slots."""
        held = self.mamba_ping_pong_track_buffer
        return [] if held is None else [int(slot) for slot in held.tolist()]

    @property
    def states(self) -> list[int]:
        """Every state slot that it has."""
        return [*([] if self.running is None else [self.running]), *self.buffers]

    @property
    def tracked(self) -> int:
        """The buffer that is not written next: where the last state was taken into."""
        index = self.mamba_next_track_idx or 0
        return self.buffers[1 - index if len(self.buffers) == 2 else index]
