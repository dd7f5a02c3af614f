"""The rules by name: every id a check can report, and its sentence.

Letters group them: S shape of the tree, T residency, L and K locks, A accounting, P device pages, R
request rows, C content, M match and insert, E eviction, AL allocation, N names and events, H host
slots, MB recurrent states, SW window slots, X copies in flight, Q and B load-back, W writes to the
host, OF offloading managers, SB storage backends, SQ sequences, ST storage below the host, Z whole
operations.

The sentence of a rule about a state stands on its check, in :mod:`refcache.oracle.rules.tree`,
:mod:`refcache.oracle.rules.pages`, :mod:`refcache.oracle.rules.host`,
:mod:`refcache.oracle.rules.mamba` and :mod:`refcache.oracle.rules.swa`. Rules about one call are
checked where the call is made, in the drivers; their sentences are below.
"""

import importlib
from collections.abc import Callable
from typing import TypeVar

from refcache.errors import UnknownName

Check = TypeVar("Check")

_SENTENCES: dict[str, str] = {
    "K1": "lock then unlock changes nothing, and each returns by how much the unlocked tokens grew",
    "P3": "free + evictable + protected + private tokens of requests = capacity",
    "C-READ": "before a forward, each slot of a request's row holds the KV of the request's own "
    "prefix",
    "M0": "match finds the longest page-aligned common prefix with what is cached in the namespace",
    "M1": "a second identical match gives the same answer and changes no size, set or structure",
    "M2": "after finish with insert, the committed tokens match in whole pages",
    "M3": "insert returns how many tokens were on the device before the call",
    "E1": "evict returns by how many tokens the free space grew, in whole pages",
    "E2": "evict stops as soon as enough is free",
    "E3": "evict frees less than requested only if nothing unlocked is left",
    "AL1": "new slots are int64; they fill the old last page, then whole new pages, in the order "
    "of the tokens",
    "OF1": "what is loaded is what was stored under that key, until the load is complete",
    "OF2": "a key is found when its store is complete, not before, and not after one that failed",
    "OF3": "a block that is being read is not evicted",
    "OF4": "a store is refused only without room that could be made, and then changes nothing",
    "OF5": "a store gets a slot that nobody has, for each key that has none",
    "OF6": "a block goes only when a store needs its room, and none that the store offers goes",
    "OF7": "replaying a manager's events gives the keys that are found",
    "OF8": "of the blocks that may go, the one that was used longest ago goes first",
    "SB1": "what a storage backend gives for a key is what its engine stored under it, whole; "
    "anything else is a miss",
    "SB2": "an acknowledged page is found until it is cleared, and none that was not stored is",
    "SB3": "a batch answers for each of its keys, as if they were asked one by one",
    "SB4": "a read writes the pages that it found, where they belong, and nothing else",
    "SB5": "clear removes every page of its engine, and no other engine's",
    "SB6": "the usable prefix is the longest that every pool covers by its hit policy",
    "SB7": "after a crash an acknowledged page is there, and a cleared one is not",
    "SB8": "after a crash and a restart each file belongs to a page that is found, within bounds",
    "SB9": "a file of somebody else in the directory of a store stays as it is",
    "SB10": "engines that differ in rank, model or layout never get each other's pages",
    "ST1": "a prefetch brings only pages that the store was given under their keys",
    "ST2": "what is stored under one key is one page: equal keys, equal bytes",
    "ST4": "when everything is over no host slot belongs to a prefetch: each is free or a node's, "
    "also after an abort, a detach and a reset",
    "ST5": "the tokens that prefetches are said to occupy are those of the prefetches that go on",
    "ST7": "a storage thread reads and writes no host slot that is free",
    "ST8": "what a prefetch has brought is on the host when its request may go: a prefix of the "
    "hit, in its namespace; all of the hit where it waits and nothing fails",
    "ST9": "whatever a store does, every request may be scheduled within its policy's bound, and "
    "every write is acknowledged",
    "ST10": "when every write is acknowledged and no fault was met, each page on the host that was "
    "submitted is stored",
    "ST12": "a store can be attached and detached at any time; nothing goes on in storage after a "
    "detach or a reset",
    "OP1": "a copy leaves the reference's bytes everywhere: in the rows it names, in all others, "
    "and before and behind each buffer",
    "OP2": "an allocation op returns the reference's slots",
    "OP3": "no product of an index and a stride is computed in 32 bits",
    "AL2": "an allocation fails only for lack of pages, returns None, and then changes nothing",
    "N1": "a page keeps one hash for life, and two different prefixes never share one",
    "N2": "replaying the KV events gives the pages that are cached; parents come before "
    "children, removals after stores",
    "N3": "the tokens of a KV event fill the blocks it names",
    "N4": "batches of KV events are numbered one after the other",
    "L6": "once every copy is done and one step has polled, no transfer holds a lock",
    "C2": "when no copy runs, each host slot of a node holds the KV of the node's own prefix",
    "X5": "two accesses to one slot, one of them a write, are ordered by streams and events",
    "LIFE": "an index tensor outlives the launches that read it",
    "MB9": "insert returns how many tokens were on the device, frees exactly the caller's slots "
    "for those beyond what it says is the tree's, and says whether there was a state",
    "MB10": "an eviction touches no state that is locked, and returns by how much each pool grew",
    "SW5": "the last window of tokens before what a request computes is in the window pool, and is "
    "that of its own prefix",
    "SW7": "an allocation takes slots of both pools or of none",
    "Q1": "a load-back takes all of the host hit or nothing, within its threshold and quota",
    "Q2": "a load-back is not refused when threshold, quota and memory allow it",
    "B1": "without a load the last node is the last one on the device",
    "SQ1": "each read of a running sequence finds the KV of its own prefix and namespace, at every "
    "step",
    "SQ2": "nobody writes a page position that another running sequence reads",
    "SQ3": "a table has enough pages for what was granted, none twice, and keeps those with KV",
    "SQ4": "what a start finds was computed for exactly that prefix, and told",
    "SQ5": "a refusal comes only for lack of room, and changes nothing",
    "SQ6": "the same prompt is found again as soon, and as far, as the target promises",
    "SQ7": "when all sequences have ended, the pool can be filled to the last page",
    "SQ8": "what was invalidated is found no more",
    "Z1": "reset leaves the cache empty and every page free",
    "Z2": "ranks whose copies finish at different times take the same decisions, and make the "
    "same collective calls in the same order",
    "Z3": "an operation that fails or is refused leaves the state as it was",
    "PROGRESS": "each step of the loop computes tokens or finishes a request, until all have",
    "BUDGET": "what the tree and the allocator call free or evictable can be allocated",
    "DIFF": "under an exact profile, every choice is the reference's",
    "REFUSE": "a misuse is refused with an error and leaves the state as it was",
    "GLOBAL": "a call leaves torch's default dtype and device, grad mode and deterministic mode "
    "as they were",
    "crash": "a call that the contract allows returns without an exception",
}

SENTENCES: dict[str, str]
"""Every rule. Those about a state are added by :func:`stated` when their checks are imported, which
the first use of this name sees to."""


def __getattr__(name: str) -> dict[str, str]:
    if name != "SENTENCES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for checks in ("tree", "pages", "host", "mamba", "swa"):
        importlib.import_module(f"refcache.oracle.rules.{checks}")
    globals()[name] = _SENTENCES
    return _SENTENCES


def stated(checks: dict[str, Check], rule: str, sentence: str) -> Callable[[Check], Check]:
    """A decorator: the function is the check of ``rule``, which says ``sentence``."""

    def add(check: Check) -> Check:
        assert rule not in _SENTENCES, rule
        _SENTENCES[rule] = sentence
        checks[rule] = check
        return check

    return add


def sentence(rule: str) -> str:
    """The sentence of a rule.

    >>> sentence("P1").split(":")[0]
    'each page has exactly one owner'
    """
    known = _SENTENCES if rule in _SENTENCES else __getattr__("SENTENCES")
    if rule not in known:
        raise UnknownName("rule", rule, known)
    return known[rule]
