"""Who owns each state slot, and whose state its bytes are.

A state belongs to exactly one prefix: that is what its bytes say
(:func:`refcache.tags.state_codes`), so "this state is that of exactly these tokens" is one
comparison, with an explanation. Slots are counted like pages of one token, numbered from 1, by a
:class:`~refcache.oracle.ledger.ledger.Ledger` of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from refcache.oracle.ledger.ledger import Ledger, Note, Prefix
from refcache.tags import prefix_tags, state_codes


class StateLedger(Ledger):
    """Owners of state slots; a lock holds the state of its own prefix, and none above it."""

    def __init__(self, slots: int, note: Note) -> None:
        super().__init__(slots, 1, note)

    def locked(self) -> set[Prefix]:
        return {prefix for _, prefix in self.holders}

    def best(self, prefix: Prefix) -> Prefix:
        """The longest part of ``prefix`` that has a state; the empty one always has."""
        space, elements = prefix
        for end in range(len(elements), 0, -1):
            if (space, elements[:end]) in self.cached:
                return space, elements[:end]
        return space, ()

    def evictable(self) -> list[Prefix]:
        """Prefixes with a state that nobody holds."""
        locked = self.locked()
        return [prefix for prefix in self.cached if prefix not in locked]


class StateBytes:
    """The bytes of every slot. ``planes``: the tensors of a state, ``[layers, slots + 1, ...]``."""

    def __init__(self, planes: Sequence[torch.Tensor]) -> None:
        self.planes = tuple(planes)
        self.codes = [
            torch.stack([state_codes(layer, plane, one[0, 0].shape) for layer in range(len(one))])
            for plane, one in enumerate(self.planes)
        ]
        self.known: dict[int, Prefix] = {}
        self._tags: dict[Prefix, int] = {}

    def _tag(self, prefix: Prefix) -> int:
        if prefix not in self._tags:
            tokens = cast("Sequence[int]", prefix[1])
            tag = int(prefix_tags(list(tokens), prefix[0])[-1])
            self._tags[prefix], self.known[tag] = tag, prefix
        return self._tags[prefix]

    def write(self, slot: int, prefix: Prefix) -> None:
        """The state after ``prefix``, as a forward leaves it."""
        tag = self._tag(prefix)
        for plane, codes in zip(self.planes, self.codes, strict=True):
            plane[:, slot] = codes + tag

    def differs(self, slot: int, prefix: Prefix) -> str:
        """What a slot holds, where that is not the state after ``prefix`` in each layer and tensor;
        else nothing. The state after no token is zero."""
        tag = self._tag(prefix) if prefix[1] else 0
        for plane, (one, codes) in enumerate(zip(self.planes, self.codes, strict=True)):
            expected = codes + tag if prefix[1] else torch.zeros_like(codes)
            if torch.equal(one[:, slot], expected):
                continue
            wrong = [layer for layer in range(len(one)) if not one[layer, slot].equal(
                expected[layer]
            )]  # fmt: skip
            return (
                f"slot {slot} holds {self.says(slot, plane, wrong[0])} in layer {wrong[0]}, tensor "
                f"{plane}"
            )
        return ""

    def says(self, slot: int, plane: int = 0, layer: int = 0) -> str:
        """Whose state a slot holds, for people."""
        elements = self.planes[plane][layer, slot].reshape(-1)
        if not bool(elements.any()):
            return "zeros"
        for of, codes in enumerate(self.codes):
            for at in range(len(codes)):
                if codes[at].numel() != elements.numel():
                    continue
                tags = elements - codes[at].reshape(-1)
                if bool((tags == tags[0]).all()) and int(tags[0]) in self.known:
                    space, tokens = self.known[int(tags[0])]
                    where = "" if space is None else f" in {space!r}"
                    other = "" if (of, at) == (plane, layer) else f", layer {at}, tensor {of}"
                    return f"the state of {len(tokens)} tokens {list(tokens)}{where}{other}"
        return "nobody's state"


class RecordingStates:
    """The target's state pool as its rows and tree are given it: the ledger hears of every slot.

    Attributes:
        owner: who gets what is handed out now; ``handed``: what was.
        marks: at each free, how many frees of pages there were before it.
    """

    def __init__(self, inner: Any, ledger: StateLedger, pages: Ledger) -> None:
        self.inner, self.ledger, self.pages = inner, ledger, pages
        self.owner = "the caller"
        self.handed: list[int] = []
        self.marks: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def alloc(self, need_size: int) -> Any:
        return self._recorded(self.inner.alloc, need_size)

    def fork_from(self, src_index: torch.Tensor) -> Any:
        return self._recorded(self.inner.fork_from, src_index)

    def free(self, free_index: torch.Tensor) -> None:
        """Free what the ledger has nothing against."""
        self.marks.append(len(self.pages.freed.counts))
        if self.ledger.release([int(slot) for slot in free_index.reshape(-1).tolist()]):
            self.inner.free(free_index)

    def clear(self) -> None:
        self.inner.clear()
        self.ledger.clear()

    def _recorded(self, make: Callable[[Any], Any], given: Any) -> Any:
        slots = make(given)
        if slots is not None:
            found = [int(slot) for slot in slots.reshape(-1).tolist()]
            for slot in found:
                if slot in self.ledger.owner:
                    self.ledger.note("MB1", f"state slot {slot} was handed out twice")
            self.ledger.take(found, self.owner)
            self.handed += found
        return slots
