"""The part of docs/performance.md about transfers beside a model, and its figure.

Made of the latest results of ``bench_model.py``, ``h200-DATE-model-PART.json``: ``mha`` and ``mla``
(one run each), ``cells`` (loads of other sizes), ``caps`` (kernels under other caps, for the
figure) and ``recipe``.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

Row = dict[str, Any]
PEERS = ("sglang", "memcpy")
NAMES = {
    "refcache": "refcache", "sglang": "SGLang 0.5.23", "memcpy": "batched memcpy",
    "load, then compute": "load, then compute",
}  # fmt: skip

HEAD = """# Performance

What a user of the cache feels comes first: transfers beside a model. Then the ops alone.

## Beside a model

{device}, torch {torch}, Triton {triton}. A prefill of N new tokens with H on the host: 32 layers
of an 8B model's size (rows of 2,048 bytes for each of K and V), one CUDA graph a layer: a gather
of the cached rows, attention to them, the MLP. Through `HiCacheController` as it is by default,
with a wait a layer; wall time from before `start_loading` to the end of the last layer. The ratio
is to the *ideal*: the larger of the compute alone and the payload at the peak of one memcpy
({h2d:.1f} GB/s, and {d2h:.1f} to the host). Pages are scattered on both tiers. Medians of five
interleaved rounds; before, every path ran once into a poisoned destination, and every layer that
the model saw was compared. Peers in the same run: SGLang 0.5.23's kernels, built from the text in
its wheel and launched as it launches them (page 1: rows by 2 blocks; 16 and 64: TMA by 4), and
batched memcpy, listed and issued by the caller. `benchmarks/gpu/bench_model.py` measures,
`benchmarks/results/` has the figures.

![slow-down of the model against speed](performance-frontier.svg)

"""

FIGURE_TEXT = """The figure has every path and peer: lower right is what moves fast and is not
felt. Loads: how much longer layers of the prefill take (N = 512) while 16,384 tokens come in.
Writes: the median step beside a write of 16,384 tokens; what batched memcpy costs is not there but
in the host's time of its call, during which no step is launched (see "lost" below). Caps other
than the default were measured with pages of one token in a run of their own. Not drawn: a kernel
without a cap beside a write (decode steps lose 41 ms, which is the whole write), and loads that
were over before the call returned.
"""

NOT_REACHED = """
What is not reached, and why:

* **16,384 tokens, N = 512, pages 64 and 16** are about 1 % behind the best peer. At page 64 that
  is batched memcpy, whose caller lists and issues everything (17 ms of host time) before the model
  starts, which costs nothing where the model would wait anyhow; with more compute (N = 2,048,
  4,096) it is 5 to 8 % behind the thread, which lists layer by layer. At page 16 it is SGLang's TMA
  kernel, within what two runs differ.
* **A write of pages of one token beside a prefill** costs 8 ms at 41 GB/s, where 3.5 ms at 22 GB/s
  was asked. Any kernel takes multiprocessors from the matrix products (one or two of 132 cost them
  x1.11 to x1.19 while it runs), so a slower write loses more in all: one program loses 10 ms.
  SGLang loses 10 ms here. The decode is not bound by multiprocessors and loses 1.06 ms where 1.0
  was asked.
"""

CELLS_TEXT = """
Sizes and pages that none of the rules was made from, drawn afterwards, in a run of their own:

"""

RULES_TEXT = """
The rules of this card (`refcache.pool.transfer_rule`): a load goes by the copy engine from 64 KiB
a copy and 1 GiB in all, else by a kernel of two programs, all layers in one launch; a write goes
by the copy engine from 16 KiB a copy, else by a kernel of two programs. What they come from:

* The engine moves 52 to 54 GB/s in copies of 32 KiB and more, to the host also in copies of 16 KiB
  (34 GB/s); copies of 16 KiB to the device come to 5 GB/s. One stream is as fast as four. Each
  copy costs the host half a microsecond, twice that while another thread launches: from 64 KiB on
  the thread is ahead of the link all the same.
