"""Workloads: request traces drawn from a seed, and how much of a trace any cache can find.

The form is :mod:`refcache.readers.trace_request`'s.
"""

import random
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from refcache.errors import InvalidArgument
from refcache.readers.trace_request import BLOCK, MAX_LENGTH, TraceRequest


class PrefixBound(NamedTuple):
    """How many blocks of a trace any cache can find: those that were there before,
    after the same blocks."""

    hit_blocks: int
    blocks: int

    def __str__(self) -> str:
        share = 100 * self.hit_blocks / max(1, self.blocks)
        return f"{self.hit_blocks:,} of {self.blocks:,} blocks ({share:.2f} %)"


def prefix_bound(requests: Iterable[TraceRequest]) -> PrefixBound:
    """The hits of an unlimited cache of whole blocks, computed from the ids alone.

    >>> print(prefix_bound([TraceRequest(0, 1024, 1, (0, 1)), TraceRequest(0, 1024, 1, (0, 2))]))
    1 of 4 blocks (25.00 %)
    """
    children: dict[tuple[int, int], int] = {}  # (the prefix before it, id) -> the prefix with it
    blocks = 0
    for request in requests:
        prefix = 0
        for block in request.hash_ids:
            prefix = children.setdefault((prefix, block), len(children) + 1)
        blocks += len(request.hash_ids)
    return PrefixBound(blocks - len(children), blocks)


def synthesize(
    requests: int,
    *,
    seed: int,
    system_prompts: int = 4,
    system_tokens: int = 2000,
    turns: int = 5,
    turn_tokens: int = 400,
    output_tokens: int = 100,
) -> Iterator[TraceRequest]:
    """Multi-turn conversations over shared system prompts; the same ``seed``, the same trace.

    A conversation picks a system prompt and has a geometric number of turns, ``turns`` on average.
    Each turn sends the conversation so far: the last prompt, its answer, and new user text (lengths
    exponential, with the given means). Turns of different conversations interleave. A block that
    one turn leaves partial is the same block, fuller, in the next; the end of a system prompt is
    shared up to its last whole block.

    Raises:
        InvalidArgument: a count or a length out of range.
    """
    sizes = {
        "requests": requests,
        "system_prompts": system_prompts,
        "system_tokens": system_tokens,
        "turns": turns,
        "turn_tokens": turn_tokens,
        "output_tokens": output_tokens,
    }
    for name, value in sizes.items():
        if not 1 <= value <= MAX_LENGTH:
            raise InvalidArgument(f"{name}={value}: expected 1 to {MAX_LENGTH}")
    draw = random.Random(seed)
    fresh = count()

    def length(mean: int) -> int:
        return 1 + round(draw.expovariate(1 / mean))

    systems = [[next(fresh) for _ in range(system_tokens // BLOCK)] for _ in range(system_prompts)]
    order = count()
    pending: list[tuple[int, int, list[int], int]] = []  # time, order, ids, tokens so far
    arrival = 0
    for _ in range(requests):
        while not pending or pending[0][0] > arrival:
            opening = (arrival, next(order), list(draw.choice(systems)), system_tokens)
            heappush(pending, opening)
            arrival += length(2000)
        time, _, ids, tokens = heappop(pending)
        tokens += length(turn_tokens)
        ids.extend(next(fresh) for _ in range(len(ids), -(-tokens // BLOCK)))
        output = length(output_tokens)
        yield TraceRequest(time, tokens, output, tuple(ids))
        if draw.random() >= 1 / turns:
            heappush(pending, (time + length(20_000), next(order), ids, tokens + output))
