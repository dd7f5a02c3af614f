"""Tests that need a CUDA card. Run them alone (``pytest tests/gpu``): the rest interprets."""

import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if not torch.cuda.is_available():
        reason = "no CUDA device"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        reason = "Triton is interpreted in this process: run `pytest tests/gpu` alone"
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def registered() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Makes registered (not allocated-as-pinned) host memory; undone after the test.

    The storage itself begins at the registered address: that is where ``is_pinned`` looks.
    """
    cudart: Any = torch.cuda.cudart()
    kept: list[torch.Tensor] = []

    def make(content: torch.Tensor) -> torch.Tensor:
        pages = mmap.mmap(-1, max(1, content.numel()))  # starts at a page boundary
        tensor = torch.frombuffer(pages, dtype=torch.uint8)[: content.numel()]
        tensor.copy_(content)
        size = -(-len(pages) // mmap.PAGESIZE) * mmap.PAGESIZE
        assert int(cudart.cudaHostRegister(tensor.data_ptr(), size, 0)) == 0
        kept.append(tensor)
        assert tensor.is_pinned() or not tensor.numel()
        return tensor

    yield make
    torch.cuda.synchronize()
    for tensor in kept:
        assert int(cudart.cudaHostUnregister(tensor.data_ptr())) == 0