* A load of 4,096 tokens is over before the thread's start has paid off: 16.7 ms by
  a kernel of two programs, 17.4 to 17.8 by the engine (N = 512, page 64).
* Two programs of 1,024 threads, each with 128 KiB in flight, load 50 GB/s and slow the layers
  x1.13. Three: x1.34 at 51 GB/s; six: x1.76. With half the bytes in flight two programs load 39 to
  44 GB/s.
* Writes are posted: two programs with 32 KiB each write 28 GB/s beside a decode, which is slowed
  by 1 %; three 46 GB/s at x1.34; four 51 GB/s at x2.3; without a cap a decode stands still.
"""

MLA_TEXT = """
### MLA

61 layers with one row of 1,152 bytes.

"""

RECIPE = """
### In other engines' call sites

Their copies of 16,384 tokens replaced by the ops, at the shapes of their call sites: per-layer
lists of buffers, index tensors on the device (`8b`, layer_first). Nothing runs beside, so the ops
have no cap (`max_programs=0`). Wall time in ms, and the host's part of it.

```python
ops, how = torch.ops.refcache, (page_size, "layer_first", max_programs)
device, slots = k_layers + v_layers, (host_indices, device_indices)
# SGLang: transfer_kv_all_layer(src_k, dst_k, ..., indices, ...), once a write
ops.backup_all_layer(host, device, *slots, *how)
# SGLang: transfer_kv_per_layer(...), once a layer of a load
ops.load_per_layer(device, host, *slots, layer, *how)
# vLLM: swap_blocks in batched memcpys, all layers; a flag tells when each layer is there
ops.load_layers(device, host, *slots, flags, 0, layers, *how)
```

"""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


class Results:
    """Rows of one run, looked up by what they are about."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        assert all(row.get("verified", True) for row in rows)

    def load(self, page: int, tokens: int, new: int, path: str = "refcache") -> Row:
        return self._one("load", page=page, H=tokens, N=new, path=path)

    def write(self, page: int, beside: str, path: str = "refcache") -> Row:
        return self._one("write", page=page, beside=beside, path=path)

    def _one(self, what: str, **about: Any) -> Row:
        rows = [r for r in self.rows if r["what"] == what and about.items() <= r.items()]
        return rows[0] if rows else {}

    def best_peer(self, page: int, tokens: int, new: int) -> Row:
        found = [row for peer in PEERS if (row := self.load(page, tokens, new, peer))]
        return min(found, key=lambda row: float(row["ms"]))

    def peak(self) -> Row:
        return next(row for row in self.rows if row["what"] == "peak")

    def loads(self) -> str:
        cells = sorted({(r["H"], r["N"], r["page"]) for r in self.rows if r["what"] == "load"})
        out = []
        for tokens, new, page in cells:
            first = self.load(page, tokens, new)
            row = [f"{tokens:,}, {new:,}, {page}", f"{first['compute']:.1f} / {first['ideal']:.1f}"]
            found = {path: self.load(page, tokens, new, path) for path in NAMES}
            best = min(f["ms"] for f in found.values() if f)
            for one in found.values():
                text = f"{one['ms']:.1f} ({one['ratio']:.2f})" if one else "-"
                row.append(f"**{text}**" if one and one["ms"] == best else text)
            out.append([*row, _way(first["plan"]), f"{first['host_ms']:.2f}"])
        head = ["H, N, page", "compute / ideal", *NAMES.values(), "way", "host"]
        return table(head, out)

    def writes(self) -> str:
        out = []
        for page in (1, 16, 64):
            for path in ("refcache", *PEERS):
                beside = [self.write(page, kind, path) for kind in ("decode", "prefill")]
                if not all(beside):
                    continue
                name = NAMES[path] + (f" ({_way(beside[0]['plan'])})" if path == "refcache" else "")
                row = [str(page), name]
                for one in beside:
                    row += [f"{one['lost']:.1f}", f"x{one['p50']:.2f} / x{one['p99']:.2f}"]
                    row.append(f"{one['gbps']:.1f}")
                out.append([*row, f"{beside[0]['host_ms']:.1f}"])
        head = ["page", "path", "decode: lost ms", "p50 / p99", "GB/s"]
        head += ["prefill: lost ms", "p50 / p99", "GB/s", "host ms"]
        return table(head, out)


