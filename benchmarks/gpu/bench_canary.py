"""What the canary costs a server: off, sampled at 1/64, always; on the card.

    PYTHONPATH=src:aliases python benchmarks/gpu/bench_canary.py results.json

The tree under it does nothing, so all the time is the canary's. A request matches a prompt of 2,048
tokens, locks it, and is cached when it ends, in the KV pool of an 8B model (32 layers, 8 heads of
128, bf16, pages of 64). Its cost a decode step: 64 requests run at a time and each takes 256 steps,
so one ends in every fourth step. The step is taken as short as can be: reading 16 GB of weights
once. The host's time and the card's are added up, as if nothing overlapped.
"""

import json
import random
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from bench_ops import RESULTS, milliseconds, report

import refcache

LAYERS, HEADS, WIDTH, PAGE, PAGES = 32, 8, 128, 64, 2048
TOKENS, REQUESTS, BATCH, OUTPUTS = 2048, 512, 64, 256


class Tree:
    """A tree cache whose calls do nothing: every prompt has its own pages, always found."""

    page_size = PAGE

    def __init__(self, planes: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
        pool = SimpleNamespace(k_buffer=planes[0], v_buffer=planes[1])
        self.token_to_kv_pool_allocator = SimpleNamespace(
            get_kvcache=lambda: pool, free=lambda slots: None, clear=lambda: None
        )
        rows = torch.arange(PAGE, (PAGES + 1) * PAGE, device="cuda").view(-1, TOKENS)
        self.req_to_token_pool = SimpleNamespace(req_to_token=rows)

    def match_prefix(self, params: Any) -> Any:
        slots = self.req_to_token_pool.req_to_token[params.row]
        return SimpleNamespace(device_indices=slots, last_device_node=params)

    def inc_lock_ref(self, node: Any) -> None: ...

    def cache_unfinished_req(self, req: Any) -> None: ...

    def cache_finished_req(self, req: Any) -> None: ...


def requests(tree: Tree) -> list[Any]:
    """As many as there is KV for, in rounds: all but the first of a prompt are reuses."""
    rng, rows = random.Random(0), len(tree.req_to_token_pool.req_to_token)
    prompts = [[rng.randrange(32_000) for _ in range(TOKENS)] for _ in range(rows)]
    keys = [SimpleNamespace(token_ids=prompt, extra_key=None) for prompt in prompts]
    return [
        SimpleNamespace(
            key=keys[i % rows], row=i % rows, req_pool_idx=i % rows, extra_key=None,
            cache_protected_len=0, kv_committed_freed=False, kv_committed_len=TOKENS,
            origin_input_ids=prompts[i % rows], output_ids=[],
        )
        for i in range(REQUESTS)
    ]  # fmt: skip


def serve(tree: Tree, queue: list[Any]) -> None:
    for request in queue:
        found = tree.match_prefix(request)
        tree.inc_lock_ref(found.last_device_node)
        tree.cache_finished_req(request)


def cost(tree: Tree, queue: list[Any], mode: str, seed: int = 0) -> tuple[float, int]:
    """Milliseconds a request until the card is done, and pages looked at."""
    with refcache.canary(tree, mode, seed=seed) as canary:
        serve(tree, queue)  # compiles, and keeps every digest
        torch.cuda.synchronize()
        before, start = canary.looked, time.perf_counter()
        serve(tree, queue)
        torch.cuda.synchronize()
        took = (time.perf_counter() - start) / len(queue) * 1e3
        assert canary.damaged() == []
        return took, canary.looked - before


def main(path: str) -> None:
    shape = ((PAGES + 1) * PAGE, HEADS, WIDTH)
    planes = tuple(
        [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
        for _ in range(2)
    )
    tree = Tree(planes)  # type: ignore[arg-type]
    queue = requests(tree)
    weights = torch.zeros(2**17, 2**12, device="cuda", dtype=torch.bfloat16)  # 1 GiB
    vector = torch.zeros(2**12, device="cuda", dtype=torch.bfloat16)

    def read_weights() -> None:
        for _ in range(16):
            torch.mv(weights, vector)

    step = milliseconds(read_weights)
    report("decode step: 16 GiB of weights are read", ms=step)
    bare, _ = cost(tree, queue, "off")
    rate = BATCH / OUTPUTS
    for mode in ("sampled", "always"):
        seeds = range(4 if mode == "sampled" else 1)
        found = [cost(tree, queue, mode, seed) for seed in seeds]
        took = sum(ms for ms, _ in found) / len(found) - bare
        pages = sum(looked for _, looked in found) / len(found) / len(queue)
        share = took * rate / step
        report(f"canary {mode}", ms_a_request=took, pages=pages, of_a_step=f"{share:.2%}")
    with refcache.canary(tree, "always", on_damage=lambda count: None) as canary:
        serve(tree, queue[:4])
        planes[0][7][3 * PAGE + 5] += 1
        serve(tree, queue[:1])
        assert canary.damaged() == [3], canary.damaged()
    header = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    with open(path, "w") as file:
        json.dump({**header, "rows": RESULTS}, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
