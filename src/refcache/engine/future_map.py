"""``FutureMap``: tokens that the next batch takes as input before the host has seen them.

In the overlap loop a decode step is prepared while the forward that makes its input tokens is still
running. Its ``input_ids`` then hold *futures*: ``-i`` stands for entry ``i`` of a buffer on the
device. The forward that makes a token stores it there; the next forward, later on the same stream,
resolves the future.

Entry ``row + 1`` belongs to the request in that row of ``req_to_token``: a request needs only its
newest token. (SGLang uses a ring, which overwrites the future of a running request when enough
short requests are prefilled before its next decode.)
"""

import torch

from refcache.runtime import Region, Runtime


class FutureMap:
    """See the module docstring. ``token_ids_buf``: int64 ``[max_running_requests + 1]``."""

    def __init__(self, max_running_requests: int, device: str, runtime: Runtime) -> None:
        self.runtime = runtime
        self.token_ids_buf = torch.zeros(max_running_requests + 1, dtype=torch.int64, device=device)

    def futures(self, req_pool_indices: torch.Tensor) -> torch.Tensor:
        """What stands for the next token of the requests in these rows, int64 ``[bs]``."""
        return -(req_pool_indices + 1)

    def store_to_map(self, req_pool_indices: torch.Tensor, next_token_ids: torch.Tensor) -> None:
        """Launch the store of the tokens that a forward makes, int64 ``[bs]``."""
        entries = req_pool_indices + 1

        def run() -> None:
            self.token_ids_buf[entries] = next_token_ids

        self.runtime.launch(
            "store_to_map",
            run,
            reads=[Region(next_token_ids, 0, 0, range(entries.numel()))],
            writes=[Region(self.token_ids_buf, 0, 0, entries)],
        )

    def resolve_future(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Launch the replacement of the futures ``input_ids``; returns the tensor it fills."""
        entries = -input_ids
        resolved = torch.empty_like(input_ids)

        def run() -> None:
            torch.index_select(self.token_ids_buf, 0, entries, out=resolved)

        self.runtime.launch(
            "resolve_future",
            run,
            reads=[Region(self.token_ids_buf, 0, 0, entries)],
            writes=[Region(resolved, 0, 0, range(resolved.numel()))],
        )
        return resolved
