"""What the scheduler receives: requests and aborts. Names are SGLang's; text and media left out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from refcache.errors import InvalidArgument


@dataclass(frozen=True)
class SamplingParams:
    """When a request stops. Sampling itself is greedy.

    Attributes:
        max_new_tokens: outputs at most. 0 acts as 1: a prefill always gives a token.
        stop_token_ids: an output among them is the last; ``ignore_eos`` switches that off.
    """

    max_new_tokens: int = 128
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise InvalidArgument(f"max_new_tokens={self.max_new_tokens}: expected 0 or more")


@dataclass(frozen=True)
class TokenizedGenerateReqInput:
    """A prompt. ``extra_key``: its namespace; ``priority``: for the tree's eviction policy."""

    rid: str
    input_ids: Sequence[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    extra_key: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class AbortReq:
    """Stop the request ``rid``; one that is not there (any more) is no error."""

    rid: str