def _way(plan: str) -> str:
    if "'direct'" in plan:
        return "engine"
    cap = plan.split("max_programs=")[1].split(",")[0]
    return f"kernel, {cap} program{'s' * (cap != '1')}"


def targets(mha: Results) -> str:
    """Every target, with what was measured."""
    rows: list[tuple[str, str, str, bool]] = []

    def ratio(what: str, page: int, tokens: int, new: int, most: float) -> None:
        seen = mha.load(page, tokens, new)["ratio"]
        rows.append((what, f"{most:.2f} of ideal", f"{seen:.2f}", round(seen, 2) <= most))

    def peer(what: str, page: int, tokens: int, new: int) -> None:
        mine, best = mha.load(page, tokens, new)["ms"], mha.best_peer(page, tokens, new)
        shown = f"{mine:.1f} ms; {NAMES[best['path']]} {best['ms']:.1f}"
        rows.append((what, "best peer", shown, mine <= best["ms"]))

    for page, most in ((64, 1.08), (16, 1.11), (1, 1.15)):
        ratio(f"load 16k, N 2,048, page {page}", page, 16384, 2048, most)
    peer("load 16k, N 512, page 64", 64, 16384, 512)
    ratio("load 16k, N 512, page 1", 1, 16384, 512, 1.13)
    peer("load 16k, N 512, page 16", 16, 16384, 512)
    for page in (1, 16, 64):
        peer(f"load 16k, N 4,096, page {page}", page, 16384, 4096)
    for tokens, name in ((4096, "4k"), (256, "256 tokens")):
        for page in (1, 16, 64):
            peer(f"load {name}, N 512, page {page}", page, tokens, 512)
    for page, most, name in ((64, 1.03, "copy engine, page 64"), (1, 1.13, "kernel, page 1")):
        seen = mha.load(page, 16384, 512)["slow"]
        what = f"compute slowed by a 16k load: {name}"
        rows.append((what, f"x{most:.2f}", f"x{seen:.2f}", round(seen, 2) <= most))
    for page, asked in ((64, (0.8, 0.5, 38)), (16, None), (1, (1.0, 3.5, 22))):
        for beside, most in (("decode", 0), ("prefill", 1)):
            mine = mha.write(page, beside)
            peers = [row for p in PEERS if (row := mha.write(page, beside, p))]
            shown = f"{mine['lost']:.2f} ms at {mine['gbps']:.1f} GB/s"
            shown += "; " + ", ".join(
                f"{NAMES[p['path']]} {p['lost']:.1f} at {p['gbps']:.1f}" for p in peers
            )
            if asked is None:
                good = mine["lost"] <= min(p["lost"] for p in peers)
                want = "no more lost than the best peer"
            else:
                good = mine["lost"] <= asked[most] and mine["gbps"] >= asked[2]
                want = f"{asked[most]} ms at {asked[2]} GB/s"
                if page == 64:
                    own = mha.write(page, beside, "memcpy")["lost"]
                    want += f", or memcpy's own {own:.2f} + 0.3"
                    good |= mine["lost"] <= own + 0.3
            rows.append((f"write 16k beside {beside}, page {page}", want, shown, good))
    host = [r["host_ms"] for r in mha.rows if r.get("path") == "refcache"]
    rows.append(("host time of `start_loading`, `write`", "2 ms", f"{max(host):.1f} ms at most",
                 max(host) <= 2))  # fmt: skip
    count = f"{sum(good for *_, good in rows)} of {len(rows)} reached."
    cells = [[*cells, "yes" if good else "no"] for *cells, good in rows]
    return f"### Targets\n\n{count}\n\n" + table(["what", "target", "measured", "reached"], cells)


