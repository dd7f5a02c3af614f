"""Bytes that name their origin: what a KV row must contain, as a function of where it came from.

The *tag* of a token is a 64-bit hash of its whole prefix (every token with its position, and the
namespace). A KV element is its token's tag plus a constant of (layer, plane, column). A row that is
misplaced, stale, truncated, or copied from another layer or plane therefore differs, and
:func:`explain` says what it is instead.

A tag is a sum of terms, one a token: the token (with its namespace) times the *weight* of its
position, a random odd number (multilinear hashing: two prefixes collide with a probability of about
2**-64). So a whole prompt is one cumulative sum and a decode step adds one term: checking every row
a prefill reads is affordable on a real trace. Arithmetic is int64 with wrap-around.

>>> tags = prefix_tags([7, 8, 9])
>>> bool((prefix_tags([7, 8, 5])[:2] == tags[:2]).all()), bool(prefix_tags([7, 8, 5])[2] == tags[2])
(True, False)
>>> bool((prefix_tags([7, 8, 9], "lora-1") == tags).any())
False
>>> row = kv_row(tags, layer=1, plane=0, width=2)
>>> row.shape
torch.Size([3, 2])
>>> explain(int(row[2, 1]), {int(tags[2]): "token 2"}, layers=2, planes=2, width=2)
'token 2, layer 1, plane 0, column 1'
"""

from array import array
from collections.abc import Mapping, Sequence
from functools import cache

import torch

from refcache.keys import namespace_seed

_C1 = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, the golden-ratio increment
_C2 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_C3 = -7723592293110705685  # 0x94D049BB133111EB


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 (in place on ``x``): every input bit reaches every output."""
    x ^= (x >> 30).bitwise_and_((1 << 34) - 1)
    x *= _C2
    x ^= (x >> 27).bitwise_and_((1 << 37) - 1)
    x *= _C3
    x ^= (x >> 31).bitwise_and_((1 << 33) - 1)
    return x


@cache
def _table(size: int) -> torch.Tensor:
    return _mix((torch.arange(size) + 1) * _C1) | 1


def _weights(length: int) -> torch.Tensor:
    """The weights of at least ``length`` positions, from 0; a weight depends on nothing else."""
    return _table(1 << max(10, (length - 1).bit_length()))


def as_tensor(tokens: "Sequence[int] | array[int] | torch.Tensor") -> torch.Tensor:
    """Token ids as int64 ``[n]``."""
    if isinstance(tokens, torch.Tensor):
        return tokens.to(torch.int64)
    if isinstance(tokens, array) and len(tokens):
        return torch.frombuffer(tokens, dtype=torch.uint32).to(torch.int64)
    return torch.tensor(list(tokens), dtype=torch.int64)


def namespace_tag(extra_key: str | None) -> int:
    """What is added to every token of a namespace; a signed 64-bit integer."""
    return int.from_bytes(namespace_seed(extra_key)[:8], "big", signed=True)


def token_terms(
    tokens: "Sequence[int] | array[int] | torch.Tensor",
    positions: torch.Tensor | int = 0,
    namespace: torch.Tensor | int = 0,
) -> torch.Tensor:
    """The term each token adds to the tags from its position on; int64 ``[n]``.

    ``positions``: int64 ``[n]``, or the position of the first token (then they count up).
    ``namespace``: :func:`namespace_tag`, one for all or int64 ``[n]``.
    """
    ids = as_tensor(tokens)
    if isinstance(positions, int):
        end = positions + len(ids)
        weights = _weights(end)[positions:end]
    else:
        weights = _weights(int(positions.max()) + 1)[positions]
    return (ids + (namespace + 1)).mul_(weights)


def prefix_tags(
    tokens: "Sequence[int] | array[int] | torch.Tensor", extra_key: str | None = None
) -> torch.Tensor:
    """The tag of each token of a sequence that starts its namespace; int64 ``[n]``."""
    return token_terms(tokens, 0, namespace_tag(extra_key)).cumsum(0)


def greedy(
    token_ids: "Sequence[int] | array[int]",
    count: int,
    vocab_size: int,
    extra_key: str | None = None,
) -> list[int]:
    """The ``count`` tokens that the stand-in model says after a prompt, from their definition.

    >>> one, two = greedy([7, 8, 9], 2, 100)
    >>> greedy([7, 8, 9, one], 1, 100) == [two]
    True
    """
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(int(prefix_tags(tokens, extra_key)[-1]) % vocab_size)
    return tokens[len(token_ids) :]


def element_code(layer: int, plane: int, column: int = 0) -> int:
    """The constant that (layer, plane, column) adds to a tag; a signed 64-bit integer."""
    return int(_mix(torch.tensor([(layer * 64 + plane) * 65536 + column + 1])))


def kv_row(tags: torch.Tensor, layer: int, plane: int, width: int = 1) -> torch.Tensor:
    """The elements int64 ``[n, width]`` of the KV rows of tokens with these tags."""
    codes = torch.tensor([element_code(layer, plane, c) for c in range(width)])
    return tags[:, None] + codes


STATES = 32
"""The first plane number of recurrent states: those of KV are below."""


@cache
def state_codes(layer: int, tensor: int, shape: tuple[int, ...]) -> torch.Tensor:
    """What each element of a state adds to the tag of its last token; int64 ``shape``.

    The state after ``n`` tokens is the tag of token ``n - 1`` plus these constants; after none it
    is zero.
    """
    count = int(torch.Size(shape).numel())
    codes = [element_code(layer, STATES + tensor, column) for column in range(count)]
    return torch.tensor(codes, dtype=torch.int64).reshape(shape)


def explain(
    element: int, known: Mapping[int, str], *, layers: int, planes: int, width: int = 1
) -> str:
    """Say whose element this is: one of the ``known`` tags (tag to description), or nobody's."""
    if element == 0:
        return "zero (never written)"
    for layer in range(layers):
        for plane in range(planes):
            for column in range(width):
                tag = (element - element_code(layer, plane, column) + 2**63) % 2**64 - 2**63
                if tag in known:
                    return f"{known[tag]}, layer {layer}, plane {plane}, column {column}"
    return "no known token, layer or plane"
