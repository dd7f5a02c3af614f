"""Bugs planted below the host: in the controller's storage threads and in what the tree does."""

from collections.abc import Callable
from typing import Any

from refcache.planted.bug import PlantedBug

CONTROLLER = "refcache.controller.storage_controller:StorageController"
OPERATION = "refcache.controller.storage_operation:PrefetchOperation"
TREE = "refcache.tree.storage:TreeStorage"
STATE, FAULTS = "storage.state", "storage.faults"
Function = Callable[..., Any]


def _no_end(original: Function) -> Function:
    def finish(self: Any, operation: Any) -> None:
        if operation.error is None:
            original(self, operation)

    return finish


def _no_answer(original: Function) -> Function:
    def admit(self: Any, operation: Any, hits: int) -> None:
        if operation.error is None:
            original(self, operation, hits)

    return admit


def _no_acknowledgement(original: Function) -> Function:
    def write(self: Any, operation: Any, first: int) -> None:
        original(self, operation, first)
        if operation.error is not None:
            self.ack_backup_queue.get_nowait()

    return write


def _complete_means_all(original: Function) -> Function:
    def can_terminate(self: Any, operation: Any) -> bool:
        if self.prefetch_stop_policy != "wait_complete":
            answer: bool = original(self, operation)
            return answer
        whole: bool = operation.completed_tokens == operation.hits
        return whole or operation.is_terminated()

    return can_terminate


def _gap_skipped(original: Function) -> Function:
    def page_get(self: Any, operation: Any, keys: Any, slots: Any, extra_info: Any = None) -> None:
        pool = self.mem_pool_host
        pages = self.storage_backend.batch_get(
            keys, [pool.get_dummy_flat_data_page() for _ in keys]
        )
        for first, page in zip(slots[:: self.page_size].tolist(), pages, strict=False):
            if page is not None:
                pool.set_from_flat_data_page(first, page)
            operation.increment(self.page_size)

    return page_get


def _last_fragment(original: Function) -> Function:
    return lambda self, nodes: original(self, list(nodes)[-1:])


def _split_unseen(original: Function) -> Function:
    return lambda self: iter(())


def _one_namespace(original: Function) -> Function:
    return lambda extra_key: original(None)


def _detach_forgets(original: Function) -> Function:
    def detach(self: Any) -> None:
        self.controller.detach_storage_backend()
        self._drain(None, None, None)
        for rid in list(self.ongoing_prefetch):
            self._forget(rid)

    return detach


def _detach_frees_all(original: Function) -> Function:
    def detach(self: Any) -> None:
        asked = {rid: going.host_indices for rid, going in self.ongoing_prefetch.items()}
        self.controller.detach_storage_backend()
        self._drain(None, None, None)
        for rid in list(self.ongoing_prefetch):
            self._forget(rid)
            self.tree.token_to_kv_pool_host.free(asked[rid])

    return detach


def _reset_keeps(original: Function) -> Function:
    return lambda self: self.ongoing_backup.clear()


def _tail_twice(original: Function) -> Function:
    def admit(self: Any, operation: Any, hits: int) -> None:
        whole = operation.host_indices
        original(self, operation, hits)
        operation.host_indices = whole

    return admit


def _abort_occupies(original: Function) -> Function:
    def abort(self: Any, rid: str) -> None:
        occupied = self.controller.prefetch_tokens_occupied
        original(self, rid)
        self.controller.prefetch_tokens_occupied = occupied

    return abort


def _abort_frees(original: Function) -> Function:
    def abort(self: Any, rid: str) -> None:
        going = self.ongoing_prefetch.get(rid)
        if going is None:
            original(self, rid)
            return
        going.operation.mark_terminate()
        self._forget(rid)
        self.tree.token_to_kv_pool_host.free(going.operation.host_indices)

    return abort


def _abort_leaks(original: Function) -> Function:
    def abort(self: Any, rid: str) -> None:
        if rid in self.ongoing_prefetch:
            self.ongoing_prefetch[rid].operation.terminate()
            self._forget(rid)

    return abort


def _tokens_not_pairs(original: Function) -> Function:
    def page_hashes(key: Any, page_size: int, prior: Any = None) -> Any:
        plain = type(key)(key.raw_token_ids()[: len(key)], key.extra_key) if key.is_bigram else key
        return original(plain, page_size, prior)

    return page_hashes


def _unprotected(original: Function) -> Function:
    def write(self: Any, nodes: Any) -> None:
        nodes = list(nodes)
        before = set(self.ongoing_backup)
        original(self, nodes)
        for operation in self.ongoing_backup.keys() - before:
            self.ongoing_backup[operation].pop().release_host()

    return write


def _root_namespace(original: Function) -> Function:
    def plan(self: Any, anchor: Any, key: Any, slots: Any, hashes: Any) -> Any:
        if anchor is self.tree.root_node:
            key = type(key)(key.raw_token_ids(), None, key.is_bigram)
        return original(self, anchor, key, slots, hashes)

    return plan


