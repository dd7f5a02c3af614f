"""Ranks that must take the same decisions, whatever the timing of their copies.

A tensor-parallel group runs one tree a rank on the same requests. The only thing that differs is
when a copy is done; so ranks agree on that, by a minimum, and everything else follows. Every rank
must make the same calls in the same order, also when it has nothing to report: a call that depends
on local state hangs the group, or pairs up with another one's.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist


class Consensus(Protocol):
    """A group of ranks behind one method."""

    def all_reduce_min(self, values: list[int]) -> list[int]:
        """The smallest of each value over the ranks."""
        ...


class SingleRank:
    """A group of one."""

    def all_reduce_min(self, values: list[int]) -> list[int]:
        return values


class ProcessGroupConsensus:
    """Ranks in processes of their own, over a ``torch.distributed`` group of CPU tensors."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def all_reduce_min(self, values: list[int]) -> list[int]:
        agreed = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self.group)
        return agreed.tolist()


def consensus_of(group: Any) -> Consensus:
    """None: one rank. A :class:`Consensus`: itself. Anything else: a process group."""
    if group is None:
        return SingleRank()
    if hasattr(group, "all_reduce_min"):
        consensus: Consensus = group
        return consensus
    return ProcessGroupConsensus(group)
