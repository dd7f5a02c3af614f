"""What the loop asks of a tree with a host tier, and when."""

from refcache.engine import ModelConfig, SamplingParams, Scheduler, TokenizedGenerateReqInput
from refcache.tree import RadixCache
from refcache.types import ServerArgs


class Counter:
    """In the place of ``LayerDoneCounter``."""

    def __init__(self, calls):
        self.calls = calls

    def set_consumer(self, index):
        self.calls.append(f"consumer {index}")


class Controller:
    def __init__(self, calls):
        self.layer_done_counter = Counter(calls)
        self.forward_stream = None

    def register_forward_stream(self, stream):
        self.forward_stream = stream


class HostTier(RadixCache):
    """Records what it is asked."""

    def __init__(self, params, calls):
        super().__init__(params)
        self.calls = calls
        self.cache_controller = Controller(calls)
        self.loads = 0

    def check_hicache_events(self):
        self.calls.append("events")

    def flush_write_through_acks(self):
        self.calls.append("acks")

    def ready_to_load_host_cache(self):
        self.calls.append("ready")
        self.loads += 1
        return self.loads - 1


def test_order_of_the_calls():
    calls = []
    args = ServerArgs(
        page_size=4,
        max_total_tokens=64,
        max_running_requests=2,
        context_length=64,
        enable_hierarchical_cache=True,
    )
    scheduler = Scheduler(
        args, ModelConfig(), make_tree=lambda params, server_args: HostTier(params, calls)
    )
    assert scheduler.tree_cache.cache_controller.forward_stream is scheduler.forward_stream
    alloc_extend = scheduler.token_to_kv_pool_allocator.alloc_extend

    def recording(*arguments):
        calls.append("alloc_extend")
        return alloc_extend(*arguments)

    scheduler.token_to_kv_pool_allocator.alloc_extend = recording
    for rid in ("a", "b"):
        scheduler.submit(TokenizedGenerateReqInput(rid, range(9), SamplingParams(2)))
        scheduler.step()
    # a prefill: events, then the loads start, then slots; its forward consumes that load
    prefill = ["events", "ready", "alloc_extend"]
    assert calls == [*prefill, "consumer 0", *prefill, "consumer 1"]
    calls.clear()
    scheduler.step()
    # a decode consumes nothing; acknowledgements are polled without a prefill, too
    assert calls == ["events", "acks", "consumer -1"]
    calls.clear()
    scheduler.step()
    assert calls[0] == "events"
