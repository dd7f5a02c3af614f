"""Pictures of docs/hybrid.md, drawn from trees that code has made.

    PYTHONPATH=src:aliases python scripts/hybrid_pictures.py

writes each below docs; ``tests/unit/test_hybrid_page.py`` fails while one differs. Every token of a
node is a cell, as far to the right as its position. A cell is blue: its KV is there. The strip
below it is green: its window slots are there. A dot at a node's end: a state. Above the tree is the
prompt that is looked up, dark as far as the match goes.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from refcache.allocator import SWATokenToKVPoolAllocator, TokenToKVPoolAllocator
from refcache.keys import RadixKey
from refcache.pool import (
    BaseLinearStateParams,
    HybridReqToTokenPool,
    Mamba2StateDType,
    ReqToTokenPool,
    StateShape,
)
from refcache.tree import MambaRadixCache, SWARadixCache, TreeNode
from refcache.types import CacheInitParams, InsertParams, MatchPrefixParams

CELL, HEIGHT, STRIP, LEFT, TOP = 34, 26, 7, 96, 24
KV, WINDOW, GONE, FOUND, ASKED = "#dfe8f5", "#7fb069", "#fff", "#4a6fa5", "#eee"


# ---- trees ---------------------------------------------------------------------------------------


def tree_of_states(states: int = 8, chunk: int = 4) -> MambaRadixCache:
    """An empty tree of tokens and states."""
    rows = HybridReqToTokenPool(
        size=4,
        mamba_size=states,
        mamba_spec_state_size=0,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=BaseLinearStateParams(
            shape=StateShape(conv=[(3, 2)], temporal=(2, 2, 1)),
            layers=[0, 1],
            dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
        ),
        mamba_layer_ids=[0, 1],
        enable_mamba_extra_buffer=False,
    )
    slots = TokenToKVPoolAllocator(64, torch.float32, "cpu", None)
    return MambaRadixCache(CacheInitParams(False, rows, slots, 1, mamba_cache_chunk_size=chunk))


def tree_of_windows(window: int = 4) -> SWARadixCache:
    """An empty tree of tokens and their window slots."""
    slots: Any = SWATokenToKVPoolAllocator(64, 64, 1, torch.float32, "cpu", None)
    rows = ReqToTokenPool(4, 64)
    return SWARadixCache(CacheInitParams(False, rows, slots, 1, sliding_window_size=window))


def insert(tree: Any, tokens: Sequence[int], gone: int = 0) -> None:
    """Cache tokens that have just been computed; window slots of the first ``gone`` are not."""
    slots = tree.token_to_kv_pool_allocator.alloc(len(tokens))
    params = InsertParams(RadixKey(tokens), slots, swa_evicted_seqlen=gone)
    if tree.supports_mamba():
        params.mamba_value = tree.req_to_token_pool.mamba_pool.alloc(1)
    if gone:
        tree.token_to_kv_pool_allocator.free_swa(slots[:gone])
    tree.insert(params)


def match(tree: Any, tokens: Sequence[int], **more: Any) -> Any:
    """What of a prompt can be used."""
    return tree.match_prefix(MatchPrefixParams(RadixKey(tokens), **more))


# ---- drawing -------------------------------------------------------------------------------------


def cell(x: float, y: float, token: object, colour: str, text: str = "#222") -> Iterator[str]:
    """A token."""
    yield (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{CELL - 2}" height="{HEIGHT}" fill="{colour}" '
        'stroke="#777"/>'
    )
    yield (
        f'<text x="{x + CELL / 2 - 1:.0f}" y="{y + 17:.0f}" text-anchor="middle" '
        f'fill="{text}">{token}</text>'
    )


def node_cells(tree: Any, node: TreeNode, start: int, y: float) -> Iterator[str]:
    """A node, with its components."""
    for position, token in enumerate(node.key, start):
        x = LEFT + CELL * position
        yield from cell(x, y, token, KV)
        if tree.supports_swa():
            colour = GONE if node.component("swa").value is None else WINDOW
            yield (
                f'<rect x="{x}" y="{y + HEIGHT + 2:.0f}" width="{CELL - 2}" height="{STRIP}" '
                f'fill="{colour}" stroke="#777"/>'
            )
    end = LEFT + CELL * (start + len(node.key)) - 2
    yield f'<path d="M{end + 1} {y - 3:.0f}v{HEIGHT + 6}" stroke="#222" stroke-width="2"/>'
    if tree.supports_mamba() and node.component("mamba").value is not None:
        yield f'<circle cx="{end + 1}" cy="{y + HEIGHT + 9:.0f}" r="5" fill="#c8553d"/>'


def rows_of(node: TreeNode, start: int, first: int) -> tuple[list[tuple[TreeNode, int, int]], int]:
    """The nodes below one, each with its first position and its row; and the rows they take."""
    placed: list[tuple[TreeNode, int, int]] = []
    row = first
    for child in node.children.values():
        placed.append((child, start, row))
        below, taken = rows_of(child, start + len(child.key), row)
        placed += below
        row += taken
    return placed, max(row - first, 1)


def draw(tree: Any, prompt: Sequence[int]) -> str:
    """An SVG of a tree as it is, and of what it answers to a prompt."""
    answer = match(tree, prompt)
    found = len(answer.device_indices)
    placed, count = rows_of(tree.root_node, 0, 0)
    step = HEIGHT + 36
    longest = max([len(prompt), *(start + len(node.key) for node, start, _ in placed)])
    width, height = LEFT + CELL * longest + 20, TOP + step * (count + 1)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="8" y="{TOP + 17}" font-weight="bold">match {found}</text>',
        f'<text x="8" y="{TOP + step + 17}" font-weight="bold">tree</text>',
    ]
    for position, token in enumerate(prompt):
        used = position < found
        colours = (FOUND, "#fff") if used else (ASKED, "#222")
        out += cell(LEFT + CELL * position, TOP, token, *colours)
    if answer.mamba_branching_seqlen is not None:
        x = LEFT + CELL * answer.mamba_branching_seqlen - 1
        out.append(
            f'<path d="M{x} {TOP - 6}v{HEIGHT + 12}" stroke="#c8553d" stroke-dasharray="4 3"/>'
            f'<text x="{x}" y="{TOP - 10}" text-anchor="middle" fill="#c8553d">'
            "a state here would help</text>"
        )
    last: dict[int, int] = {}
    for node, start, row in placed:
        y = TOP + step * (1 + row)
        above = last.get(start)
        if above is not None and above != row and start:
            x = LEFT + CELL * start - 1
            top = TOP + step * (1 + above) + HEIGHT + 3
            out.append(f'<path d="M{x} {top}V{y + HEIGHT // 2}" stroke="#222" fill="none"/>')
        last[start + len(node.key)] = row
        last.setdefault(start, row)
        out += node_cells(tree, node, start, y)
    return "\n".join([*out, "</svg>\n"])


# ---- what is drawn -------------------------------------------------------------------------------


def no_state_where_they_part() -> str:
    """Two prompts share four tokens; no state was taken there."""
    tree = tree_of_states()
    insert(tree, [1, 2, 3, 4, 5, 6])
    insert(tree, [1, 2, 3, 4, 7, 8])
    return draw(tree, [1, 2, 3, 4, 9, 9])


def a_state_where_they_part() -> str:
    """The same, after a prefill that left a state at the branching point."""
    tree = tree_of_states()
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8], [1, 2, 3, 4]):
        insert(tree, tokens)
    return draw(tree, [1, 2, 3, 4, 9, 9])


def a_window_that_lives() -> str:
    """A request of ten tokens that gave back the window slots of the first six."""
    tree = tree_of_windows()
    insert(tree, range(1, 11), gone=6)
    return draw(tree, range(1, 12))


def a_window_that_is_gone() -> str:
    """The same tree, and a prompt that parts from it in the middle."""
    tree = tree_of_windows()
    insert(tree, range(1, 11), gone=6)
    return draw(tree, [*range(1, 9), 20, 21])


PICTURES: dict[str, Callable[[], str]] = {
    "states": no_state_where_they_part,
    "branching": a_state_where_they_part,
    "window": a_window_that_lives,
    "no-window": a_window_that_is_gone,
}


def written() -> dict[str, str]:
    """Each file below docs, and its content."""
    return {f"hybrid-{name}.svg": make() for name, make in PICTURES.items()}


if __name__ == "__main__":
    for file, text in written().items():
        (Path(__file__).parents[1] / "docs" / file).write_text(text, encoding="utf-8")