def _duplicates_kept(original: Function) -> Function:
    def plan(self: Any, *args: Any) -> Any:
        made = original(self, *args)
        made.duplicates.clear()
        return made

    return plan


def _goes_on(original: Function) -> Function:
    return lambda self: (self.completed_tokens, self.hash_value)


BUGS = (
    PlantedBug(
        "failed-read-has-no-end",
        "sglang#39269, #36882",
        "a read that raises leaves its prefetch going on for ever",
        f"{CONTROLLER}._finish",
        _no_end,
        FAULTS,
    ),
    PlantedBug(
        "failed-query-has-no-answer",
        "sglang#36882",
        "a query that raises leaves its prefetch going on for ever",
        f"{CONTROLLER}._admit",
        _no_answer,
        FAULTS,
    ),
    PlantedBug(
        "failed-store-not-acknowledged",
        "sglang#36882, #39269",
        "a write to storage that raises is never acknowledged",
        f"{CONTROLLER}._write",
        _no_acknowledgement,
        FAULTS,
    ),
    PlantedBug(
        "complete-means-all",
        "sglang#39269",
        "wait_complete waits for every page of the hit, also for those that cannot come",
        f"{TREE}.can_terminate",
        _complete_means_all,
        FAULTS,
    ),
    PlantedBug(
        "missing-page-skipped",
        "slip",
        "a page that is missing is counted like those that came",
        f"{CONTROLLER}._generic_page_get",
        _gap_skipped,
        FAULTS,
    ),
    PlantedBug(
        "lower-half-stored-alone",
        "sglang#16946, #27072",
        "of a node that is split before its copy is acknowledged only the last part is stored",
        f"{TREE}.write",
        _last_fragment,
        STATE,
    ),
    PlantedBug(
        "split-of-a-stored-node",
        "sglang#38480, #38835",
        "a node that is split while storage uses it is not released whole",
        f"{TREE}.operations",
        _split_unseen,
        STATE,
    ),
    PlantedBug(
        "keys-without-namespace",
        "sglang#26747, #37058",
        "pages of all namespaces have the same keys",
        "refcache.keys:namespace_seed",
        _one_namespace,
        STATE,
    ),
    PlantedBug(
        "detach-forgets-what-came",
        "sglang#38483",
        "a detach loses the host slots of pages that have come",
        f"{TREE}.detach",
        _detach_forgets,
        STATE,
    ),
    PlantedBug(
        "detach-frees-the-tail-again",
        "slip",
        "a detach with a prefetch in flight frees what was freed already",
        f"{TREE}.detach",
        _detach_frees_all,
        STATE,
    ),
    PlantedBug(
        "reset-keeps-prefetches",
        "sglang#36882, #26009",
        "a reset leaves prefetches going on, which hang from the old root",
        f"{TREE}.reset",
        _reset_keeps,
        STATE,
    ),
    PlantedBug(
        "prefetch-tail-released-twice",
        "sglang#13483",
        "the host slots beyond the hit are released at once, and again at the end",
        f"{CONTROLLER}._admit",
        _tail_twice,
        STATE,
    ),
    PlantedBug(
        "aborted-prefetch-occupies",
        "sglang#9874, #15439, #30053",
        "an aborted prefetch counts as going on, until none may begin",
        f"{TREE}.abort",
        _abort_occupies,
        STATE,
    ),
    PlantedBug(
        "abort-frees-under-a-thread",
        "sglang#31296, #21624",
        "an abort frees host slots that a thread still writes",
        f"{TREE}.abort",
        _abort_frees,
        STATE,
    ),
    PlantedBug(
        "abort-leaks-what-came",
        "sglang#9927",
        "an abort forgets the pages that have come",
        f"{TREE}.abort",
        _abort_leaks,
        STATE,
    ),
    PlantedBug(
        "query-hashes-tokens-not-pairs",
        "sglang#19570",
        "storage is asked for keys of tokens where pages are stored under keys of pairs",
        "refcache.controller.storage_controller:page_hashes",
        _tokens_not_pairs,
        STATE,
    ),
    PlantedBug(
        "stored-node-unprotected",
        "slip",
        "a node's host slots may go while storage reads them",
        f"{TREE}.write",
        _unprotected,
        STATE,
    ),
    PlantedBug(
        "prefetched-into-no-namespace",
        "slip",
        "pages of a namespace that come first are filed outside of it",
        f"{TREE}._plan",
        _root_namespace,
        STATE,
    ),
    PlantedBug(
        "duplicate-pages-leak",
        "slip",
        "pages that the tree had already keep their second host slots",
        f"{TREE}._plan",
        _duplicates_kept,
        STATE,
    ),
    PlantedBug(
        "taken-prefetch-goes-on",
        "sglang#21624",
        "pages that come after the tree took a prefetch over are counted, and nobody's",
        f"{OPERATION}.terminate",
        _goes_on,
        STATE,
    ),
)
