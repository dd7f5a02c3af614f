"""The command line survives bad calls and damaged traces: no traceback, the right exit code.

``REFCACHE_FUZZ`` sets how many examples each test draws; by default a few, since ten thousand take
minutes: the nightly test draws those.
"""

import contextlib
import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import refcache
from refcache.cli.main import main
from refcache.oracle import TreeDriver, resolve

EXAMPLES = int(os.environ.get("REFCACHE_FUZZ", "60"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def call(arguments: list[str]) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole trace, plain."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    driver = TreeDriver(resolve("refcache"), page_size=2, size=16, enable_kv_cache_events=True)
    with refcache.record(driver.tree, path):
        for tokens in ((1, 2, 3, 4, 5), (1, 2, 3, 9, 9), (1, 2, 7, 7), (4, 4, 4, 4, 4, 4, 4)):
            driver.admit(tokens)
            driver.decode(0, 1)
            driver.finish(0)
        driver.insert((1, 2, 3, 4))
        driver.evict(6)
        driver.match((1, 2, 3, 4))
    return path.read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# ---- bad calls -----------------------------------------------------------------------------------

COMMANDS = ["check", "campaign", "replay", "judge", "shrink", "workload", "planted", "nope", ""]
OPTIONS = ["--suite", "--seed", "--max-examples", "--json", "--dir", "--minutes", "--workers"]
OPTIONS += ["--out", "--report", "--planted", "--limit", "--page-size", "--policy", "--nope", "-x"]
VALUES = ["nope", "absent/file", "-1", "0.5", "x:y", ":", "os:getcwd", "\0", "\n", "é", "tree.nope"]
words = st.sampled_from(OPTIONS) | st.sampled_from(VALUES) | st.text(max_size=6)


# Calls that are whole, except for a value that is wrong: none gets past its checks.
WRONG = [
    ["check", "no.such:target"],
    ["check", "os:getcwd"],
    ["check", "--suite", "nope"],
    ["check", "--planted", "nope"],
    ["check", "--xfails", "absent"],
    ["check", "--xfails", "."],
    ["check", "--profile", "nope"],
    ["check", "--without-edge", "nope"],
    ["check", "--max-examples", "0"],
    ["campaign", "no.such:target"],
    ["campaign", "--suite", "nope"],
    ["campaign", "--workers", "0"],
    ["campaign", "naive", "--suite", "hicache"],
    ["replay", "absent"],
    ["replay", "."],
    ["judge", "absent"],
    ["shrink", "absent"],
    ["workload", "absent/x"],
    ["workload", "x", "--requests", "0"],
    ["planted", "--only-one"],
]
numbers = st.integers(-(2**70), 2**70).map(str) | st.floats().map(str)
flags = st.sampled_from(["--json", "--serial", "--exact"])
harmless = st.tuples(st.just("--seed"), numbers) | st.tuples(flags)


@st.composite
def bad_calls(draw: st.DrawFn) -> list[str]:
    """Words in any order before an option that does not exist, or a whole call with a wrong value.

    The unknown option comes twice: an option before it may take the first one as its value.
    """
    if draw(st.booleans()):
        rest = draw(st.lists(words | numbers, max_size=5))
        return [draw(st.sampled_from(COMMANDS)), *rest, "--not-an-option", "--not-an-option"]
    options = draw(st.lists(harmless, max_size=2))
    return [*draw(st.sampled_from(WRONG)), *(word for pair in options for word in pair)]


def refuses(folder: Path, arguments: list[str]) -> None:
    """A bad call: exit code 2, one line, and nothing in the current folder."""
    before = sorted(folder.iterdir())
    with contextlib.chdir(folder):
        code, out, err = call(arguments)
    helped = "--help" in arguments and code == 0
    assert code == 2 or helped, (arguments, code, out, err)
    assert "Traceback" not in out + err
    assert helped or err.startswith("refcache: "), (arguments, err)
    assert err.count("\n") <= 1, (arguments, err)
    assert sorted(folder.iterdir()) == before, arguments


@fuzz
@given(arguments=bad_calls())
def test_bad_calls(folder: Path, arguments: list[str]) -> None:
    """Every call names something that is not there, so none may do anything."""
    refuses(folder, arguments)


@pytest.mark.nightly
@settings(fuzz, max_examples=10_000)
@given(arguments=bad_calls())
def test_ten_thousand_bad_calls(folder: Path, arguments: list[str]) -> None:
    refuses(folder, arguments)


@fuzz
@given(
    command=st.sampled_from(["judge", "shrink"]),
    target=st.sampled_from(["absent", "no/such/file.zst", "", ".", "\0", "a" * 300, "é.jsonl"]),
    as_json=st.booleans(),
)
def test_no_such_file(folder: Path, command: str, target: str, as_json: bool) -> None:
    path = str(folder / target) if target not in ("", "\0") else target
    code, out, err = call([command, path, *["--json"] * (as_json and command == "judge")])
    assert (code, out) == (2, ""), (path, err)
    assert err.count("\n") == 1
    assert "a fault of refcache itself" not in err


# ---- damaged traces ------------------------------------------------------------------------------

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 12)
    | st.text(max_size=3)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def judged(path: Path, content: bytes) -> None:
    """Judge and shrink a file; the exit code is one of the documented, and says what is printed."""
    path.write_bytes(content)
    code, out, err = call(["judge", str(path), "--json"])
    assert "Traceback" not in out + err
    assert "a fault of refcache itself" not in err, err
    if code == 2:
        assert out == ""
        assert err.startswith("refcache: ")
        assert err.count("\n") == 1
    else:
        verdict = json.loads(out)
        assert code == {"ok": 0, "violation": 1, "unknown": 3}[verdict["verdict"]]
        assert (verdict["verdict"] == "unknown") <= (verdict["damage"] is not None)
    small = path.with_name("small.jsonl")
    shrunk, out, err = call(["shrink", str(path), "--out", str(small)])
    assert shrunk == 0 if code == 1 else shrunk == 2, (code, shrunk, out, err)
    assert "Traceback" not in out + err
    assert "a fault of refcache itself" not in err, err


@fuzz
@given(data=st.data())
def test_damaged_bytes(folder: Path, trace: bytes, data: st.DataObject) -> None:
    content = bytearray(trace)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "drop"]))
        if kind == "flip":
            content[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            content = content[: at + 1]
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=8))
        else:
            del content[at : at + data.draw(st.integers(1, 200))]
        content = content or bytearray(b"\n")
    judged(folder / "bytes.jsonl", bytes(content))


