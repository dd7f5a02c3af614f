"""What the scheduler receives: requests and aborts. Names are SGLang's; text and media left out.

Arguments that ask for what is not modelled are there to be refused by name; those that change
nothing here (how text is cut, how tokens are drawn: the models here are deterministic) are
accepted, and nothing reads them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from refcache.errors import InvalidArgument, refuse_unmodelled

REFUSED_SAMPLING = {
    "stop": None, "stop_regex": None, "min_new_tokens": 0, "n": 1, "json_schema": None,
    "regex": None, "ebnf": None, "structural_tag": None, "custom_params": None, "logit_bias": None,
}  # fmt: skip
REFUSED_REQUEST = {
    "return_logprob": False, "top_logprobs_num": 0, "token_ids_logprob": None,
    "return_hidden_states": False, "return_routed_experts": False, "input_embeds": None,
    "session_params": None, "custom_logit_processor": None, "require_reasoning": False,
    "mm_inputs": None, "bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None,
    "token_type_ids": None, "return_entropy": False, "need_wait_for_mm_inputs": False,
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """When a request stops. Sampling itself is greedy.

    Attributes:
        max_new_tokens: outputs at most. 0 acts as 1: a prefill always gives a token.
        stop_token_ids: an output among them is the last; ``ignore_eos`` switches that off.

    Raises:
        InvalidArgument: ``max_new_tokens`` below 0, or an argument of :data:`REFUSED_SAMPLING`.
    """

    max_new_tokens: int = 128
    stop: Any = None
    stop_token_ids: Iterable[int] | None = None
    stop_regex: Any = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    custom_params: Any = None
    stream_interval: int | None = None
    logit_bias: Any = None
    sampling_seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 0:
            raise InvalidArgument(f"max_new_tokens={self.max_new_tokens}: expected 0 or more")
        refuse_unmodelled("SamplingParams", vars(self), REFUSED_SAMPLING)
        object.__setattr__(self, "stop_token_ids", frozenset(self.stop_token_ids or ()))


@dataclass(frozen=True)
class TokenizedGenerateReqInput:
    """A prompt.

    Attributes:
        extra_key: its namespace; ``lora_id`` is a part of it.
        priority: for the tree's eviction policy and the schedule policy.
        routing_key: for the schedule policy of that name.
        input_text, stream, http_worker_ipc: the server's; nothing here reads them.

    Raises:
        InvalidArgument: an argument of :data:`REFUSED_REQUEST`.
    """

    rid: str
    input_ids: Sequence[int]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    extra_key: str | None = None
    priority: int | None = None
    input_text: str | None = None
    mm_inputs: Any = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: Sequence[int] | None = None
    stream: bool = False
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    input_embeds: Any = None
    session_params: Any = None
    lora_id: str | None = None
    custom_logit_processor: str | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None
    require_reasoning: bool = False
    routing_key: str | None = None
    no_logs: bool = False
    return_bytes: bool = False
    return_entropy: bool = False
    token_type_ids: Any = None
    need_wait_for_mm_inputs: bool = False
    http_worker_ipc: str | None = None

    def __post_init__(self) -> None:
        refuse_unmodelled(f"request {self.rid!r}", vars(self), REFUSED_REQUEST)


@dataclass(frozen=True)
class AbortReq:
    """Stop the request ``rid``, or every request; one that is not there (any more) is no error.

    ``abort_message``: what its finish reason says.
    """

    rid: str = ""
    abort_all: bool = False
    finished_reason: Any = None
    abort_message: str | None = None
    http_worker_ipc: str | None = None
