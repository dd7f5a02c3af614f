"""Diagrams of docs/document.md, drawn from what the simulated machine records.

Code of the cache runs on the machine; each launch is recorded with the vector clock that says what
comes before it. Launches are then drawn as early as that order allows: a launch starts when the
last one of its stream, and everything that it waits for, has ended. So a diagram has no edge that
the code does not make, and losing one moves a box. How long each takes is made up (``LENGTHS``).
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any
from xml.sax.saxutils import escape

from document_run import Run, code_of, prompt, resolve, serve, table_paths, two_tiers

from refcache.engine import SamplingParams, TokenizedGenerateReqInput
from refcache.runtime import SimulatedRuntime, Tracker, lazy
from refcache.types import EvictParams

LENGTHS = {"load": 3, "back up": 4, "attend": 2, "forward": 3}
UNIT, HEIGHT, LEFT, TOP = 62, 30, 92, 34
COLOURS = {"schedule": "#dfe8f5", "forward": "#e3f1dd", "load": "#fdebc8", "write": "#f7dfe0"}


@dataclass
class Box:
    """A launch, or several of one stream in a row that are drawn as one."""

    stream: str
    label: str
    start: float
    end: float
    waits: list["Box"] = field(default_factory=list)


class Recorder(SimulatedRuntime):
    """A machine that runs nothing by itself, and records what is issued and what waits for what."""

    def __init__(self) -> None:
        super().__init__(lazy, Tracker())
        self.issued: list[tuple[str, str, dict[int, int], int, list[tuple[int, int]]]] = []
        self._asked: dict[int, list[tuple[int, int]]] = {}

    def _issue(self, stream: Any, *args: Any) -> None:
        super()._issue(stream, *args)
        access = stream.queue[-1].access
        waits = self._asked.pop(stream.index, [])
        self.issued.append((stream.name, access.name, access.clock, stream.index, waits))

    def _queue_wait(self, stream: Any, capture: Any) -> None:
        source = capture.stream.index
        self._asked.setdefault(stream.index, []).append((source, capture.clock.get(source, 0)))
        super()._queue_wait(stream, capture)


def boxes(machine: Recorder, since: int, label: Callable[[str, str, int], str]) -> list[Box]:
    """What was issued after the first ``since`` launches, as boxes with their times.

    The last forward before that is still running: it is drawn as its page table and the rest.

    Args:
        label: the text of a launch, from its stream, its name, and how many of that name the stream
            has had; what has the text of the box before it joins that one.
    """
    ends: dict[tuple[int, int], Box] = {}
    last: dict[int, Box] = {}
    seen: Counter[tuple[str, str]] = Counter()
    drawn: list[Box] = []
    tables = [n for n, one in enumerate(machine.issued[:since]) if one[1] == "page_table"]
    for number, (stream, name, clock, index, waits) in enumerate(machine.issued):
        if number < since:
            if stream != "forward" or number < tables[-1]:
                continue  # done, as its result was waited for
            text = "page table" if name == "page_table" else "forward before"
        else:
            text = label(stream, name, seen[stream, name])
            seen[stream, name] += 1
        before = [ends[key] for key in clock.items() if key in ends]
        waited = {id(ends[k]): ends[k] for k in waits if k in ends and ends[k].stream != stream}
        previous = last.get(index)
        if previous is not None and previous.label == text and not waited:
            box = previous
        else:
            start = max([b.end for b in (*before, *([previous] if previous else []))], default=0.0)
            length = next((n for head, n in LENGTHS.items() if text.startswith(head)), 1)
            box = Box(stream, text, start, start + length, list(waited.values()))
            drawn.append(box)
        ends[index, clock[index]] = last[index] = box
    return drawn


def draw(rows: list[str], drawn: list[Box]) -> str:
    """An SVG with a row a stream."""
    width = LEFT + UNIT * max(box.end for box in drawn) + 20
    height = TOP + 2 * HEIGHT * len(rows)
    middle = {row: TOP + 2 * HEIGHT * i + HEIGHT / 2 for i, row in enumerate(rows)}
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif" font-size="11">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for row, y in middle.items():
        out.append(f'<text x="8" y="{y + 4:.0f}" font-weight="bold">{row}</text>')
        out.append(
            f'<line x1="{LEFT}" x2="{width - 10:.0f}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ccc"/>'
        )
    for box in drawn:
        for source in box.waits:
            down = HEIGHT / 2 if middle[source.stream] < middle[box.stream] else -HEIGHT / 2
            ends = f"M{LEFT + UNIT * source.end - 6:.0f} {middle[source.stream] + down:.0f}"
            tip = f"L{LEFT + UNIT * box.start + 4:.0f} {middle[box.stream] - down:.0f}"
            out.append(f'<path d="{ends}{tip}" fill="none" stroke="#555" marker-end="url(#tip)"/>')
    for box in drawn:
        x, w = LEFT + UNIT * box.start, UNIT * (box.end - box.start)
        y = middle[box.stream] - HEIGHT / 2
        colour = COLOURS.get(box.stream, "#eee")
        out.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{w - 3:.0f}" height="{HEIGHT}" rx="4" '
            f'fill="{colour}" stroke="#777"/>'
        )
        out.append(
            f'<text x="{x + (w - 3) / 2:.0f}" y="{y + HEIGHT / 2 + 4:.0f}" '
            f'text-anchor="middle">{escape(box.label)}</text>'
        )
    return "\n".join([*out, "</svg>\n"])


# ---- what is run ---------------------------------------------------------------------------------


def host_hit() -> tuple[Any, Callable[[], Any]]:
    """A loop that decodes one request while another comes whose prefix is on the host.

    The scheduler, and the step that admits it.
    """
    machine = Recorder()
    scheduler = two_tiers(Run(), "write_through", 0, runtime=machine, hicache_ratio=4.0)
    serve(scheduler, {"first": prompt(0, 8)}, outputs=1)
    scheduler.tree_cache.check_hicache_events()
    scheduler.tree_cache.evict(EvictParams(scheduler.max_total_num_tokens))
    scheduler.submit(TokenizedGenerateReqInput("other", prompt(5, 3), SamplingParams(9)))
    scheduler.step()
    scheduler.step()
    scheduler.submit(TokenizedGenerateReqInput("again", prompt(0, 9), SamplingParams(2)))
    return scheduler, scheduler.step


FORWARD = {"page_table": "page table", "embed": "embed", "sample": "sample"}


def layered_label(stream: str, name: str, count: int) -> str:
    """The text of a launch of a step with a load."""
    if name == "h2d":
        return "indices" if count == 0 else "inputs"
    if name in ("qkv", "set_kv_buffer"):
        return f"K, V {count}"
    if name == "attention":
        return f"attend {count}"
    if name in ("store_to_map", "d2h"):
        return "tokens"
    if name.startswith("load layer"):
        return f"load {name.rpartition(' ')[2]}"
    return {"req_to_token.write": "rows", **FORWARD}.get(name, name)


def load_svg() -> str:
    """A prefill with a host hit."""
    scheduler, step = host_hit()
    since = len(scheduler.runtime.issued)
    step()
    drawn = boxes(scheduler.runtime, since, layered_label)
    return draw(["schedule", "load", "forward"], drawn)


def write_label(stream: str, name: str, count: int) -> str:
    """The text of a launch of a step that writes; of its forward only what matters here."""
    if name == "backup":
        return "back up all layers"
    if stream == "forward":
        return {"page_table": "page table", "resolve_future": "futures"}.get(name, "forward")
    return {"h2d": "inputs" if count == 0 else "indices", "req_to_token.write": "rows"}.get(
        name, name
    )


def write_svg() -> str:
    """A request ends: its result is processed while the next forward, of another request, runs."""
    machine = Recorder()
    scheduler = two_tiers(Run(), "write_through", 0, runtime=machine)
    for rid, outputs in (("ends", 2), ("goes on", 9)):
        tokens = prompt(len(rid), 5)
        scheduler.submit(TokenizedGenerateReqInput(rid, tokens, SamplingParams(outputs)))
    while not scheduler.finished_reqs:
        since = len(machine.issued)
        scheduler.step()
    drawn = boxes(machine, since, write_label)
    return draw(["schedule", "forward", "write"], drawn)


@dataclass(frozen=True)
class Diagram:
    """``make`` gives the SVG."""

    title: str
    caption: str
    make: Callable[[], str]

    def svg(self) -> str:
        return cache(self.make)()


DIAGRAMS = {
    "load": Diagram(
        "A prefill with a host hit: three layers on three streams",
        "A prefill with a host hit, three layers, with an event a layer. An arrow is a wait. The\n"
        "copy starts behind the schedule stream (its indices) and the forward that still runs;\n"
        "each layer's attention waits for that layer's load, and for no other. Rows, and the page\n"
        "table that is read of them, do not wait for the load.",
        load_svg,
    ),
    "write": Diagram(
        "A write: it waits for the caller's stream and for the forward",
        "A request ends and its node is written. Its last token's row is computed by the forward\n"
        "that was launched before the result was processed, so the copy waits for that forward as\n"
        "well as for its indices. Nothing waits for the write: the host asks for its finish event\n"
        "in a later step, and releases the node then.",
        write_svg,
    ),
}


# ---- calls ---------------------------------------------------------------------------------------


@cache
def calls_of_a_step() -> str:
    """The functions of the source map that a step with a host hit calls, nested as they call."""
    with Run() as run:
        _, step = host_hit()
    names: dict[CodeType, str] = {}
    for path in table_paths(named=True):
        try:
            value = resolve(path, run.instances)
        except AttributeError:
            continue  # an attribute of what this step has none of
        code = None if isinstance(value, property | type) else code_of(value)
        if code is not None:
            names.setdefault(code, ".".join(path.split(".")[-2:]).removeprefix("alloc."))
    found: list[tuple[int, str]] = []
    depth = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        if frame.f_code in names:
            if event == "call":
                found.append((depth, names[frame.f_code]))
            depth += {"call": 1, "return": -1}.get(event, 0)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return "\n".join(nested(found))


def nested(found: list[tuple[int, str]], level: int = 0) -> list[str]:
    """Indented lines; equal neighbours, with all that is below them, are one with its number.

    >>> nested([(0, "a"), (1, "b"), (1, "b"), (0, "c")])
    ['a', '  b  (2 times)', 'c']
    """
    heads = [n for n, (depth, _) in enumerate(found) if depth == level]
    blocks: list[tuple[int, list[str]]] = []
    for start, end in zip(heads, [*heads[1:], len(found)], strict=False):
        block = ["  " * level + found[start][1], *nested(found[start + 1 : end], level + 1)]
        if blocks and blocks[-1][1] == block:
            blocks[-1] = blocks[-1][0] + 1, block
        else:
            blocks.append((1, block))
    return [
        line + (f"  ({times} times)" if times > 1 and n == 0 else "")
        for times, block in blocks
        for n, line in enumerate(block)
    ]
