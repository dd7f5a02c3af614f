"""The sequences of the known storage bugs (T01 to T19): right here.

What SGLang 0.5.10 does in some of them, with its own threads, is in
``tests/meta/test_peer_storage.py``.
"""

from pathlib import Path

import pytest
import torch

from refcache.controller import HiCacheController
from refcache.errors import InvalidArgument, StorageBusy
from refcache.keys import RadixKey, page_hashes
from refcache.runtime import SimulatedRuntime, lazy
from refcache.runtime.threads import IssuingThread
from refcache.storage import HiCacheMemory
from refcache.types import EvictParams
from storage_rig import Rig

SIX = [1, 2, 3, 4, 5, 6]


class Faulty(HiCacheMemory):
    """A store whose reads raise, or miss, at these keys."""

    def __init__(self, raises=(), misses=(), queries=False):
        super().__init__()
        self.raises, self.misses, self.queries = set(raises), set(misses), queries

    def get(self, key, *args, **kwargs):
        if key in self.raises:
            raise OSError("short read")
        return None if key in self.misses else super().get(key, *args, **kwargs)

    def batch_exists(self, keys, extra_info=None):
        if self.queries:
            raise ConnectionError("no answer")
        return super().batch_exists(keys, extra_info)


def stored(tokens=SIX, extra_key=None):
    store = Faulty()
    Rig(store).save(tokens, extra_key)
    return store, page_hashes(RadixKey(tokens, extra_key), 2)


def lazily(**given):
    return Rig(runtime=SimulatedRuntime(lazy), **given)


def jobs(rig, *threads):
    for thread in threads:
        getattr(rig.storage, thread).drain()


QUERY, READ, WRITE = "prefetch_thread", "prefetch_io_aux_thread", "backup_thread"


def all_free(rig):
    rig.poll()
    rig.forget()
    rig.poll()
    return rig.host.available_size() == rig.host.size


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("kind", ["raises", "misses"])
def test_t01_t14_a_read_that_fails_ends_its_operation_and_no_thread(policy, kind):
    store, hashes = stored()
    rig = Rig(store, policy)
    getattr(store, kind).add(hashes[1])
    rig.prefetch("torn", [*SIX, 7])
    assert rig.tree.check_prefetch_progress("torn")
    loaded = 2 if kind == "misses" else 0  # of a batch that raised nothing is known
    assert rig.tree.pop_prefetch_loaded_tokens("torn") == loaded
    assert rig.storage.failed == (kind == "raises")
    getattr(store, kind).clear()
    rig.prefetch("whole", [*SIX, 7])
    assert rig.tree.check_prefetch_progress("whole")
    assert rig.rows(SIX) == SIX
    assert all_free(rig)


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
def test_t14_a_query_that_raises_is_no_hit(policy):
    store, _ = stored()
    store.queries = True
    rig = Rig(store, policy)
    rig.prefetch("r", [*SIX, 7])
    rig.poll()
    assert rig.tree.check_prefetch_progress("r")
    assert rig.host.available_size() == rig.host.size
    assert rig.storage.prefetch_tokens_occupied == 0


def test_t02_a_split_before_the_acknowledgement_stores_both_halves():
    rig = lazily()
    rig.insert(SIX)
    rig.match([1, 2, 9, 9])
    rig.runtime.synchronize()
    rig.poll()
    rig.runtime.synchronize()
    assert rig.store.batch_exists(page_hashes(RadixKey(SIX), 2)) == 3


def test_t03_both_halves_of_a_node_that_is_written_stay():
    rig = lazily()
    rig.insert(SIX)
    rig.runtime.synchronize()
    rig.poll()
    rig.match([1, 2, 9, 9])
    upper, lower = rig.tree.nodes()
    assert (upper.host_ref_counter, lower.host_ref_counter) == (1, 1)
    rig.forget()
    assert rig.match([*SIX, 9]) == (0, 6)
    rig.runtime.synchronize()
    rig.poll()
    assert (upper.host_ref_counter, lower.host_ref_counter) == (0, 0)
    assert all_free(rig)


