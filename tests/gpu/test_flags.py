"""``load_layers``: who waits for a layer's flag sees the layer; who does not is too early."""

import pytest
import torch

import refcache_ops
from refcache.errors import InvalidArgument
from refcache.reference import LAYOUTS
from refcache_ops.driver import wait_flag

LAYERS, TOKENS, ROW = 12, 256, 1152


def load_beside_consumer(layout: str, epochs: int, *, wait: bool) -> bool:
    """Load ``epochs`` times, each with new bytes, while a stream copies every layer as it arrives.

    Returns whether all copies were right. A first load, with flags of its own, compiles the kernel:
    the ones that count are issued while the stream of the loads still sleeps.
    """
    shape = {"L": LAYERS, "T": TOKENS, "H": 1, "D": ROW, "G": TOKENS // 64, "P": 64}
    axes = {"layer_first": "LTHD", "page_first": "TLHD", "page_first_direct": "GLPHD"}
    dims = [shape[a] for a in axes.get(layout, "GHPLD")]
    device = torch.zeros((LAYERS, TOKENS + 64, 1, ROW), dtype=torch.uint8, device="cuda")
    flags = torch.zeros(LAYERS, dtype=torch.int64, device="cuda")
    seen = torch.zeros((LAYERS, TOKENS, 1, ROW), dtype=torch.uint8, device="cuda")
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0)).cuda()
    at = torch.arange(TOKENS).cuda()
    loads, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    sizes = (0, LAYERS, 64, layout)
    warm_up = torch.empty(dims, dtype=torch.uint8).pin_memory()
    refcache_ops.load_layers([device], [warm_up], order, at + 64, flags.clone(), *sizes)
    right = True
    for epoch in range(1, epochs + 1):
        host = torch.randint(0, 256, dims, dtype=torch.uint8).pin_memory()
        device.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(loads):
            torch.cuda._sleep(100_000_000)  # tens of ms: the consumer's work is issued meanwhile
            refcache_ops.load_layers([device], [host], order, at + 64, flags, *sizes)
        with torch.cuda.stream(consumer):
            for layer in range(LAYERS):
                if wait:
                    wait_flag(flags, layer, epoch)
                seen[layer].copy_(device[layer, 64:])
        torch.cuda.synchronize()
        right &= torch.equal(seen, device[:, 64:])
    return right


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layer_is_complete_when_its_flag_is(layout: str) -> None:
    assert load_beside_consumer(layout, 4, wait=True)


def test_without_the_wait_the_consumer_is_too_early() -> None:
    assert not load_beside_consumer("layer_first", 1, wait=False)


def test_wait_flag_refuses_what_it_cannot_wait_for() -> None:
    flags = torch.zeros(2, dtype=torch.int64)
    for bad, layer in ((flags, 0), (flags.cuda(), 2), (flags.int().cuda(), 0)):
        with pytest.raises(InvalidArgument):
            wait_flag(bad, layer, 1)
