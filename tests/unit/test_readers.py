"""Request traces in the field's own forms: what each reader makes of them, and what it says."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from command_line import refused
from refcache.cli.main import main
from refcache.errors import InvalidTrace, UnknownName
from refcache.readers import RequestTrace, TraceRequest, read_requests, write_requests
from refcache.readers.trace_request import max_id
from refcache.replay.workload import prefix_bound

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n45.5,GPT-4,1087,0,1087,API log\n"
)
CHATS = [
    {
        "id": "c1",
        "conversations": [
            {"from": "human", "value": "Hello"},
            {"from": "gpt", "value": "Hi!"},
            {"from": "human", "value": "Möre"},
        ],
    }
]
PLAIN = {"timestamp": 0, "input_length": 600, "output_length": 12, "hash_ids": [0, 1]}
CHAT = {"chat_id": 0, "parent_chat_id": -1, "turn": 1, "type": "text"}


def lines(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def read(tmp_path: Path, text: str | bytes, **options: object) -> RequestTrace:
    path = tmp_path / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_requests(path, **options)  # type: ignore[arg-type]


def test_azure(tmp_path: Path) -> None:
    trace = read(tmp_path, AZURE)
    assert trace.format == "azure"
    assert trace.requests == (TraceRequest(0, 374, 44, (0,)), TraceRequest(4314, 396, 109, (1,)))
    assert "no two prompts share a prefix" in trace.notes[0]
    zoned = AZURE.replace("46.6805900", "46.68+00:00").replace("50.9951690", "50.99+00:00")
    assert read(tmp_path, zoned).requests[1].timestamp == 4310


def test_burstgpt(tmp_path: Path) -> None:
    trace = read(tmp_path, BURST)
    assert trace.format == "burstgpt"
    assert trace.requests == (
        TraceRequest(5000, 472, 18, (0,)),
        TraceRequest(45500, 1087, 1, (1, 2, 3)),
    )
    assert any("1 request with 0 response tokens" in note for note in trace.notes)


@pytest.mark.parametrize("pretty", [None, 2])
@pytest.mark.parametrize("many", [1, 3000])
def test_conversations(tmp_path: Path, pretty: int | None, many: int) -> None:
    trace = read(tmp_path, json.dumps(CHATS * many, ensure_ascii=False, indent=pretty))
    assert (trace.format, trace.block_size) == ("sharegpt", 1)
    assert len(trace.requests) == 2 * many
    first, second = trace.requests[-2:]
    assert bytes(first.token_ids().tolist()) == b"Hello"
    assert bytes(second.token_ids().tolist()) == "HelloHi!Möre".encode()
    assert (first.output_length, second.output_length) == (3, 1)
    assert read(tmp_path, lines(*CHATS)).requests == trace.requests[:2]


def test_messages_with_roles(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "u"}]}
    trace = read(tmp_path, lines(chat))
    assert [bytes(r.token_ids().tolist()) for r in trace.requests] == [b"Su"]


def test_a_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer 'absent\.json'"):
        read(tmp_path, lines(*CHATS), tokenizer="absent.json")


def test_qwen_bailian(tmp_path: Path) -> None:
    first = {**CHAT, "timestamp": 0.114, "input_length": 40, "output_length": 12}
    second = {**CHAT, "timestamp": 3.5, "input_length": 70, "output_length": 9}
    trace = read(
        tmp_path, lines({**first, "hash_ids": [0, 1, 2]}, {**second, "hash_ids": [0, 1, 3, 4, 5]})
    )
    assert (trace.format, trace.block_size) == ("qwen-bailian", 16)
    assert [r.timestamp for r in trace.requests] == [114, 3500]
    assert str(prefix_bound(trace.requests)) == "2 of 8 blocks (25.00 %)"


def test_ids_of_single_blocks_are_no_prefixes(tmp_path: Path) -> None:
    trace = read(tmp_path, lines(PLAIN, {**PLAIN, "hash_ids": [2, 1]}))
    assert any("ids name single blocks" in note for note in trace.notes)
    assert prefix_bound(trace.requests).hit_blocks == 0  # block 1 after 2 is not block 1 after 0
    assert not read(tmp_path, lines(PLAIN, PLAIN)).notes


def test_a_block_size_that_fits_is_inferred(tmp_path: Path) -> None:
    text = lines(
        {**PLAIN, "input_length": 130, "hash_ids": [0, 1, 2]},
        {**PLAIN, "input_length": 200, "hash_ids": [0, 1, 3, 4]},
    )
    trace = read(tmp_path, text)
    assert trace.block_size == 64
    assert "block size 64: the only power of two" in trace.notes[0]
    assert read(tmp_path, text, block_size=64).notes == ()
    with pytest.raises(InvalidTrace, match=r"line 1, hash_ids: got 3 ids .* each 128 tokens"):
        read(tmp_path, text, block_size=128)
    with pytest.raises(InvalidTrace, match=r"each 512 tokens; block sizes 1024, .* fit: name one"):
        read(tmp_path, lines({**PLAIN, "hash_ids": [0]}))


def test_what_is_missing_has_a_default_and_a_note(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        lines(
            {"timestamp": 3, "input_length": 655, "hash_ids": [0, 1]},
            {"input_length": 300, "output_length": 0},
        ),
    )
    assert trace.requests == (TraceRequest(3, 655, 1, (0, 1)), TraceRequest(3, 300, 1, (2,)))
    told = " ".join(trace.notes)
    for words in ("without an output", "an output length of 0", "without hash_ids", "of arrival"):
        assert words in told


def test_sessions(tmp_path: Path) -> None:
    one = {**PLAIN, "session_id": "s1"}
    late = {"session_id": "s1", "delay": 500, **{k: PLAIN[k] for k in PLAIN if k != "timestamp"}}
    other = {**PLAIN, "session_id": "s2", "timestamp": 900}
    trace = read(tmp_path, lines(one, other, late))
    assert [r.timestamp for r in trace.requests] == [0, 500, 900]
    assert any("with a delay" in note for note in trace.notes)
    assert any("sorted" in note for note in trace.notes)


def test_unsorted(tmp_path: Path) -> None:
    trace = read(tmp_path, lines({**PLAIN, "timestamp": 20}, {**PLAIN, "timestamp": 10}))
    assert [r.timestamp for r in trace.requests] == [10, 20]
    assert any("not in order of arrival" in note for note in trace.notes)


def test_large_ids_are_numbered_anew(tmp_path: Path) -> None:
    trace = read(tmp_path, lines({**PLAIN, "hash_ids": [7, 2**63]}, {**PLAIN, "hash_ids": [7, 9]}))
    assert [r.hash_ids for r in trace.requests] == [(0, 1), (0, 2)]
    assert any("numbered anew" in note for note in trace.notes)
    assert not read(tmp_path, lines({**PLAIN, "hash_ids": [7, max_id(512)]})).notes


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_compressed_whatever_the_name(tmp_path: Path, pack: object) -> None:
    packed = pack(lines(PLAIN, PLAIN).encode())  # type: ignore[operator]
    assert len(read(tmp_path, packed).requests) == 2
    with pytest.raises(InvalidTrace, match=r"cannot be read: .* end"):
        read(tmp_path, packed[:-9])


def test_a_cut_frame_is_no_shorter_trace(tmp_path: Path) -> None:
    """Frames after frames are one file; a frame cut where a line ends is damage, not the end."""
    line = lines(PLAIN).encode()
    whole = zstandard.ZstdCompressor().compress(line)
    assert len(read(tmp_path, whole + whole).requests) == 2
    frame = zstandard.ZstdCompressor().compressobj()
    cut = frame.compress(line) + frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    for content in (cut, whole + cut, whole[:3] + b"\xfd"):
        with pytest.raises(InvalidTrace, match="end inside a frame: truncated"):
            read(tmp_path, content)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the file is empty: expected a request trace"),
        ("hello\n", "line 1: no request trace: expected one of azure, burstgpt"),
        ("[]", "no conversation has a turn of a user"),
        ("[1]", "line 1, conversations: got 1: expected an object with a list of turns"),
        ('[{"conversations": 3}]', "conversations: got {'conversations': 3}: expected"),
        ('[{"conversations": [{"from": "human"}]}]', "line 1, conversations[0]: got"),
        ('[{"conversations": []} {', "expected a comma"),
        ('[{"conversations": []}', "the file ends inside the array: truncated?"),
        ('[{"conversations": [', "line 1: not JSON"),
        ('[{"conversations": []}] x', "more text after the end"),
        (b'[{"a": "\xff"}]', "not UTF-8 text (byte 0xff)"),
        (AZURE.replace("374", "-1"), "line 2, contexttokens: got '-1': expected an integer"),
        (AZURE.replace("2023-11-16 18:15:46.6805900", "46"), "line 2, timestamp: got '46'"),
        (AZURE[:-6], "line 3: 2 cells, expected 3: the file ends inside this line?"),
        (BURST.replace("45.5", "x"), "line 3, timestamp: got 'x': expected seconds"),
        (lines({**CHAT, **PLAIN, "timestamp": "1"}), "timestamp: got '1': expected seconds"),
        (lines({**PLAIN, "timestamp": 0.5}), "expected an integer of 0 to"),
        (lines({**PLAIN, "block_size": 0}), "line 1, block_size: got 0"),
        (lines({**PLAIN, "block_size": 512}, {**PLAIN, "block_size": 64}), "line 2, block_size"),
        (lines({**PLAIN, "session_id": []}), "line 1, session_id: got []"),
        (lines({"ts": 1.0, "events": []}), "line 1, input_length: the field is missing"),
    ],
)
def test_bad_input(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(InvalidTrace) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert words in message
    assert message.startswith(str(tmp_path / "trace"))
    assert "\n" not in message
    with pytest.raises(UnknownName, match="unknown format 'moncake': did you mean 'mooncake'"):
        read(tmp_path, text, format="moncake")


def test_an_endless_element_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with open(path, "wb") as file:
        file.write(b'[{"conversations": [{"from": "human", "value": "')
        file.truncate(2**31)  # a hole: two gigabytes that take no room
    with pytest.raises(InvalidTrace, match="line 1: not JSON"):
        read_requests(path)


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "chats.json", tmp_path / "out.jsonl"
    source.write_text(json.dumps(CHATS))
    assert main(["convert", str(source), str(out)]) == 0
    assert "each byte of the text is a token" in capsys.readouterr().out
    assert read_requests(out).requests == read_requests(source).requests
    kept = out.read_bytes()
    assert "expected another file" in refused(["convert", str(out), str(out)], capsys)
    source.write_text("[")
    refused(["convert", str(source), str(out)], capsys)
    assert out.read_bytes() == kept


def test_a_replay_says_what_the_file_did_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(CHATS))
    options = ["--page-size", "1", "--device-tokens", "64", "--serial", "--check", "every"]
    assert main(["replay", str(path), *options]) == 0
    out = capsys.readouterr().out
    assert "trace      sharegpt, blocks of 1" in out
    assert "answers are part of the prompts" in out
    assert main(["replay", str(path), *options, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["trace"]["format"] == "sharegpt"
    assert result["hit_tokens"] == 5  # "Hello" of the second turn; its answer was another one


def test_writing_refuses_what_reading_would(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(InvalidTrace, match="line 1, block_size: got 0"):
        write_requests(path, [TraceRequest(0, 1, 1, (0,), 0)])
    mixed = [TraceRequest(0, 1, 1, (0,), 16), TraceRequest(0, 1, 1, (0,), 32)]
    with pytest.raises(InvalidTrace, match="line 2, block_size: got 32: expected 16"):
        write_requests(path, mixed)
    assert not path.exists()
