"""What a replay is asked for, and what it answers."""

from dataclasses import dataclass

from refcache.errors import InvalidArgument, UnknownName
from refcache.types import EVICTION_POLICIES, HIT_REFRESHES, WRITE_POLICIES

MODELS = ("full", "swa", "mamba")
CHECKS = ("every", "sampled", "off")
KEEPING = ("ttl", "retain", "pin")


def kept_by(policy: str) -> tuple[str, float] | None:
    """The name and the amount of a ``policy`` like ``ttl=600``; None: it is none.

    Raises:
        InvalidArgument: no finite number above 0 behind ``=``. UnknownName: before it.
    """
    name, sign, text = policy.partition("=")
    if not sign:
        return None
    if name not in KEEPING:
        raise UnknownName("policy", name, [f"{known}=N" for known in KEEPING])
    try:
        amount = float(text)
    except ValueError:
        amount = 0
    if not 0 < amount < float("inf"):
        raise InvalidArgument(f"policy {policy!r}: expected {name}=N with a number above 0")
    return name, amount


@dataclass(frozen=True)
class ReplayConfig:
    """How a trace is replayed.

    Attributes:
        page_size: tokens a page.
        device_tokens: capacity of the device, cut to whole pages; None is without bound.
        policy: eviction policy, ``pkg.module:Class`` of an ``EvictionStrategy`` of one's own, or
            ``ttl=S``, ``retain=S``, ``pin=N`` (:mod:`refcache.replay.keeping`).
        target: the cache, as ``refcache check`` takes it; None is the reference's.
        arrivals: requests come at their times, not as fast as the loop admits them. Then a step
            takes ``step_ms``, and a second more for each ``prefill_rate`` tokens of prefills.
        limit: requests to replay at most.
        serial: each request runs to its end before the next arrives.
        no_decode: a request ends with its first token.
        check: see :mod:`refcache.replay.loop`; ``seed``: of the rows that are drawn.
        max_running_requests: that decode together.
        model: "full"; "swa": a layer looks back ``window`` tokens only; "mamba": one has states, of
            which there are ``states``, and a request leaves one each ``state_interval`` tokens.
        hit_refreshes: of a hybrid model, see :class:`~refcache.types.CacheInitParams`;
            ``branching``: a prefill leaves a state at the branching point of its match.
        host_ratio: host tokens / device tokens; None: no host tier.
        write_policy, load_back_threshold: of the host tier; None is the tree's own threshold.
        storage: a directory for the pages below the host. A request waits for what is there for it.
        restart: after so many requests the loop, the device and the host begin anew.

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
    storage: str | None = None
    restart: int | None = None
    target: str | None = None
    arrivals: bool = False
    prefill_rate: float = 20_000
    step_ms: float = 20
    model: str = "full"
    state_interval: int = 512
    states: int = 1024
    window: int = 1024
    hit_refreshes: str = "path"
    branching: bool = True

    def _check_model(self) -> None:
        if self.model not in MODELS:
            raise UnknownName("model", self.model, MODELS)
        if self.hit_refreshes not in HIT_REFRESHES:
            raise UnknownName("hit_refreshes", self.hit_refreshes, HIT_REFRESHES)
        if self.model != "full" and (
            self.target is not None
            or self.host_ratio is not None
            or self.device_tokens is None
            or self.policy != "lru"
        ):
            raise InvalidArgument(
                f"model={self.model!r}: expected refcache's tree on one bounded tier, with lru"
            )
        if self.model == "mamba" and (
            self.state_interval < self.page_size or self.state_interval % self.page_size
        ):
            raise InvalidArgument(
                f"state_interval={self.state_interval}: expected whole pages of {self.page_size}"
            )
        if min(self.states, self.window) < 1:
            raise InvalidArgument(
                f"states={self.states}, window={self.window}: expected at least 1 of each"
            )

    def __post_init__(self) -> None:
        self._check_time()
        self._check_model()
        if self.storage is not None and self.host_ratio is None:
            raise InvalidArgument("storage: expected host_ratio too, pages come by way of the host")
        if self.restart is not None and self.restart < 1:
            raise InvalidArgument(f"restart={self.restart}: expected at least 1 request before it")
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
        kept = kept_by(self.policy)
        if ":" not in self.policy and kept is None and self.policy not in EVICTION_POLICIES:
            raise UnknownName("policy", self.policy, EVICTION_POLICIES)
        if self.check not in CHECKS:
            raise UnknownName("check", self.check, CHECKS)
        if self.target is not None and self.host_ratio is not None:
            raise InvalidArgument("host_ratio: expected none, a target is replayed on one tier")
        if self.target is not None and self.policy not in EVICTION_POLICIES:
            raise InvalidArgument(
                f"policy {self.policy!r}: a strategy of the reference's tree; a target takes "
                f"{', '.join(EVICTION_POLICIES)}, if it looks at them"
            )
        if kept is not None and kept[0] == "ttl" and self.host_ratio is not None:
            raise InvalidArgument(f"policy {self.policy!r}: expected one tier, or another policy")
        if kept is not None and kept[0] != "pin" and not self.arrivals:
            raise InvalidArgument(f"policy {self.policy!r}: counts seconds: expected arrivals too")

    def _check_time(self) -> None:
        if self.arrivals and self.serial:
            raise InvalidArgument("serial and arrivals: expected one of them")
        for name in ("prefill_rate", "step_ms"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InvalidArgument(f"{name}={value}: expected a finite number above 0")


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
        trace_seconds: on the trace's clock, from the first arrival to the last finish; 0 without
            ``arrivals``.
        host_hit_tokens: of ``hit_tokens``, those that were loaded from the host.
        bytes_to_host, bytes_to_device: moved by writes and loads.
        storage_hit_tokens: brought to the host from storage, and ``bytes_to_storage``: written.
        hits_before, hits_after: of ``hit_tokens``, those before and after the restart.
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
    trace_seconds: float = 0
    host_hit_tokens: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    storage_hit_tokens: int = 0
    bytes_to_storage: int = 0
    hits_before: int = 0
    hits_after: int = 0
