"""What the command line answers without PyTorch: everything that needs no tensor."""

import json
import subprocess
import sys
from typing import Any

import pytest

from environment import environment

HEAVY = ("torch", "hypothesis", "triton", "numpy")
PROGRAM = f"""
import contextlib, io, json, sys
from refcache.cli.main import main
known = set()
for line in sys.stdin:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(json.loads(line))
    heavy = [name for name in {HEAVY} if name in sys.modules and name not in known]
    known.update(heavy)
    print(json.dumps([code, heavy, out.getvalue(), err.getvalue()]))
"""
COMMANDS = (
    *("check", "explore", "campaign", "replay", "convert"),
    *("judge", "shrink", "workload", "planted", "tune"),
)
ANSWERED: list[list[str]] = [
    ["--version"],
    ["--help"],
    *([command, "--help"] for command in COMMANDS),
    ["planted"],
    ["check", "--without-edge", "list"],
    ["workload", "written.jsonl", "--requests", "3"],
    ["convert", "written.jsonl", "converted.jsonl"],
    ["judge", "events.jsonl"],
]
REFUSED: list[tuple[list[str], str]] = [
    ([], ""),
    (["chekc"], "No such command"),
    (["check", "--sed", "1"], "No such option"),
    (["check", "--seed", "x"], "valid integer"),
    (["check", "--max-examples", "0"], "--max-examples"),
    (["check", "refcahe"], "target 'refcahe'"),
    (["check", "no.such.module:factory"], "does not import"),
    (["check", "refcache.oracle:NoSuchTarget"], "has no factory"),
    (["check", "sglang:9.9"], "VERSION one of"),
    (["check", "sglang:0.5.10+nonsense"], "VARIANT one of"),
    (["check", "sglang:0.5.10+rust"], "no Rust core"),
    (["check", "sglang:0.5.10"], "is not unpacked"),
    (["check", "--suite", "tree.stat"], "did you mean 'tree.state'"),
    (["check", "--planted", "no-such-bug"], "unknown planted bug"),
    (["check", "naive", "--planted", "split-keeps-one-lock"], "it is refcache that is patched"),
    (["check", "--without-edge", "load-fense"], "did you mean 'load-fence'"),
    (["check", "--profile", "sglang"], "unknown profile"),
    (["check", "--write-policy", "back"], "unknown write policy 'back'"),
    (["check", "--suite", "tree", "--write-policy", "write_back"], "expected a suite of two tiers"),
    (["check", "--xfails", "absent"], "xfails absent"),
    (["check", "--xfails", "no.xfails"], "no.xfails:1"),
    (["check", "--report", "."], "--report .: expected a new"),
    (["explore", "refcahe"], "target 'refcahe'"),
    (["explore", "--planted", "no-such-bug"], "unknown planted bug"),
    (["explore", "--without", "P9"], "unknown rule 'P9'"),
    (["campaign", "refcahe"], "target 'refcahe'"),
    (["campaign", "--suite", "tree.stat"], "did you mean 'tree.state'"),
    (["campaign", "--dir", "."], ".: not empty"),
    (["campaign", "--workers", "0"], "--workers"),
    (["replay", "absent.jsonl"], "absent.jsonl"),
    (["replay", "no.xfails"], "no.xfails, line 1"),
    (["replay", "absent.jsonl", "--policy", "lrv"], "did you mean 'lru'"),
    (["replay", "absent.jsonl", "--check", "all"], "unknown check"),
    (["replay", "absent.jsonl", "--write-policy", "back"], "unknown write_policy"),
    (["replay", "absent.jsonl", "--device-tokens", "many"], "--device-tokens many"),
    (["replay", "absent.jsonl", "--host-ratio", "0.5"], "host_ratio=0.5"),
    (["convert", "absent.jsonl", "out.jsonl"], "absent.jsonl"),
    (["convert", "a.jsonl", "a.jsonl"], "expected another file"),
    (["replay", "absent.jsonl", "--step-ms", "5"], "expected --arrivals"),
    (["replay", "written.jsonl", "--sweep", "polcy=lru"], "polcy"),
    (["replay", "written.jsonl", "--host-ratio", "1e9"], "host_ratio=1000000000.0"),
    (["replay", "written.jsonl", "--sweep", "policy=lru", "--plot", "x.pdf"], "ends in .svg"),
    (["judge", "absent.jsonl"], "absent.jsonl"),
    (["shrink", "absent.jsonl"], "absent.jsonl"),
    (["shrink", "a.jsonl", "--out", "a.jsonl"], "--out a.jsonl"),
    (["workload", "x.jsonl", "--requests", "-1"], "requests"),
    (["planted", "--only-one"], "--only-one"),
    # options that would change nothing
    (
        ["check", "--without-edge", "load-fence", "--seed", "1", "--json"],
        "--seed, --json: ",
    ),
    (["check", "--planted", "split-keeps-one-lock", "--no-planted"], "--no-planted: expected no"),
    (["check", "--suite", "tree.state", "--exact"], "--exact: expected no such option"),
    (["check", "--suite", "explore", "--profile", "sglang-0.5.10"], "choices are not compared"),
    (["check", "--suite", "explore", "--seed", "2", "--no-planted"], "nothing is drawn"),
    (["planted", "--seed", "1"], "--seed: expected no such option"),
    (["replay", "written.jsonl", "--write-policy", "write_back"], "nothing is written"),
    (["replay", "written.jsonl", "--sweep", "write-policy=write_back"], "nothing is written"),
    (["replay", "written.jsonl", "--tokenizer", "t.json"], "has no text"),
    (["convert", "written.jsonl", "out.jsonl", "--tokenizer", "t.json"], "has no text"),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each call: the exit code, what it was first to import, stdout, stderr."""
    folder = tmp_path_factory.mktemp("light")
    (folder / "no.xfails").write_text("P 1\n")
    (folder / "events.jsonl").write_text('{"type": "AllBlocksCleared"}\n')
    calls = [*ANSWERED, *(arguments for arguments, _ in REFUSED)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input="".join(json.dumps(call) + "\n" for call in calls),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(calls), done.stderr
    return {" ".join(call): json.loads(line) for call, line in zip(calls, lines, strict=True)}


@pytest.mark.parametrize("call", [" ".join(call) for call in ANSWERED])
def test_answers_without_pytorch(answers: dict[str, Any], call: str) -> None:
    code, heavy, out, said = answers[call]
    assert (code, heavy, said) == (0, [], "")
    assert out


@pytest.mark.parametrize(("call", "words"), [(" ".join(call), words) for call, words in REFUSED])
def test_refuses_without_pytorch(answers: dict[str, Any], call: str, words: str) -> None:
    code, heavy, _, said = answers[call]
    assert (code, heavy) == (2, []), said
    assert words in said


def test_the_command_as_a_module() -> None:
    """Prints what ``refcache`` prints, also where it starts workers."""

    def ran(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment()
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = "from refcache.cli.main import run; run()"
    check = ["check", "naive", "--suite", "allocator", "--max-examples", "2", "--no-planted"]
    assert "allocator.misuse" in ran("-m", "refcache.cli.main", *check)
    expected = ran("-c", script, "planted")
    assert "split-keeps-one-lock" in expected
    assert ran("-m", "refcache.cli.main", "planted") == expected
    assert ran("-m", "refcache", "planted") == expected
