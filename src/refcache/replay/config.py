"""What a replay is asked for, and what it answers."""

from dataclasses import dataclass

from refcache.errors import InvalidArgument, UnknownName
from refcache.types import EVICTION_POLICIES, WRITE_POLICIES

CHECKS = ("every", "sampled", "off")


@dataclass(frozen=True)
class ReplayConfig:
    """How a trace is replayed.

    Attributes:
        page_size: tokens a page.
        device_tokens: capacity of the device, cut to whole pages; None is without bound.
        policy: eviction policy, or ``pkg.module:Class`` of an ``EvictionStrategy`` of one's own.
        limit: requests to replay at most.
        serial: each request runs to its end before the next arrives.
        no_decode: a request ends with its first token.
        check: see :mod:`refcache.replay.loop`; ``seed``: of the rows that are drawn.
        max_running_requests: that decode together.
        host_ratio: host tokens / device tokens; None: no host tier.
        write_policy, load_back_threshold: of the host tier; None is the tree's own threshold.

    Raises:
        InvalidArgument: a number that is too small. UnknownName: a policy or check.
    """

    page_size: int = 64
    device_tokens: int | None = 3_000_000
    policy: str = "lru"
    limit: int | None = None
    serial: bool = False
    no_decode: bool = False
    check: str = "sampled"
    seed: int = 0
    max_running_requests: int = 256
    host_ratio: float | None = None
    write_policy: str = "write_through"
    load_back_threshold: int | None = None

    def __post_init__(self) -> None:
        if self.host_ratio is not None and not (1 < self.host_ratio < float("inf")):
            raise InvalidArgument(f"host_ratio={self.host_ratio}: expected a finite number above 1")
        if self.host_ratio is not None and self.device_tokens is None:
            raise InvalidArgument("host_ratio without a bound on the device: nothing would move")
        if self.write_policy not in WRITE_POLICIES:
            raise UnknownName("write_policy", self.write_policy, WRITE_POLICIES)
        least = {"page_size": 1, "device_tokens": self.page_size, "limit": 0}
        for name, low in {**least, "max_running_requests": 1}.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise InvalidArgument(f"{name}={value}: expected at least {low}")
        if ":" not in self.policy and self.policy not in EVICTION_POLICIES:
            raise UnknownName("policy", self.policy, EVICTION_POLICIES)
        if self.check not in CHECKS:
            raise UnknownName("check", self.check, CHECKS)


@dataclass(frozen=True)
class ReplayResult:
    """What a replay did, in tokens unless the name says otherwise.

    Attributes:
        hit_tokens: prompt tokens that the cache had when their request was admitted.
        computed_tokens: that prefills computed (again after a retraction); ``output_tokens`` made.
        evicted_tokens: that the tree gave up to make room.
        steps: of the loop; ``retractions``: requests that lost their memory on the way.
        rows_checked: KV rows compared, one of each layer and plane counted as one.
        states_checked: times that every rule was checked.
        seconds: by the clock on the wall.
        kv_kept: False when no KV bytes were kept, so that no row could be checked.
        host_hit_tokens: of ``hit_tokens``, those that were loaded from the host.
        bytes_to_host, bytes_to_device: moved by writes and loads.
    """

    requests: int
    prompt_tokens: int
    hit_tokens: int
    computed_tokens: int
    output_tokens: int
    evicted_tokens: int
    steps: int
    retractions: int
    rows_checked: int
    states_checked: int
    seconds: float
    kv_kept: bool
    host_hit_tokens: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
