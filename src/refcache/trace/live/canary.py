"""``canary``: are the rows of a cached page still what they were when it was cached?

A digest of a page's rows is kept when a request caches it (``cache_finished_req``,
``cache_unfinished_req``), compared when its prefix is reused (the first ``inc_lock_ref`` after a
match), and forgotten when it is freed. What a page holds may not change in between: a digest that
differs is KV that somebody overwrote.

Nothing is waited for: digests, the comparison and its result stay on the device, and a count comes
back when it comes. On a scheduler with a forward stream they are computed beside it, after the
forward that is running and before the next one.

``sampled`` looks at one run of 4,096 tokens in ``every``, chosen by the first 64 tokens of the
prompt, so that a page is chosen alike when it is cached and when it is reused. Shorter prompts are
left out.
"""

import functools
import warnings
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from refcache.errors import InvalidArgument
from refcache.trace.file import Closes
from refcache.trace.live.digest import Digest, planes_of

_CUDA: Any = torch.cuda  # PyTorch has no types for streams and events
MODES = ("off", "sampled", "always")
RUN, HEAD, REMEMBERED = 4096, 64, 1024
"""Tokens of a run; of a prompt that choose its runs; matches that wait for a lock."""


def canary(
    subject: Any,
    mode: str = "sampled",
    *,
    every: int = 64,
    seed: int = 0,
    on_damage: Callable[[int], None] | None = None,
) -> "Canary":
    """Watch a tree cache, or that of a scheduler, until the canary is closed.

    Args:
        subject: a tree cache with SGLang's names, or an object with one as ``tree_cache``; of that
            also ``forward_stream``, if it is a CUDA stream.
        mode: ``off`` (nothing is wrapped), ``sampled``, or ``always``: every page.
        every: of how many runs one is looked at.
        seed: chooses which.
        on_damage: called with the count of damaged pages when it is seen to have grown; by default
            a warning.

    Raises:
        InvalidArgument: an unknown mode, ``every`` below 1, or no such object.
    """
    return Canary(subject, mode, 1 if mode == "always" else every, seed, on_damage)