def test_t03_both_halves_of_an_anchor_stay():
    rig = lazily()
    rig.insert(SIX)
    rig.runtime.synchronize()
    rig.poll()
    rig.runtime.synchronize()
    rig.poll()
    rig.prefetch("r", [*SIX, 7, 8, 9])
    rig.match([1, 2, 9, 9])
    assert [node.host_ref_counter for node in rig.tree.nodes()] == [1, 1]
    rig.tree.release_aborted_request("r")
    assert [node.host_ref_counter for node in rig.tree.nodes()] == [0, 0]


def test_t04_namespaces_do_not_share_pages():
    store, _ = stored()
    rig = Rig(store)
    rig.prefetch("r", [*SIX, 7], "adapter")
    rig.poll()
    assert rig.tree.check_prefetch_progress("r")
    assert rig.match(SIX, "adapter") == (0, 0)
    rig.save(SIX, "adapter")
    assert store.get_stats()["pages"] == 6
    other = Rig(store)
    other.prefetch("r", [*SIX, 7], "adapter")
    assert other.tree.check_prefetch_progress("r")
    assert (other.match(SIX, "adapter"), other.match(SIX)) == ((0, 6), (0, 0))


@pytest.mark.parametrize("ran", [(), (QUERY,), (QUERY, READ)])
def test_t05_a_detach_in_flight_frees_every_slot_once(ran):
    store, _ = stored()
    rig = lazily(store=store, policy="wait_complete")
    rig.prefetch("r", [*SIX, 7, 8])
    jobs(rig, *ran)
    assert rig.tree.detach_storage_backend()[0]
    assert (rig.host.available_size(), rig.storage.prefetch_tokens_occupied) == (34, 0)
    assert not rig.tree.ongoing_prefetch
    assert rig.tree.check_prefetch_progress("r")


@pytest.mark.parametrize("ran", [(), (QUERY,), (QUERY, READ)])
def test_t06_a_reset_in_flight_forgets_the_prefetch(ran):
    store, _ = stored()
    rig = lazily(store=store, policy="wait_complete")
    rig.prefetch("r", [*SIX, 7, 8])
    jobs(rig, *ran)
    rig.tree.reset()
    assert (rig.host.available_size(), rig.storage.prefetch_tokens_occupied) == (34, 0)
    assert rig.tree.check_prefetch_progress("r")
    assert rig.match(SIX) == (0, 0)
    rig.poll()
    assert rig.queued() == 0
    rig.prefetch("r", [*SIX, 7, 8])  # storage is attached as before
    jobs(rig, QUERY, READ)
    assert rig.tree.check_prefetch_progress("r")
    assert rig.match(SIX) == (0, 6)


def test_t06_resets_leave_no_thread():
    threads = []

    class Machine(type(Rig().runtime)):
        def Thread(self, name):
            threads.append(IssuingThread(name, lambda: None))
            return threads[-1]

    store, _ = stored()
    rig = Rig(store, "wait_complete", runtime=Machine())
    for _ in range(3):
        rig.prefetch("r", [*SIX, 7, 8])
        rig.tree.reset()
    assert rig.tree.detach_storage_backend()[0]
    assert all(thread._thread is None for thread in threads)


def test_t08_the_tail_beyond_the_hit_is_released_once():
    store, _ = stored()
    rig = Rig(store)
    rig.prefetch("r", [*SIX, 7, 8, 9, 10])
    assert rig.queued() == 2
    assert rig.tree.check_prefetch_progress("r")
    assert rig.queued() == 2
    rig.poll()
    assert rig.host.available_size() == 34 - 6


def test_t09_aborts_give_back_what_prefetches_occupy():
    store, _ = stored()
    rig = lazily(store=store, policy="wait_complete")
    for turn in range(20):
        rig.prefetch("r", [*SIX, 7, 8])
        jobs(rig, *(QUERY, READ)[: turn % 3])
        rig.tree.release_aborted_request("r")
        jobs(rig, QUERY, READ)
        rig.poll()
    assert rig.storage.prefetch_tokens_occupied == 0
    assert not rig.storage.prefetch_rate_limited()
    assert rig.host.available_size() == 34


