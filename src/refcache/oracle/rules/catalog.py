"""The rules by name: every id a check can report, and its sentence.

Letters group them: S shape of the tree, T residency, L and K locks, A accounting, P device pages, R
request rows, C content, M match and insert, E eviction, AL allocation, N names and events, H host
slots, X copies in flight, Q and B load-back, W writes to the host, Z whole operations. Functions of
the inspected state are in :mod:`refcache.oracle.rules.tree`,
:mod:`refcache.oracle.rules.pages` and :mod:`refcache.oracle.rules.host`; rules about one
call are checked by the drivers that make the call.
"""

from refcache.errors import UnknownName

SENTENCES: dict[str, str] = {
    "S1": "each child is filed in its parent under its own first page, parent pointers agree, and "
    "the root has no key",
    "S2": "a node's key is not empty and fills whole pages",
    "S3": "a node has one slot for each element of its key",
    "S4": "a node owns its slots: overwriting a tensor that was passed in changes nothing",
    "S5": "siblings differ in their first page, and namespaces share nothing below the root",
    "T1": "a node on the device has its parent on the device",
    "T2": "a node is on the device, on the host, or on both",
    "L1": "a node's lock count is the number of holders at or below it",
    "L2": "a locked node stays on the device, and no lock count is negative",
    "L5": "every node that somebody holds is reachable from the root",
    "K1": "lock then unlock changes nothing, and each returns by how much the unlocked tokens grew",
    "A1": "evictable_size is the number of tokens in unlocked nodes on the device",
    "A2": "protected_size is the number of tokens in locked nodes on the device",
    "A3": "the evictable leaves are the unlocked nodes on the device without a child on the device",
    "P0": "page 0 is never handed out and never freed, nor is a page outside the pool",
    "P1": "each page has exactly one owner: free, queued in a free group, the tree, or one request",
    "P2": "a node's slots, cut by page, are aligned ascending pages",
    "P3": "free + evictable + protected + private tokens of requests = capacity",
    "R1": "token j of a request sits at offset j % page_size of a page, one page for each page of "
    "tokens",
    "R2": "the protected part of a request's row holds the tree's slots for its prefix",
    "R3": "row numbers of running requests are distinct and in range; free + used rows = size",
    "C1": "each slot of a node holds the KV of the node's own prefix",
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
    "OP1": "a copy leaves the reference's bytes everywhere: in the rows it names, in all others, "
    "and before and behind each buffer",
    "OP2": "an allocation op returns the reference's slots",
    "OP3": "no product of an index and a stride is computed in 32 bits",
    "AL2": "an allocation fails only for lack of pages, returns None, and then changes nothing",
    "N1": "a page keeps one hash for life, and two different prefixes never share one",
    "N2": "replaying the KV events gives the pages that are cached; parents come before children, "
    "removals after stores",
    "N3": "the tokens of a KV event fill the blocks it names",
    "N4": "batches of KV events are numbered one after the other",
    "T3": "under write-through, a node on the host has its parent on the host",
    "A4": "the evictable host leaves are the unlocked nodes on the host only, without a child on "
    "the host",
    "L3": "a node counts one use of its host slots for each copy in flight that uses them",
    "L6": "once every copy is done and one step has polled, no transfer holds a lock",
    "H1": "each host slot has exactly one owner: free, or one node",
    "H2": "a node's host slots, cut by page, are aligned ascending pages",
    "C2": "when no copy runs, each host slot of a node holds the KV of the node's own prefix",
    "X1": "the host slots of a queued or running copy keep their owner until it is acknowledged",
    "X2": "the device pages of a queued or running copy keep their owner until it is acknowledged",
    "X5": "two accesses to one slot, one of them a write, are ordered by streams and events",
    "LIFE": "an index tensor outlives the launches that read it",
    "Q1": "a load-back takes all of the host hit or nothing, within its threshold and quota",
    "Q2": "a load-back is not refused when threshold, quota and memory allow it",
    "B1": "without a load the last node is the last one on the device",
    "W1": "under write-through, enough hits mean a host copy unless there was no room, and a host "
    "copy means enough hits",
    "Z1": "reset leaves the cache empty and every page free",
    "Z2": "ranks whose copies finish at different times take the same decisions, and make the same "
    "collective calls in the same order",
    "Z3": "an operation that fails or is refused leaves the state as it was",
    "PROGRESS": "each step of the loop computes tokens or finishes a request, until all have",
    "BUDGET": "what the tree and the allocator call free or evictable can be allocated",
    "DIFF": "under an exact profile, every choice is the reference's",
    "REFUSE": "a misuse is refused with an error and leaves the state as it was",
    "GLOBAL": "a call leaves torch's default dtype and device, grad mode and deterministic mode as "
    "they were",
    "crash": "a call that the contract allows returns without an exception",
}


def sentence(rule: str) -> str:
    """The sentence of a rule.

    >>> sentence("P1").split(":")[0]
    'each page has exactly one owner'
    """
    if rule not in SENTENCES:
        raise UnknownName("rule", rule, SENTENCES)
    return SENTENCES[rule]
