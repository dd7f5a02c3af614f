"""What runs beside the transfers: layers of an 8B model's size, as a prefill and as decode steps.

A layer gathers the cached rows of the batch, attends to them and runs its MLP; it is one CUDA
graph. The gathered rows of each layer stay in a buffer of their own, so that after a run they can
be compared with what should have arrived before the layer read it.
"""

from typing import Any

import torch
from torch.nn import functional

HIDDEN, HEADS, WIDTH, MLP = 4096, 32, 128, 14336
WEIGHTS = 4  # sets of weights; layers take them in turn, each is larger than the L2 cache

_weights: list[dict[str, torch.Tensor]] = []


def weights(layer: int) -> dict[str, torch.Tensor]:
    if not _weights:
        shapes = {
            "q": (HIDDEN, HIDDEN), "kv": (HIDDEN, 2048), "o": (HIDDEN, HIDDEN),
            "up": (HIDDEN, 2 * MLP), "down": (MLP, HIDDEN), "latent": (512, 2048),
        }  # fmt: skip
        for _ in range(WEIGHTS):
            made = {
                name: torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)
                for name, shape in shapes.items()
            }
            _weights.append(made)
    return _weights[layer % WEIGHTS]


class Prefill:
    """``new`` tokens over cached rows at ``slots`` of the planes ``[layer, slot, head, dim]``."""

    def __init__(self, planes: list[torch.Tensor], slots: torch.Tensor, new: int) -> None:
        self.layers = len(planes[0])
        self.seen = [
            torch.empty((self.layers, len(slots), *p.shape[2:]), dtype=p.dtype, device="cuda")
            for p in planes
        ]
        self.slots = slots.clone()
        self.x = torch.randn(new, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.graphs: list[torch.cuda.CUDAGraph] = []
        pool = None
        for layer in range(self.layers):
            for _ in range(2 if layer == 0 else 0):
                self._layer(planes, layer)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._layer(planes, layer)
            pool = pool or graph.pool()
            self.graphs.append(graph)

    def _layer(self, planes: list[torch.Tensor], layer: int) -> None:
        w, x, seen = weights(layer), self.x, [s[layer] for s in self.seen]
        for plane, rows in zip(planes, seen, strict=True):
            torch.index_select(plane[layer], 0, self.slots, out=rows)
        new = x @ w["kv"]
        if len(seen) == 2:
            cached = torch.stack([rows.flatten(1) for rows in seen], 0)
            new = new.view(len(x), 2, -1).transpose(0, 1)
            k, v = (torch.cat((a, b)).view(-1, 8, WIDTH) for a, b in zip(cached, new, strict=True))
        else:  # the latent rows are projected to keys and values
            up = (seen[0].flatten(1)[:, :512] @ w["latent"]).view(-1, 2, 1024)
            new = new.view(len(x), 2, -1)
            k, v = (torch.cat((up[:, i], new[:, i])).view(-1, 8, WIDTH) for i in (0, 1))
        q = (x @ w["q"]).view(1, len(x), HEADS, WIDTH).transpose(1, 2)
        out = functional.scaled_dot_product_attention(
            q, k[None].transpose(1, 2), v[None].transpose(1, 2), enable_gqa=True
        )
        x = out.transpose(1, 2).reshape(len(x), HIDDEN) @ w["o"]
        gate, up = (x @ w["up"]).chunk(2, 1)
        self.out = functional.silu(gate) * up @ w["down"]

    def run(self, wait: Any = None) -> None:
        """Replay every layer on the current stream, ``wait(layer)`` before each."""
        for layer, graph in enumerate(self.graphs):
            if wait is not None:
                wait(layer)
            graph.replay()


class Steps:
    """One graph a step, to run again and again: ``decode`` (bandwidth-bound) or ``prefill``."""

    def __init__(self, kind: str) -> None:
        rows, layers = (64, 32) if kind == "decode" else (512, 8)
        x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        cache = torch.randn(rows if kind == "decode" else 1, 8, 1024, WIDTH, device="cuda").to(
            torch.bfloat16
        )
        weights(0)

        def step() -> torch.Tensor:
            y = x
            for layer in range(layers):
                w = weights(layer)
                q = (y @ w["q"]).view(cache.shape[0], -1, HEADS, WIDTH).transpose(1, 2)
                a = functional.scaled_dot_product_attention(q, cache, cache, enable_gqa=True)
                y = a.transpose(1, 2).reshape(rows, HIDDEN) @ w["o"]
                gate, up = (y @ w["up"]).chunk(2, 1)
                y = functional.silu(gate) * up @ w["down"]
            return y

        step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = step()