def test_t10_slots_that_a_thread_may_write_are_not_freed_by_an_abort():
    store, _ = stored()
    rig = lazily(store=store, policy="wait_complete")
    rig.prefetch("r", [*SIX, 7, 8])
    jobs(rig, QUERY)
    rig.tree.release_aborted_request("r")
    rig.poll()
    assert rig.host.available_size() == 34 - 6  # the tail beyond the hit alone is free
    jobs(rig, READ)
    rig.poll()
    assert rig.host.available_size() == 34


def test_t12_heads_that_were_not_stored_make_no_hit():
    store, hashes = stored()
    store._pages.pop(hashes[0])
    rig = Rig(store, "wait_complete")
    rig.prefetch("r", [*SIX, 7])
    assert not rig.tree.ongoing_prefetch["r"].operation.hits
    rig.poll()
    assert rig.tree.check_prefetch_progress("r")


def test_t15_prefetches_are_refused_when_they_occupy_the_room_there_is_beyond_the_device():
    rig = lazily(policy="wait_complete")
    assert rig.storage.prefetch_capacity_limit == 14
    rig.prefetch("a", range(100, 116))
    rig.prefetch("b", range(200, 208))
    assert list(rig.tree.ongoing_prefetch) == ["a"]
    assert rig.storage.prefetch_tokens_occupied == 16


def test_t16_a_hit_shorter_than_asked_is_taken():
    store, _ = stored()
    rig = Rig(store)
    rig.prefetch("r", [*SIX, *range(50, 60)])
    assert rig.tree.check_prefetch_progress("r")
    assert rig.match(SIX) == (0, 6)


@pytest.mark.parametrize(
    "given",
    [
        {"storage_backend_extra_config_json": '{"prefetch_threshold": "many"}'},
        {"storage_backend_extra_config_json": '{"prefetch_threshold": true}'},
        {"storage_backend_extra_config_json": "{"},
        {"storage_backend_extra_config_json": "@nowhere.json"},
        {"hicache_storage_prefetch_policy": "never"},
        {"hicache_write_policy": "never"},
        {"storage_backend": "nowhere"},
        {"storage_backend": "dynamic"},
    ],
)
def test_t17_an_attach_that_fails_has_changed_nothing(given):
    rig = Rig(store=False)
    whole = {
        "storage_backend": "memory",
        "storage_backend_extra_config_json": '{"prefetch_threshold": 4}',
        "hicache_storage_prefetch_policy": "timeout",
        "hicache_write_policy": "write_back",
    }

    def seen():
        tree = rig.tree
        policies = (tree.prefetch_stop_policy, tree.write_policy, tree.write_through_threshold)
        return policies, tree.storage.policy, tree.enable_storage, rig.storage.storage_backend

    before = seen()
    ok, message = rig.tree.attach_storage_backend(**whole | given)
    assert not ok, message
    assert seen() == before
    assert rig.tree.attach_storage_backend(**whole)[0]
    assert seen()[0] == ("timeout", "write_back", None)


def test_attach_answers():
    rig = Rig(store=False)
    attach = rig.tree.attach_storage_backend
    assert attach("memory", None, None, "timeout")[0]
    assert attach("memory", None, None, "wait_complete", "write_back")[0]  # policies alone
    assert (rig.tree.prefetch_stop_policy, rig.tree.write_policy) == ("wait_complete", "write_back")
    assert not attach("dynamic", None, None, "best_effort")[0]
    assert rig.tree.prefetch_stop_policy == "wait_complete"
    with pytest.raises(StorageBusy, match="attached"):
        rig.controller.attach_storage_backend("memory")
    assert rig.tree.detach_storage_backend()[0]
    assert rig.tree.detach_storage_backend()[0]
    assert not rig.tree.enable_storage


@pytest.mark.parametrize("bigrams", [False, True])
def test_t19_what_was_written_is_what_is_asked_for(bigrams):
    store = HiCacheMemory()
    first, second = Rig(store), Rig(store)
    for rig in (first, second):
        rig.tree.is_eagle = bigrams
    first.save([1, 2, 3, 4, 5] if bigrams else SIX)
    second.prefetch("r", [*SIX, 7])
    assert second.tree.check_prefetch_progress("r")
    assert second.tree.pop_prefetch_loaded_tokens("r") == (4 if bigrams else 6)


