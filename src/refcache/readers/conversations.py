"""Conversations as text: a JSON array (ShareGPT's), or one JSON object a line.

Each turn of a user is a request: the prompt is the conversation so far, the output length that of
the answer that follows. Tokens are the bytes of the text in UTF-8, or a tokenizer's, where one is
named. A block id is a token, so prefixes are exact.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from io import BufferedIOBase
from typing import Any

from refcache.errors import InvalidArgument
from refcache.keys import MAX_TOKEN
from refcache.readers.rows import Options, Row, Tally
from refcache.readers.source import MAX_LINE, Source, open_source, shown
from refcache.readers.trace_request import MAX_LENGTH

CHUNK = 2**16
USERS = ("human", "user")
NO_TIMES = "conversations have no times: each turn arrives with the one before"
BYTES = "each byte of the text is a token; name a tokenizer for real lengths"
ANSWERS = (
    "answers are part of the prompts after them, but a replay makes its own answers: what it "
    "decoded is not found again"
)
NO_ANSWER = "without an answer in the file: one token"

Encode = Callable[[str], "list[int]"]
Rows = tuple[Iterable[Row], int | None, list[str]]


def read(source: Source, options: Options) -> Rows:
    """The requests of all conversations, turn by turn, one conversation after the other."""
    notes = [NO_TIMES, *([] if options.tokenizer else [BYTES]), ANSWERS]
    tally = Tally(notes)
    rows = list(tally.over(_rows(source, _encoder(options.tokenizer), tally, options.limit)))
    if not rows and options.limit != 0:
        raise source.refuse(None, "no conversation has a turn of a user")
    return rows, 1, notes


def _rows(source: Source, encode: Encode, tally: Tally, limit: int | None) -> Iterator[Row]:
    made = 0
    for value in _elements(source):
        prompt: list[int] = []
        turns = _turns(source, value)
        for number, (role, text) in enumerate(turns):
            tokens = encode(text)
            prompt += tokens
            if role not in USERS or not prompt:
                continue
            if made == limit:
                return
            answer = turns[number + 1] if number + 1 < len(turns) else None
            output = len(encode(answer[1])) if answer and answer[0] not in USERS else 0
            if output == 0:
                tally.add(NO_ANSWER)
            if max(len(prompt), output) > MAX_LENGTH:
                raise source.refuse(None, f"more than {MAX_LENGTH:,} tokens in a conversation")
            yield Row(source.line, 0, len(prompt), max(output, 1), tuple(prompt))
            made += 1


def _turns(source: Source, value: Any) -> list[tuple[str, str]]:
    """(role, text) of each turn."""
    turns = value
    if isinstance(value, dict):
        turns = value.get("conversations", value.get("messages"))
    if not isinstance(turns, list):
        raise source.refuse(
            "conversations", f"got {shown(value)}: expected an object with a list of turns"
        )
    found = []
    for index, turn in enumerate(turns):
        role = turn.get("from", turn.get("role")) if isinstance(turn, dict) else None
        text = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(text, str):
            raise source.refuse(
                f"conversations[{index}]",
                f"got {shown(turn)}: expected a turn with from and value (or role and content)",
            )
        found.append((role, text))
    return found


def _elements(source: Source) -> Iterator[Any]:
    """The elements of the array, or the values of the lines; ``source.line`` counts them."""
    with open_source(source.path) as file:
        start = source.guarded(lambda: file.read(CHUNK)).removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith(b"["):
            yield from _array(source, file, start)
            return
    for raw in source.lines():
        yield source.object(raw)


def _array(source: Source, file: BufferedIOBase, start: bytes) -> Iterator[Any]:
    """The elements of a JSON array, with one element in memory at a time."""
    decoder = json.JSONDecoder()
    text, rest = "", start[1:]
    after_element = ended = False
    while True:
        decoded, rest = _utf8(source, rest)
        text = (text + decoded).lstrip()
        if after_element and text.startswith(","):
            text, after_element = text[1:].lstrip(), False
        if text.startswith("]"):
            if text[1:].strip():
                raise source.refuse(None, "more text after the end of the array")
            return
        if text and after_element:
            raise source.refuse(None, f"got {shown(text[:20])}: expected a comma")
        problem = "the file ends inside the array: truncated?"
        if text:
            try:
                value, end = decoder.raw_decode(text)
            except json.JSONDecodeError as error:
                problem = f"not JSON ({error.msg}), or truncated"
            except (RecursionError, ValueError) as error:
                ended, problem = True, f"not JSON of a trace ({shown(str(error))})"
            else:
                source.line += 1
                text, after_element = text[end:], True
                yield value
                continue
        if ended or len(text) > MAX_LINE:
            source.line += 1
            raise source.refuse(None, problem)
        size = max(CHUNK, len(text))  # twice as much each time: an element is scanned few times
        more = source.guarded(lambda size=size: file.read(size))  # type: ignore[misc]
        ended = not more
        rest += more


def _utf8(source: Source, raw: bytes) -> tuple[str, bytes]:
    """The text of the whole characters in ``raw``, and the bytes of the one that is cut."""
    try:
        return raw.decode(), b""
    except UnicodeDecodeError as error:
        if error.end == len(raw) and len(raw) - error.start < 4:
            return raw[: error.start].decode(), raw[error.start :]
        at = f"byte {raw[error.start]:#04x}"
        raise source.refuse(None, f"not UTF-8 text ({at}): a binary file?") from None


def _encoder(tokenizer: str | None) -> Encode:
    """Text to tokens.

    Raises:
        InvalidArgument: the tokenizer, or the package that reads it, is not there.
    """
    if tokenizer is None:
        return lambda text: list(text.encode("utf-8", "surrogatepass"))
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise InvalidArgument(
            f"tokenizer {tokenizer!r}: expected the package tokenizers to be installed"
        ) from None
    try:
        load = Tokenizer.from_file if tokenizer.endswith(".json") else Tokenizer.from_pretrained
        made = load(tokenizer)
    except Exception as error:  # the package raises plain Exceptions
        raise InvalidArgument(f"tokenizer {tokenizer!r}: {error}") from None

    def encode(text: str) -> list[int]:
        ids: list[int] = made.encode(text, add_special_tokens=False).ids
        if max(ids, default=0) > MAX_TOKEN:
            raise InvalidArgument(f"tokenizer {tokenizer!r}: a token above {MAX_TOKEN}")
        return ids

    return encode