class Canary(Closes):
    """What :func:`canary` returns; also a context manager.

    Attributes:
        looked: how many pages were digested or compared.
    """

    def __init__(
        self,
        subject: Any,
        mode: str,
        every: int,
        seed: int,
        on_damage: Callable[[int], None] | None,
    ) -> None:
        if mode not in MODES:
            raise InvalidArgument(f"canary mode={mode!r}: expected one of {', '.join(MODES)}")
        if every < 1:
            raise InvalidArgument(f"canary every={every}: expected at least 1")
        self.tree = getattr(subject, "tree_cache", subject)
        allocator = getattr(self.tree, "token_to_kv_pool_allocator", None)
        if not hasattr(self.tree, "cache_finished_req") or allocator is None:
            raise InvalidArgument(
                f"canary: {type(self.tree).__name__} is no tree cache with an allocator"
            )
        self.every, self.seed, self.page_size = every, seed, int(self.tree.page_size)
        self._on_damage = on_damage or _warn
        self._undo: list[Callable[[], None]] = []
        self.looked = self._told = 0
        if mode == "off":
            return
        self.digest = Digest(planes_of(allocator.get_kvcache()), self.page_size)
        self._kept = torch.zeros(self.digest.pages, dtype=torch.int64, device=self.digest.device)
        self._damaged = torch.zeros_like(self._kept, dtype=torch.bool)
        self._beside = _Beside(getattr(subject, "forward_stream", None), self.digest.device)
        self._matches: OrderedDict[int, tuple[Any, Any]] = OrderedDict()
        self._wrap(self.tree, "cache_finished_req", self._cache_finished)
        self._wrap(self.tree, "cache_unfinished_req", self._cache_unfinished)
        self._wrap(self.tree, "match_prefix", self._match_prefix)
        self._wrap(self.tree, "inc_lock_ref", self._inc_lock_ref)
        self._wrap(allocator, "free", self._free)
        if hasattr(allocator, "free_each"):
            self._wrap(allocator, "free_each", self._free_each)
        self._wrap(allocator, "clear", self._clear)

    def close(self) -> None:
        """Take the wrappers off."""
        while self._undo:
            self._undo.pop()()

    def damaged(self) -> list[int]:
        """The pages whose rows had changed when they were reused. Waits for the device."""
        return [] if not hasattr(self, "_damaged") else self._damaged.nonzero().flatten().tolist()

    # ---- wrapped calls ---------------------------------------------------------------------------

    def _wrap(self, owner: Any, name: str, made: Callable[..., Any]) -> None:
        original, bare = getattr(owner, name), owner.__dict__.get(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return made(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.append(
            lambda: delattr(owner, name) if bare is None else setattr(owner, name, bare)
        )

    def _cache_finished(self, original: Any, req: Any, *rest: Any, **more: Any) -> Any:
        if not getattr(req, "kv_committed_freed", True):
            head = [*req.origin_input_ids[:HEAD], *req.output_ids[:HEAD]]
            self._cache(req, head, int(req.kv_committed_len))
        return original(req, *rest, **more)

    def _cache_unfinished(self, original: Any, req: Any, *rest: Any, **more: Any) -> Any:
        self._cache(req, req.fill_ids, len(req.fill_ids))
        return original(req, *rest, **more)

    def _cache(self, req: Any, tokens: Sequence[Any], length: int) -> None:
        """Keep the digests of a request's whole pages; those that are not cached after all are
        freed in the call, and then forgotten."""
        pool, whole = self.tree.req_to_token_pool, length // self.page_size * self.page_size

        def slots() -> torch.Tensor:
            row = req.req_pool_idx, slice(0, whole)
            found: torch.Tensor = (
                pool.read(*row) if hasattr(pool, "read") else pool.req_to_token[row]
            )
            return found

        first = int(req.cache_protected_len)
        self._look(
            tokens[: min(length, HEAD)], req.extra_key, range(first, whole), slots, self._keep
        )

    def _match_prefix(self, original: Any, params: Any, *rest: Any, **more: Any) -> Any:
        """A prefix is found: remember it until somebody locks it."""
        found = original(params, *rest, **more)
        if len(found.device_indices):
            node = found.last_device_node
            self._matches.pop(id(node), None)
            self._matches[id(node)] = (params.key, found.device_indices)
            if len(self._matches) > REMEMBERED:
                self._matches.popitem(last=False)
        return found

    def _inc_lock_ref(self, original: Any, node: Any, *rest: Any, **more: Any) -> Any:
        """The prefix is reused: compare."""
        result = original(node, *rest, **more)
        key, slots = self._matches.pop(id(node), (None, None))
        if key is not None:
            found = range(len(slots))
            self._look(key.token_ids, key.extra_key, found, lambda: slots, self._compare)
        return result

    def _free(self, original: Any, free_index: torch.Tensor, *rest: Any, **more: Any) -> Any:
        """These pages may be overwritten from here on."""
        if len(free_index):
            with self._beside:
                self._kept[free_index // self.page_size] = 0
        return original(free_index, *rest, **more)

    def _free_each(self, original: Any, lists: Sequence[torch.Tensor]) -> Any:
        """As ``_free``, of several lists in one call."""
        with self._beside:
            for free_index in lists:
                self._kept[free_index // self.page_size] = 0
        return original(lists)

    def _clear(self, original: Any, *rest: Any, **more: Any) -> Any:
        """Every page is free."""
        with self._beside:
            self._kept.zero_()
        return original(*rest, **more)

    # ---- pages -----------------------------------------------------------------------------------

    def _look(
        self,
        tokens: Sequence[Any],
        extra_key: str | None,
        part: range,
        slots: Callable[[], torch.Tensor],
        what: Callable[[torch.Tensor], None],
    ) -> None:
        """Do ``what`` with the chosen pages of a part of the prompt that begins with ``tokens``."""
        first = part.start // RUN * RUN
        runs = [
            slice(max(start, part.start), min(start + RUN, part.stop), self.page_size)
            for start in range(first, part.stop, RUN)
            if self._is_chosen(tokens, extra_key, start // RUN)
        ]
        if runs and part:
            row = slots()
            pages = torch.cat([row[run] for run in runs]).long() // self.page_size
            with self._beside:
                what(pages)
            self.looked += len(pages)

    def _is_chosen(self, tokens: Sequence[Any], extra_key: str | None, run: int) -> bool:
        """Whether this run of the prompt is looked at; alike for all prompts that begin alike."""
        if self.every == 1:
            return True
        if len(tokens) < HEAD:
            return False
        head = (t if isinstance(t, int) else t[0] for t in tokens[:HEAD])
        name = array("q", [*head, run, self.seed]).tobytes() + str(extra_key).encode()
        return zlib.crc32(name) % self.every == 0

    def _keep(self, pages: torch.Tensor) -> None:
        kept = self._kept[pages]
        self._kept[pages] = torch.where(kept == 0, self.digest(pages), kept)

    def _compare(self, pages: torch.Tensor) -> None:
        kept = self._kept[pages]
        self._damaged[pages] |= (kept != 0) & (kept != self.digest(pages))
        count = self._beside.count(self._damaged)
        if count > self._told:
            self._told = count
            self._on_damage(count)


class _Beside:
    """Where the canary computes: a stream of its own between two forwards, or right here.

    The work waits for what the calling stream and the forward stream have been given so far; the
    next forward waits for the work.
    """

    def __init__(self, forward: Any, device: torch.device) -> None:
        self.forward: Any = forward if isinstance(forward, torch.cuda.Stream) else None
        self.own = _CUDA.Stream(device) if self.forward is not None else None
        self.on_device = device.type == "cuda"
        self._context: AbstractContextManager[Any] = nullcontext()
        self._waiting: tuple[torch.Tensor, Any] | None = None
        self._last = 0

    def __enter__(self) -> None:
        if self.own is not None:
            self.own.wait_stream(_CUDA.current_stream())
            self.own.wait_stream(self.forward)
            self._context = _CUDA.stream(self.own)
            self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.own is not None:
            self._context.__exit__(*error)
            self.forward.wait_stream(self.own)

    def count(self, flags: torch.Tensor) -> int:
        """How many flags were set when they were last seen; on a GPU asked for and not awaited."""
        if not self.on_device:
            return int(flags.sum())
        if self._waiting is not None and self._waiting[1].query():
            self._last = int(self._waiting[0])
            self._waiting = None
        if self._waiting is None:
            there = torch.empty((), dtype=torch.int64, pin_memory=True)
            there.copy_(flags.sum(), non_blocking=True)
            event = _CUDA.Event()
            event.record()
            self._waiting = there, event
        return self._last


def _warn(count: int) -> None:
    warnings.warn(f"refcache canary: {count} cached pages were overwritten", stacklevel=2)