# ---- what else the specification says ------------------------------------------------------------


def test_a_write_keeps_its_slots_until_it_is_acknowledged():
    rig = lazily()
    rig.insert(SIX)
    rig.runtime.synchronize()
    rig.poll()
    (node,) = rig.tree.nodes()
    assert (node.lock_ref, node.host_ref_counter) == (0, 1)
    rig.tree.evict(EvictParams(16))
    assert rig.tree.evict_host(6) == 0
    rig.runtime.synchronize()
    rig.poll()
    assert node.host_ref_counter == 0
    assert rig.store.get_stats() == {"pages": 3, "bytes": 3 * 128}
    assert rig.tree.evict_host(6) == 6


def test_what_the_tree_has_already_is_not_loaded_again():
    store, _ = stored([1, 2, 3, 4, 5, 6, 7, 8])
    rig = lazily(store=store, policy="wait_complete")
    rig.prefetch("r", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    jobs(rig, QUERY, READ)
    rig.insert([1, 2, 3, 4])
    rig.runtime.synchronize()
    rig.poll()
    assert rig.tree.check_prefetch_progress("r")
    assert rig.tree.pop_prefetch_loaded_tokens("r") == 4
    assert rig.host.available_size() == 34 - 8


def test_a_node_on_the_device_alone_takes_the_pages_that_came():
    """Its continuation is on the host; so must it be (T3)."""
    store, _ = stored()
    rig = lazily(store=store, policy="wait_complete", write_policy="write_through_selective")
    rig.prefetch("r", [*SIX, 7])
    jobs(rig, QUERY, READ)
    rig.insert([1, 2, 3, 4])
    rig.match([1, 2, 9, 9])
    assert rig.tree.check_prefetch_progress("r")
    assert [len(n.host_value) for n in rig.tree.nodes()] == [2, 2, 2]
    assert rig.tree.pop_prefetch_loaded_tokens("r") == 6
    assert rig.rows(SIX) == SIX


def test_timeout_grows_with_the_pages_and_starts_at_the_base():
    store = HiCacheMemory()
    rig = lazily(store=store, policy="timeout", options=', "prefetch_timeout_per_ki_token": 1024.0')
    Rig(store).save(SIX)
    rig.prefetch("r", [*SIX, 7])
    rig.clock.now = 1.0
    assert not rig.tree.check_prefetch_progress("r")
    jobs(rig, QUERY)
    rig.clock.now = 1.0 + 6  # three pages of two tokens, a second a token
    assert not rig.tree.check_prefetch_progress("r")
    rig.clock.now = 7.5
    assert rig.tree.check_prefetch_progress("r")
    jobs(rig, READ)
    assert all_free(rig)


def test_a_name_that_comes_back_is_another_request():
    """The first prefetch is revoked after the second has begun."""
    store, _ = stored()
    rig = lazily(store=store, policy="wait_complete")
    rig.prefetch("r", [91, 92, 93, 94])
    rig.tree.release_aborted_request("r")
    rig.prefetch("r", [*SIX, 7])
    with pytest.raises(InvalidArgument, match="one goes on"):
        rig.prefetch("r", [*SIX, 7])
    jobs(rig, QUERY, READ)
    rig.poll()
    assert rig.tree.check_prefetch_progress("r")
    assert rig.match(SIX) == (0, 6)
    assert all_free(rig)


def test_a_prefetch_without_room_leaves_nothing():
    rig = lazily(threshold=2, policy="wait_complete")
    rig.storage.prefetch_capacity_limit = 1000
    rig.prefetch("a", range(100, 134))
    rig.prefetch("b", range(200, 208))
    assert list(rig.tree.ongoing_prefetch) == ["a"]
    assert rig.tree.root_node.host_ref_counter == 1


def test_a_backend_that_does_not_come_back_stays_attached():
    rig = Rig()
    rig.storage.backup_thread.stop = lambda timeout=None: False
    ok, message = rig.tree.detach_storage_backend()
    assert not ok
    assert "storage write" in message
    assert rig.tree.enable_storage
    rig.save(SIX)
    assert rig.store.get_stats()["pages"] == 3


def test_batches_end_at_the_first_that_fails():
    class Small(HiCacheMemory):
        def set(self, key, *args, **kwargs):
            return len(self._pages) < 4 and super().set(key, *args, **kwargs)

    rig = Rig(Small())
    rig.storage.storage_batch_size = 2
    rig.save([*SIX, 7, 8, 9, 10])
    assert rig.store.get_stats()["pages"] == 4
    assert (rig.tree.storage.asked, rig.tree.storage.completed) == (10, 8)
    other = Rig(rig.store)
    other.storage.storage_batch_size = 2
    other.prefetch("r", range(1, 12))
    assert other.tree.check_prefetch_progress("r")
    assert other.tree.pop_prefetch_loaded_tokens("r") == 8


def test_prefix_keys_are_told_if_they_are_asked_for():
    told = []

    class Told(HiCacheMemory):
        def batch_exists(self, keys, extra_info=None):
            told.append(extra_info.prefix_keys)
            return super().batch_exists(keys, extra_info)

    store = Told()
    rig = Rig(store, options=', "hicache_storage_pass_prefix_keys": true')
    rig.storage.storage_batch_size = 1
    rig.save([1, 2])
    Rig(store).save(SIX)
    rig.prefetch("r", [*SIX, 7])
    hashes = page_hashes(RadixKey(SIX), 2)
    assert told[-2:] == [hashes[:1], hashes[:2]]


def test_flat_pages_do_not_depend_on_the_layout():
    pages = []
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
        rig = Rig(store=False)
        rig.insert(SIX)
        host = type(rig.host)(rig.pool, 2.0, 0, 2, layout, pin_memory=False)
        flat = torch.arange(len(host.get_dummy_flat_data_page()))
        host.set_from_flat_data_page(2, flat)
        assert torch.equal(host.get_data_page(2), flat)
        assert not host.get_data_page(0).any()
        pages.append(host.get_data_page(2, flat=False)[1].flatten().tolist())
        addresses, lengths = host.get_page_buffer_meta(torch.arange(4))
        assert sum(lengths) == 2 * flat.numel() * 8
        assert len(addresses) == (8 if layout == "layer_first" else 4)
    assert all(page == pages[0] for page in pages)


def test_pages_that_a_backend_moves_itself():
    class InPlace(HiCacheMemory):
        def batch_get(self, *args):
            assert len(args) == 2  # by way of the base class's v1 call alone
            return super().batch_get(*args)

    store = InPlace()
    options = ', "interface_v1": 1'
    Rig(store, options=options).save(SIX)
    rig = Rig(store, options=options)
    assert rig.storage.page_get_func == rig.storage._page_get_zero_copy
    rig.prefetch("r", [*SIX, 7])
    assert rig.tree.check_prefetch_progress("r")
    assert rig.rows(SIX) == SIX
    assert rig.tree.detach_storage_backend()[0]
    assert rig.storage.page_get_func == rig.storage._generic_page_get


def controller_of(rig, **given):
    return HiCacheController(rig.allocator, rig.host, 2, **given)


def test_a_backend_given_at_the_start_is_attached_or_refused():
    rig = Rig(store=False)
    made = controller_of(rig, storage_backend="memory", prefetch_threshold=6, model_name="m")
    assert (made.enable_storage, made.storage_backend_type) == (True, "memory")
    assert (made.prefetch_threshold, made.storage_config.model_name) == (6, "m")
    with pytest.raises(ValueError, match="nowhere"):
        controller_of(rig, storage_backend="nowhere")


def test_a_backend_is_told_its_rank_and_stage():
    made = controller_of(Rig(store=False), storage_backend="memory", pp_rank=1, pp_size=3)
    config = made.storage_config
    assert (config.pp_rank, config.pp_size, config.tp_rank, config.tp_size) == (1, 3, 0, 1)
    assert not config.enable_storage_metrics


def test_the_page_s_example(capsys):
    page = (Path(__file__).parents[2] / "docs" / "storage.md").read_text(encoding="utf-8")
    exec(page.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out == "[0, 20]\n"