def recipe(rows: list[Row]) -> str:
    out = [
        [str(r["page"]), r["call"], f"{r['theirs']:.1f} / {r['theirs host']:.2f}",
         f"{r['ours']:.1f} / {r['ours host']:.2f}"]
        for r in rows if r["what"] == "recipe"
    ]  # fmt: skip
    return RECIPE + table(["page", "call", "theirs: ms / host", "the ops: ms / host"], out)


def figure(mha: Results, caps: Results, target: Path) -> None:
    """The frontier: slow-down of the model against GB/s, for both directions."""
    plot, axes = plt.subplots(1, 2, figsize=(11, 5))
    colours = {"refcache": "#cc3311", "sglang": "#4477aa", "memcpy": "#228833", "kernel": "#999933"}
    marks = {1: "o", 16: "s", 64: "^"}
    for rows, own in ((mha.rows, True), (caps.rows, False)):
        for row in rows:
            path = row.get("path", "")
            kind = path.split()[0] if path else ""
            if kind not in colours or (not own and kind != "kernel"):
                continue
            if row["what"] == "load" and "slow" in row:
                axis, slow = axes[0], row["slow"]
            elif row["what"] == "write" and row["p50"] is not None:
                axis, slow = axes[1], row["p50"]
            else:
                continue
            hollow = row.get("beside") == "prefill"
            colour = colours[kind]
            axis.scatter(
                row["gbps"], slow, s=60, marker=marks[row["page"]], edgecolors=colour,
                facecolors="none" if hollow else colour,
            )  # fmt: skip
            if kind == "kernel" and not hollow:
                axis.annotate(path.removeprefix("kernel ").replace(" at once", ""),
                              (row["gbps"], slow), xytext=(4, 4), textcoords="offset points",
                              fontsize=7)  # fmt: skip
    for axis, title in zip(axes, ("loads", "writes"), strict=True):
        axis.set(title=title, xlabel="GB/s", ylabel="slow-down of the model")
        axis.axhline(1, color="#bbbbbb", linewidth=0.8)
    axes[0].set_xlim(42, 55)
    axes[1].set_yscale("log")
    axes[1].set_yticks([1, 1.5, 2, 3, 5], ["1", "1.5", "2", "3", "5"])
    axes[1].minorticks_off()
    names = {**NAMES, "kernel": "kernel, other caps (programs)"}
    for kind, colour in colours.items():
        axes[0].scatter([], [], color=colour, label=names[kind])
    for page, mark in marks.items():
        axes[0].scatter([], [], color="#777777", marker=mark, label=f"page {page}")
    axes[0].legend(loc="upper left", fontsize=8)
    axes[1].scatter([], [], color="#777777", label="beside decode steps")
    axes[1].scatter([], [], edgecolors="#777777", facecolors="none", label="beside prefill steps")
    axes[1].legend(loc="upper left", fontsize=8)
    plot.tight_layout()
    plot.savefig(target, metadata={"Date": None})


def text(results: Path, folder: Path) -> str:
    """The part of the page; writes the figure into ``folder``."""
    found = {
        part: json.loads(max(results.glob(f"h200-*-model-{part}.json")).read_text())
        for part in ("mha", "mla", "cells", "caps", "recipe")
    }
    mha = Results(found["mha"]["rows"])
    figure(mha, Results(found["caps"]["rows"]), folder / "performance-frontier.svg")
    mla = Results(found["mla"]["rows"])
    writes = (
        "\n### Writes\n\n16,384 tokens (2.1 GB) beside decode steps (batch 64, bound by memory) or "
        'prefill steps. "Lost"\nis the time that the steps take longer, in all; p50 and p99 are of '
        "the steps beside the write.\n\n"
    )
    return "".join((
        HEAD.format(**found["mha"], **mha.peak()), FIGURE_TEXT,
        '\n### Loads\n\nIn ms; "host" is the time of `start_loading`.\n\n', mha.loads(),
        writes, mha.writes(), "\n", targets(mha), NOT_REACHED, CELLS_TEXT,
        Results(found["cells"]["rows"]).loads(), RULES_TEXT,
        MLA_TEXT, mla.loads(), "\n", mla.writes(),
        recipe(found["recipe"]["rows"]),
    ))  # fmt: skip
