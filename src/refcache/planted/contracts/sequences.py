"""Bugs of block caches, planted in the naive cache of sequences and in the reference's two.

The naive cache (:class:`refcache.oracle.target.sequences.naive.NaiveSequences`) is one of hashed
pages with counts of users, as many engines have: most public reports of that kind are about it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from refcache.planted.bug import PlantedBug

BLOCKS = "refcache.oracle.target.sequences.naive:NaiveSequences"
RADIX = "refcache.oracle.target.sequences.radix:RadixSequences"
TIERED = "refcache.oracle.target.sequences.hiradix:TieredSequences"
Function = Callable[..., Any]
_in_radix = partial(PlantedBug, suite="sequences.state")
_in_blocks = partial(PlantedBug, suite="sequences.state", target="naive")


def _found_page_stays_free(original: Function) -> Function:
    def start(self: Any, seq: int, tokens: Any, namespace: Any) -> Any:
        found = original(self, seq, tokens, namespace)
        for page in self.tables[seq][1:]:
            self.users[page] -= 1
        return found

    return start


def _stale_hash(original: Function) -> Function:
    def _take(self: Any, count: int) -> Any:
        before = dict(self.pages)
        taken = original(self, count)
        for prefix in before if taken and len(taken) > 1 else ():
            if before[prefix] == taken[-1]:
                self.pages[prefix] = taken[-1]
        return taken

    return _take


def _free_ignores_count(original: Function) -> Function:
    def _drop(self: Any, seq: int) -> None:
        pages = self.tables[seq]
        if len(pages) > 1:
            self.users[pages[0]] = 1
        original(self, seq)

    return _drop


def _namespace_of_first_page_only(original: Function) -> Function:
    def _prefixes(self: Any, seq: int, tokens: Any, end: int) -> Any:
        return [
            (space if number == 0 else None, prefix)
            for number, (space, prefix) in enumerate(original(self, seq, tokens, end))
        ]

    return _prefixes


def _key_without_parents(original: Function) -> Function:
    def _prefixes(self: Any, seq: int, tokens: Any, end: int) -> Any:
        return [
            (space, prefix if number < 2 else (*prefix[-self.size :], -1))
            for number, (space, prefix) in enumerate(original(self, seq, tokens, end))
        ]

    return _prefixes


def _last_token_cached(original: Function) -> Function:
    def finish(self: Any, seq: int, tokens: Any) -> None:
        room = len(self.tables[seq]) * self.size
        self.done[seq] = min(len(tokens), room) if self.done[seq] > self.size else self.done[seq]
        original(self, seq, tokens)

    return finish


def _late_result_frees_again(original: Function) -> Function:
    def computed(self: Any, seq: int, tokens: Any, n: int) -> None:
        if seq not in self.done:
            for page in set(self.pages.values()):
                self.users[page] = max(0, self.users[page] - 1)
        original(self, seq, tokens, n)

    return computed


def _shared_page_written(original: Function) -> Function:
    def grow(self: Any, seq: int, tokens: Any, n: int) -> Any:
        index = self.done[seq] // self.size
        shared = self.tables[seq][index : index + 1]
        before = {page: self.users[page] for page in shared}
        self.users.update({page: 1 - users for page, users in before.items()})
        granted = original(self, seq, tokens, n)
        self.users.update({page: users - 1 for page, users in before.items()})
        return granted

    return grow


def _copy_forgotten(original: Function) -> Function:
    def copies(self: Any) -> Any:
        made = original(self)
        return [] if any(page in self.pages.values() for _, page in made) else made[1:]

    return copies


def _refused_takes_what_there_is(original: Function) -> Function:
    def grow(self: Any, seq: int, tokens: Any, n: int) -> Any:
        granted = original(self, seq, tokens, n)
        if not granted and len(self.tables[seq]) > 1:
            self.tables[seq] += self._take(1) or []
        return granted

    return grow


def _children_stay(original: Function) -> Function:
    def invalidate(self: Any, namespace: Any) -> None:
        longer = {p: page for p, page in self.pages.items() if len(p[1]) > self.size}
        original(self, namespace)
        self.pages |= longer

    return invalidate


def _preempted_keeps_a_page(original: Function) -> Function:
    def preempt(self: Any, seq: int) -> None:
        kept = self.tables[seq][2:3]
        original(self, seq)
        self.users.update(kept)

    return preempt


def _nothing_left_to_compute(original: Function) -> Function:
    def start(self: Any, seq: int, tokens: Any, namespace: Any) -> Any:
        more = (0,) if len(tokens) > self.size else ()
        return original(self, seq, (*tokens, *more), namespace)

    return start


def _another_page_on_a_hit(original: Function) -> Function:
    def finish(self: Any, seq: int, tokens: Any) -> None:
        prefixes = self._prefixes(seq, tokens, self.done[seq])
        old = [self.pages.get(prefix) for prefix in prefixes[1:]]
        original(self, seq, tokens)
        for prefix, page in zip(prefixes[1:], old, strict=True):
            if page is not None and not self.users[page]:  # the duplicate is kept, under its hash
                self.pages[prefix] = self.pages[prefixes[0]]

    return finish


def _row_keeps_duplicates(original: Function) -> Function:
    def computed(self: Any, seq: int, tokens: Any, n: int) -> None:
        req = self.requests.get(seq)
        before = None if req is None else self._row(req).clone()
        original(self, seq, tokens, n)
        if before is not None:
            self._write(req, 0, before)

    return computed


def _launch_cached_by_abort(original: Function) -> Function:
    def abort(self: Any, seq: int) -> None:
        req = self.requests[seq]
        known = len(req.origin_input_ids) + len(req.output_ids)
        if req.kv_committed_len:
            req.kv_committed_len = min(req.allocated, known)
            self._end(seq, insert=True)
        else:
            original(self, seq)

    return abort


def _fork_without_lock(original: Function) -> Function:
    def fork(self: Any, seq: int, child: int) -> Any:
        granted = original(self, seq, child)
        if granted:
            self.tree.dec_lock_ref(self.requests[child].last_node)
            self.requests[child].last_node = self.tree.root_node
        return granted

    return fork


def _loaded_in_another_order(original: Function) -> Function:
    def _found(self: Any, tokens: Any, space: Any) -> Any:
        on_device = super(type(self), self)._found(tokens, space)[0]
        slots, node = original(self, tokens, space)
        pages = slots.reshape(-1, self.size)
        if len(pages) > 2 and len(slots) > len(on_device):
            import torch

            pages = torch.cat([pages[:-2], pages[-2:].flip(0)])
        return pages.flatten(), node

    return _found


BUGS = (
    _in_blocks(
        "found-page-stays-free",
        "LLMServingSim#60, ROCm/ATOM#902",
        "of a prefix that is found only the first page is held; the others can be taken",
        f"{BLOCKS}.start",
        _found_page_stays_free,
    ),
    _in_blocks(
        "hash-outlives-its-page",
        "vllm#46951, #48596",
        "of several pages taken at once the last one is still found under its old hash",
        f"{BLOCKS}._take",
        _stale_hash,
    ),
    _in_blocks(
        "free-ignores-the-count",
        "TensorRT-LLM#12834, #17926",
        "the first page of a sequence that ends is free, whoever else has it",
        f"{BLOCKS}._drop",
        _free_ignores_count,
    ),
    _in_blocks(
        "namespace-of-first-page-only",
        "sglang#26747, #38577, #25351",
        "the hash of a page that is not the first leaves the namespace out",
        f"{BLOCKS}._prefixes",
        _namespace_of_first_page_only,
    ),
    _in_blocks(
        "third-page-without-parents",
        "qwen-bailian#4",
        "from the third on, a page's hash is of its own tokens, not of those before",
        f"{BLOCKS}._prefixes",
        _key_without_parents,
    ),
    _in_blocks(
        "last-token-cached",
        "vllm#48596, #46951",
        "a page is cached at the end whose last token was sampled and never computed",
        f"{BLOCKS}.finish",
        _last_token_cached,
    ),
    _in_blocks(
        "late-result-frees-again",
        "sglang#38319, #38355",
        "the result of an aborted launch takes counts back that others have",
        f"{BLOCKS}.computed",
        _late_result_frees_again,
    ),
    _in_blocks(
        "shared-page-written",
        "slip",
        "a page that a fork shares is written, not copied first",
        f"{BLOCKS}.grow",
        _shared_page_written,
    ),
    _in_blocks(
        "copy-forgotten",
        "slip",
        "the copy of a page that a fork needs is not asked for",
        f"{BLOCKS}.copies",
        _copy_forgotten,
    ),
    _in_blocks(
        "refused-room-is-taken",
        "sglang#34399, #30892",
        "a request for room that is refused takes a page of what there is",
        f"{BLOCKS}.grow",
        _refused_takes_what_there_is,
    ),
    _in_blocks(
        "invalidated-children-stay",
        "vllm#42125, #48352, #57810",
        "of a namespace that is invalidated only first pages go; with a new one the rest is found",
        f"{BLOCKS}.invalidate",
        _children_stay,
    ),
    _in_blocks(
        "preempted-keeps-a-page",
        "vllm#46014, sglang#36370",
        "a sequence of three pages that is preempted keeps the third",
        f"{BLOCKS}.preempt",
        _preempted_keeps_a_page,
    ),
    _in_blocks(
        "nothing-left-to-compute",
        "nano-vllm#144, vllm#17999, LMCache#5151",
        "a prompt that is cached whole is found whole, and nothing gives an answer",
        f"{BLOCKS}.start",
        _nothing_left_to_compute,
    ),
    _in_blocks(
        "duplicate-under-another-page",
        "vllm#55092, #48933",
        "a duplicate that ends leaves its hash with the page before",
        f"{BLOCKS}.finish",
        _another_page_on_a_hit,
    ),
    _in_radix(
        "row-keeps-freed-duplicates",
        "mini-sglang#142",
        "duplicates are freed when a result is cached; the table goes on naming them",
        f"{RADIX}.computed",
        _row_keeps_duplicates,
    ),
    _in_radix(
        "launch-cached-by-abort",
        "sglang#38319, #38355",
        "an abort caches all that there is room for, with what was never computed",
        f"{RADIX}.abort",
        _launch_cached_by_abort,
    ),
    _in_radix(
        "fork-without-lock",
        "slip",
        "a forked sequence holds no lock: when its parent ends its pages can be evicted",
        f"{RADIX}.fork",
        _fork_without_lock,
    ),
    _in_radix(
        "loaded-pages-swapped",
        "TensorRT-LLM#8813",
        "of a prefix that is loaded from the host the last two pages are swapped",
        f"{TIERED}._found",
        _loaded_in_another_order,
    ),
)
