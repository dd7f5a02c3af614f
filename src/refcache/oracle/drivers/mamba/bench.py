"""The bench of a tree of tokens and recurrent states: two ledgers, single calls, checks.

Full KV is as on the bench of a plain tree. A second ledger knows who owns each state slot and which
prefix has a state; so it knows how far a match may go (to the deepest state), what an eviction of
states may take, and what each slot's bytes must be.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from refcache.oracle.drivers.mamba.request import MambaRequest
from refcache.oracle.drivers.tree.bench import EvictionTerms, Shape, TreeBench
from refcache.oracle.drivers.tree.forwards import PlayedForwards
from refcache.oracle.ledger.ledger import Freed, Prefix
from refcache.oracle.ledger.recording import RecordingAllocator
from refcache.oracle.ledger.states import RecordingStates, StateBytes, StateLedger
from refcache.oracle.rules.mamba import (
    MambaState,
    StateHolder,
    check_mamba_state,
    leaf_prefixes,
)
from refcache.oracle.target.config import MambaConfig, MambaParts

RULES = {"P0": "MB1", "P1": "MB1", "L2": "MB10"}
"""What the ledger's rules about pages are called where the pages are state slots."""


class MambaBench(TreeBench):
    """See the module docstring.

    Attributes:
        states: who owns each state slot; ``pool``: the pool, recorded; ``bytes``: its content.
    """

    config: MambaConfig

    def build(self) -> None:
        c = self.config
        self.states = StateLedger(c.states, self._note)
        parts: MambaParts = self.trial.call(
            self.target.mamba,
            c,
            lambda allocator: RecordingAllocator(allocator, self.ledger),
            self._recorded,
        )
        self.tree, self.allocator, self.rows = parts.tree, parts.allocator, parts.rows
        self.bytes = StateBytes(parts.planes)
        self.forwards = PlayedForwards(self.trial)
        self.events = None
        self.terms = EvictionTerms(last=self._last_victim)

    def _recorded(self, pool: Any) -> RecordingStates:
        self.pool = RecordingStates(pool, self.states, self.ledger)
        return self.pool

    def _note(self, rule: str, evidence: str) -> None:
        self.trial.note(RULES.get(rule, rule), evidence.replace("page ", "state slot "))

    def _last_victim(self, counts: Sequence[int]) -> int:
        """Pages of the leaf that went last, with the nodes above that went with it: what was freed
        from just before its state on."""
        return sum(counts[max(0, self.pool.marks[-1] - 1) :]) if self.pool.marks else counts[-1]

    def evictable(self) -> int:
        return int(self.trial.call(self.tree.full_evictable_size))

    def protected(self) -> int:
        return int(self.trial.call(self.tree.full_protected_size))

    def total(self) -> int:
        return int(self.trial.call(self.tree.total_size)[0])

    def state_sizes(self) -> tuple[int, int, int]:
        """States that the tree calls evictable and protected, and free slots of the pool."""
        call = self.trial.call
        return (
            int(call(self.tree.mamba_evictable_size)),
            int(call(self.tree.mamba_protected_size)),
            int(call(self.pool.available_size)),
        )

    def shape(self) -> Shape:
        own: Shape = self.state_sizes()
        if self.trial.has("inspect"):
            nodes = self.target.inspect_component(self.tree).nodes
            own += ({handle: (node.slot, node.lock_ref) for handle, node in nodes.items()},)
        return super().shape() + own

    # ---- calls -----------------------------------------------------------------------------------

    def can_copy(self, best: Prefix) -> bool:
        """Whether a state slot is free, or could be made free without that of ``best``."""
        return bool(self.states.free) or any(p != best for p in self.states.evictable())

    def match(
        self, tokens: Sequence[int], extra_key: str | None, req: MambaRequest | None = None
    ) -> Any:
        """``match_prefix``, for ``req`` with a copy of the state: M0, C1 and MB7."""
        prefix = (extra_key, self.whole(tokens))
        cached = self.ledger.longest(prefix)
        best = self.states.best(cached)
        fresh = req is not None and req.running is None and bool(best[1])
        key = self.target.RadixKey(list(tokens), extra_key)
        params = self.target.MatchPrefixParams(key=key)
        if req is not None:
            params = self.target.MatchPrefixParams(key=key, cow_mamba=True, req=req)
            self.pool.owner = req.rid
        self.pool.handed.clear()
        with self.may_evict_state(fresh, best):
            found = self.trial.call(self.tree.match_prefix, params)
        self._judge_state_match(found, cached, best)
        if req is not None:
            self._judge_copy(req, best, fresh)
        return found

    def _judge_state_match(self, found: Any, cached: Prefix, best: Prefix) -> None:
        slots, require = found.device_indices.tolist(), self.trial.require
        require(
            len(slots) == len(best[1]) and not found.host_hit_length,
            "M0",
            f"match found {len(slots)} tokens; {len(cached[1])} are cached, and the last state "
            f"among them is that of {list(best[1])}",
        )
        self.judge_slots(slots, best)
        chunk, asked = self.config.chunk, None
        if len(cached[1]) > len(best[1]):
            asked = len(cached[1]) // chunk * chunk or None
        require(
            found.mamba_branching_seqlen == asked,
            "MB7",
            f"match gave the branching point {found.mamba_branching_seqlen}; KV of "
            f"{len(cached[1])} tokens and a state of {len(best[1])} ask for {asked}",
        )

    def _judge_copy(self, req: MambaRequest, best: Prefix, fresh: bool) -> None:
        """The request's slot after a match of ``best``; ``fresh``: it had none before."""
        require, handed = self.trial.require, self.pool.handed
        require(
            len(handed) == fresh and (req.running in handed or not fresh),
            "MB7",
            f"{req.rid} matched {len(best[1])} tokens {'without' if fresh else 'with'} a slot; "
            f"slots {handed} were handed out, and it has {req.running}",
        )
        if best[1] and req.running is not None:
            wrong = self.bytes.differs(req.running, best)
            require(not wrong, "MB7", f"{req.rid} matched {len(best[1])} tokens; its {wrong}")

    @contextmanager
    def may_evict_state(self, needed: bool, keep: Prefix) -> Iterator[None]:
        """In the block one state may be evicted, if one is needed and none is free; not ``keep``.

        MB10: then one is, exactly.
        """
        if not needed or self.states.free:
            yield
            return
        for ledger in (self.ledger, self.states):
            ledger.hold(None, keep)
        try:
            with (
                self.ledger.permits(self.ledger.only_unlocked),
                self.states.permits(self.states.only_unlocked) as gone,
            ):
                yield
        finally:
            for ledger in (self.ledger, self.states):
                ledger.drop(None, keep)
        self.trial.require(
            len(gone.pages) == 1, "MB10", f"one state was needed, {len(gone.pages)} were evicted"
        )

    def take_state(self, prefix: Prefix, owner: str) -> int | None:
        """A slot with the state of ``prefix``, evicting one if needed; None when there is none."""
        self.make_states(1)
        if not self.states.free:
            return None
        self.pool.owner = owner
        slot = int(self.trial.call(self.pool.alloc, 1)[0])
        self.judge_zero(slot, owner)
        self.bytes.write(slot, prefix)
        return slot

    def judge_zero(self, slot: int, owner: str) -> None:
        """MB7: a slot that was handed out is the state of no token."""
        wrong = self.bytes.differs(slot, (None, ()))
        self.trial.require(not wrong, "MB7", f"{owner} got a fresh {wrong}")

    def make_states(self, count: int) -> None:
        """Evict the states that are short of ``count`` free ones, as a scheduler does."""
        short = count - len(self.states.free)
        if short > 0:
            self.evict(0, short)

    def free_states(self, slots: Collection[int]) -> None:
        """The caller gives states back."""
        if slots:
            with self.states.permits(set(slots)):
                self.trial.call(self.pool.free, torch.tensor(sorted(slots)))

    def insert(
        self,
        tokens: tuple[int, ...],
        extra_key: str | None,
        slots: list[int],
        chunked: bool,
        priority: int,
        kept: int = 0,
    ) -> None:
        """``insert`` of whole pages and a state; the tree frees what it had, beyond ``kept`` tokens
        (or fewer, if it has not so many), which the caller frees; MB9. The tensor of slots is
        overwritten afterwards; that of the state is the tree's from now on, as in SGLang."""
        prefix, require = (extra_key, self.whole(tokens)), self.trial.require
        state = self.take_state(prefix, "the caller")
        known = len(self.ledger.longest(prefix)[1])
        kept = min(kept, known) // self.page_size * self.page_size
        if state is None:
            self.free(slots)
            return
        value = torch.tensor(slots)
        params = self.target.InsertParams(
            key=self.target.RadixKey(list(tokens), extra_key),
            value=value,
            mamba_value=torch.tensor([state]),
            prev_prefix_len=kept,
            chunked=chunked,
            priority=priority,
        )
        given_up = {slot // self.page_size for slot in slots[kept:known]}
        with self.ledger.permits(given_up) as freed:
            result = self.trial.call(self.tree.insert, params)
        value.fill_(-1)
        existed = prefix in self.states.cached
        require(
            result.prefix_len == known and set(freed.pages) == given_up,
            "MB9",
            f"insert returned {result.prefix_len} and freed pages {freed.pages}; {known} tokens "
            f"were cached, and {sorted(given_up)} were the caller's among them beyond {kept}",
        )
        require(
            result.mamba_exist == existed,
            "MB9",
            f"insert returned mamba_exist={result.mamba_exist}; {list(prefix[1])} had "
            f"{'a' if existed else 'no'} state",
        )
        self.adopt(prefix, slots, known)
        if existed:
            self.free_states([state])
        else:
            self.states.adopt(prefix, state)
        self.free(slots[:kept])

    def lock(self, handle: Any, prefix: Prefix) -> None:
        """``inc_lock_ref``: the KV of the whole path, the state at its end."""
        self.trial.call(self.tree.inc_lock_ref, handle)
        self.hold(handle, prefix)

    def unlock(self, handle: Any, prefix: Prefix) -> None:
        """``dec_lock_ref``."""
        self.trial.call(self.tree.dec_lock_ref, handle)
        self.drop(handle, prefix)

    def hold(self, handle: Any, prefix: Prefix) -> None:
        """Somebody holds the KV and the state of a prefix now."""
        self.ledger.hold(handle, prefix)
        self.states.hold(handle, prefix)

    def drop(self, handle: Any, prefix: Prefix) -> None:
        """Somebody holds it no longer."""
        self.ledger.drop(handle, prefix)
        self.states.drop(handle, prefix)

    def evict(self, num_tokens: int, states: int = 0) -> None:
        """``evict`` of tokens, of states, or of both: E1 to E3 and MB10."""
        loose = len(self.states.evictable())
        with (
            self.ledger.permits(self.ledger.only_unlocked) as freed,
            self.states.permits(self.states.only_unlocked) as gone,
        ):
            self.pool.marks.clear()
            before, had = self.available(), self.state_sizes()[2]
            params = self.target.EvictParams(num_tokens=num_tokens, mamba_num=states)
            result = self.trial.call(self.tree.evict, params)
            grown, more = self.available() - before, self.state_sizes()[2] - had
        if not states:
            self._judge_eviction(num_tokens, result.num_tokens_evicted, freed, grown)
        self.judge_whole_prefixes()
        self._judge_states_evicted((num_tokens, states), result, freed, gone, (more, loose))

    def _judge_states_evicted(
        self,
        asked: tuple[int, int],
        result: Any,
        freed: Freed,
        gone: Freed,
        counted: tuple[int, int],
    ) -> None:
        """MB10. ``counted``: by how much the pool grew, and how many states nobody had locked."""
        require, count = self.trial.require, result.mamba_num_evicted
        tokens, states = len(freed.pages) * self.page_size, len(gone.pages)
        grown, loose = counted
        require(states == grown, "MB10", f"{states} states were freed, the pool grew by {grown}")
        if asked[1]:
            require(
                count == states if not asked[0] else count <= states,
                "MB10",
                f"evict of {asked[1]} states returned {count}, the pool grew by {grown}",
            )
            require(
                states >= min(asked[1], loose),
                "MB10",
                f"evict of {asked[1]} states freed {states}, {loose} were not locked",
            )
        if asked[1] and not asked[0] and self.trial.has("minimal_evict"):
            require(
                states <= asked[1], "MB10", f"evict of {asked[1]} states freed {states} of them"
            )
        require(
            result.num_tokens_evicted in ((0, tokens) if not asked[0] else range(tokens + 1)),
            "MB10",
            f"evict returned {result.num_tokens_evicted} tokens, it freed {tokens}",
        )

    def reset(self) -> None:
        super().reset()
        self.states.clear()
        sizes = self.state_sizes()
        whole = (0, 0, self.config.states)
        self.trial.require(sizes == whole, "Z1", f"after reset the states have sizes {sizes}")

    def evict_everything(self) -> None:
        super().evict_everything()
        free = self.state_sizes()[2]
        self.trial.require(
            free == self.config.states,
            "MB1",
            f"{free} of {self.config.states} states are free after everything was evicted",
        )

    # ---- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        super().check()
        self._check_states()
        if self.trial.has("inspect"):
            check_mamba_state(self.mamba_state())

    def _check_states(self) -> None:
        """MB1, MB2, MB5, MB6 and MB7 from outside."""
        require, cached = self.trial.require, self.states.cached
        evictable, protected, free = self.state_sizes()
        require(
            free == len(self.states.free),
            "MB1",
            f"{free} states are free, but nobody owns {len(self.states.free)}",
        )
        held = {prefix for prefix in self.states.locked() if prefix[1]}
        require(
            (evictable, protected) == (len(cached) - len(held), len(held)),
            "MB5",
            f"{evictable} states evictable and {protected} protected; {len(cached)} are cached, "
            f"{len(held)} of them locked",
        )
        for prefix in leaf_prefixes(self.ledger.cached, self.page_size):
            require(prefix in cached, "MB2", f"{list(prefix[1])} is a leaf without a state")
        for prefix, slot in cached.items():
            wrong = self.bytes.differs(slot, prefix)
            require(not wrong, "MB6", f"beside KV of {len(prefix[1])} tokens {wrong}")
        for holder in self.state_holders():
            for found in (holder.computed, holder.tracked):
                wrong = "" if found is None else self.bytes.differs(*found)
                require(not wrong, "MB7", f"{holder.name}: beside KV of its tokens {wrong}")

    def state_holders(self) -> list[StateHolder]:
        """The running requests' states."""
        return [
            StateHolder(
                req.rid,
                tuple(req.states),
                None
                if req.running is None
                else (req.running, (req.extra_key, req.tokens[: req.computed])),
                None
                if req.mamba_last_track_seqlen is None
                else (req.tracked, (req.extra_key, req.tokens[: req.mamba_last_track_seqlen])),
            )
            for req in self.requests
            if isinstance(req, MambaRequest)
        ]

    def mamba_state(self) -> MambaState:
        """What the rules about states look at."""
        c = self.config
        return MambaState(
            state=self.state(),
            mamba=self.target.inspect_component(self.tree),
            size=c.states,
            free=self.states.free,
            holders=self.state_holders(),
            grid=c.chunk if c.extra_buffer else 1,
            differs=self.bytes.differs,
        )

    def choices(self) -> dict[str, Any]:
        chosen = super().choices()
        for req in self.requests:
            chosen[f"states of {req.rid}"] = getattr(req, "states", [])
        for (space, elements), slot in self.states.cached.items():
            chosen[f"state cached for {list(elements)} in namespace {space!r}"] = slot
        return chosen

    def describe(self) -> str:
        lines = [super().describe(), f"free states: {self.states.free}"]
        for slot in sorted(self.states.owner):
            owner = self.states.says(slot).replace("page", "state slot")
            lines.append(f"{owner}; it holds {self.bytes.says(slot)}")
        return "\n".join(lines)