@fuzz
@given(data=st.data())
def test_damaged_values(folder: Path, trace: bytes, data: st.DataObject) -> None:
    """One field of one record, or of the header, becomes any JSON value."""
    lines = [json.loads(line) for line in trace.splitlines()]
    line = lines[data.draw(st.integers(0, len(lines) - 1))]
    places = [line, *(v for v in line.values() if isinstance(v, dict)), *line.get("inner", ())]
    place = data.draw(st.sampled_from(places))
    name = data.draw(st.sampled_from(sorted(place)))
    value = place[name]
    if isinstance(value, list) and value and data.draw(st.booleans()):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(json_values)
    else:
        place[name] = data.draw(json_values)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    judged(folder / "values.jsonl", text.encode())


@fuzz
@given(data=st.data())
def test_shuffled_records(folder: Path, trace: bytes, data: st.DataObject) -> None:
    """Records dropped, repeated and swapped, with numbers that fit."""
    lines = [json.loads(line) for line in trace.splitlines()]
    header, records = lines[0], lines[1:]
    picks = st.lists(st.integers(0, len(records) - 1), max_size=len(records))
    kept = data.draw(picks) if data.draw(st.booleans()) else list(range(len(records)))
    if data.draw(st.booleans()) and len(kept) > 1:
        at = data.draw(st.integers(0, len(kept) - 2))
        kept[at], kept[at + 1] = kept[at + 1], kept[at]
    out = [header, *({**records[i], "n": n + 1} for n, i in enumerate(kept))]
    judged(folder / "order.jsonl", "".join(json.dumps(line) + "\n" for line in out).encode())


@fuzz
@given(content=st.binary(max_size=60), ending=st.sampled_from([".jsonl", ".zst"]))
def test_any_bytes(folder: Path, content: bytes, ending: str) -> None:
    judged(folder / f"any{ending}", content)


events = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Nope"])


@fuzz
@given(lines=st.lists(st.tuples(events, st.lists(json_values, max_size=5)), max_size=6))
def test_event_streams(folder: Path, lines: list[tuple[str, list[object]]]) -> None:
    text = "".join(json.dumps([0.0, [[name, *fields]]]) + "\n" for name, fields in lines)
    (folder / "events.jsonl").write_text(text)
    code, out, err = call(["judge", str(folder / "events.jsonl")])
    assert code in (0, 1, 2, 3)
    assert "Traceback" not in out + err
    assert "a fault of refcache itself" not in err, (text, err)
