"""A manager on trial, the ledger of its blocks, and what each answer must be.

The ledger knows which keys are stored, being stored and being loaded, in which slots, and what each
slot holds. It asks ``lookup`` for every key that there was, one by one, after every call: so a
block that goes is seen going, and the call that let it go is judged.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from refcache.oracle.program.trial import Trial
from refcache.oracle.target.config import CacheConfig
from refcache.oracle.target.offload.contract import OffloadTraits, key_of


def payload(key: int, size: int) -> bytes:
    """The bytes of a block: each 8 of them name the key and their place."""
    words = ((key << 16 | place).to_bytes(8, "big") for place in range(-(-size // 8)))
    return b"".join(words)[:size]


def origin(data: bytes) -> str:
    """What a block's bytes say of themselves, for people."""
    word = int.from_bytes(data[:8], "big")
    return f"{len(data)} bytes that start like place {word & 0xFFFF} of key {word >> 16}"


class OffloadBench:
    """See the module docstring.

    Attributes:
        stored, storing: slot by key. ``loading``: how many loads of a key are open.
        stores, loads: open jobs, each the keys that are not complete.
        tokens: how many tokens of a partial block are used, by key.
        known: every key that was ever offered; ``gone``: those that the last call evicted.
    """

    def __init__(self, trial: Trial, config: CacheConfig) -> None:
        self.trial, self.config = trial, config
        self.traits: OffloadTraits = trial.target.offload_traits
        self.subject: Any = trial.call(trial.target.offload, config)
        self.known: set[int] = set()
        self._clear()

    def _clear(self) -> None:
        self.stored: dict[int, int] = {}
        self.storing: dict[int, int] = {}
        self.loading: Counter[int] = Counter()
        self.stores: list[list[int]] = []
        self.loads: list[list[int]] = []
        self.tokens: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.now = 0
        self.ever: set[int] = set()
        self.replayed: set[int] = set()
        self.gone: list[int] = []

    def call(self, name: str, *args: Any) -> Any:
        return self.trial.call(getattr(self.subject, name), *args)

    def can(self, name: str) -> bool:
        """Whether the manager has an optional call."""
        return hasattr(self.subject, name)

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return self.config.pages - len(self.stored) - len(self.storing)

    @property
    def held(self) -> dict[int, int]:
        """Slot by key, of the keys that surely have one: with tiers below, those in use."""
        tiers, loading = self.traits.tiers, self.loading
        return self.storing | {k: at for k, at in self.stored.items() if not tiers or loading[k]}

    def idle(self, kept: Sequence[int] = ()) -> list[int]:
        """The stored keys that may go for a store of ``kept``."""
        return [k for k in self.stored if not self.loading[k] and k not in kept]

    # ---- what is there ---------------------------------------------------------------------------

    def look(self, *, room: int = 0, kept: Sequence[int] = (), why: str = "") -> list[int]:
        """Ask for every key; the keys that have gone, of which ``room`` may have, none ``kept``."""
        if self.traits.tiers:
            return []
        found = {k for k in self.known if self.call("lookup", [key_of(k)]) == 1}
        for key in sorted(found - self.stored.keys()):
            state = "is being stored" if key in self.storing else "is not stored"
            self.trial.require(False, "OF2", f"key {key} is found{why}, but {state}")
        gone = sorted(self.stored.keys() - found)
        for key in gone:
            self.trial.require(
                not self.loading[key], "OF3", f"key {key} is being read and was evicted{why}"
            )
            self.trial.require(
                key not in kept, "OF6", f"key {key} was evicted by the store that offered it"
            )
        self.trial.require(
            len(gone) <= room,
            "OF6",
            f"keys {gone} are not found any more{why}, which needed the room of {room}",
        )
        self._in_order(gone, kept)
        for key in gone:
            del self.stored[key]
        self.gone = gone
        return gone

    def _in_order(self, gone: Sequence[int], kept: Sequence[int]) -> None:
        """OF8: what went was used before what stayed."""
        stayed = [k for k in self.idle(kept) if k not in gone]
        if not self.traits.uses or not gone or not stayed:
            return
        last, first = max(gone, key=self.used.__getitem__), min(stayed, key=self.used.__getitem__)
        self.trial.require(
            self.used[last] <= self.used[first],
            "OF8",
            f"key {last} was evicted, last used at call {self.used[last]}; key {first} stayed, "
            f"last used at call {self.used[first]}",
        )

    def use(self, keys: Sequence[int], how: str) -> None:
        """These keys are used now, if that is a use."""
        self.now += 1
        for key in keys:
            if how in self.traits.uses or key not in self.used:
                self.used[key] = self.now

    # ---- calls -----------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[int]) -> int:
        """OF2 of several keys in one call."""
        seen = self.call("lookup", [key_of(k) for k in keys])
        if not self.traits.tiers:
            expected = next((i for i, k in enumerate(keys) if k not in self.stored), len(keys))
            self.trial.require(
                seen == expected,
                "OF2",
                f"lookup of keys {list(keys)} found {seen!r}; of them {expected} can be loaded",
            )
        for key in keys[:seen]:
            self.trial.require(key in self.ever, "OF2", f"key {key} is found, but was never stored")
        return int(seen)

    def prepare_store(self, keys: Sequence[int], tokens: Sequence[int]) -> None:
        """A store of distinct keys; a job if something is to be written."""
        names, partial = [key_of(k) for k in keys], self.traits.partial
        self.known.update(keys)
        missing = [k for k in keys if k not in self.held]
        answer = self.call("prepare_store", names, *([list(tokens)] if partial else []))
        if answer is None:
            self._judge_refusal(missing, keys)
            return
        slots = {int.from_bytes(name, "big"): slot for name, slot in answer.items()}
        free, strange = self.free, sorted(slots.keys() - set(missing))
        if self.traits.tiers:  # what came back from below has a slot already
            missing = [k for k in missing if k in slots]
            self.stored = {k: at for k, at in self.stored.items() if k not in slots}
        self.trial.require(
            not strange, "OF5", f"a slot was given for keys {strange}, which have one"
        )
        self.trial.require(
            slots.keys() == set(missing),
            "OF4",
            f"slots for keys {sorted(slots)}, but {missing} are to be stored",
        )
        self.look(room=max(0, len(slots) - free), kept=keys, why=f" after a store of {list(keys)}")
        for key, slot in slots.items():
            self._judge_slot(key, slot)
            self.storing[key] = slot
            self.tokens[key] = tokens[keys.index(key)] if partial else self.config.page_size
        self.use(list(slots), "store")
        if slots:
            self.stores.append(list(slots))

    def _judge_refusal(self, missing: Sequence[int], keys: Sequence[int]) -> None:
        if not self.traits.tiers:
            room = self.free + len(self.idle(keys))
            self.trial.require(
                len(missing) > room,
                "OF4",
                f"a store of {list(missing)} was refused; {self.free} slots are free and "
                f"{room - self.free} blocks may go",
            )
        self.look(why=" after a store that was refused")

    def _judge_slot(self, key: int, slot: Any) -> None:
        """OF5: nobody has it."""
        whole = isinstance(slot, int) and not isinstance(slot, bool)
        self.trial.require(whole, "OF5", f"the slot of key {key} is {slot!r}, expected a number")
        owner = next((k for k, at in self.held.items() if at == slot), None)
        self.trial.require(
            owner is None, "OF5", f"key {key} was given slot {slot}, which key {owner} has"
        )

    def complete_store(self, keys: Sequence[int], ok: bool) -> None:
        """The copies of these keys are over; what failed has written something all the same."""
        if self.can("write"):
            for key in keys:
                size = self.tokens[key] * self.traits.token_bytes
                self.call("write", key_of(key), payload(key if ok else 0xBAD, size))
        self.call("complete_store", [key_of(k) for k in keys], ok)
        for key in keys:
            slot = self.storing.pop(key)
            if ok:
                self.stored[key] = slot
                self.ever.add(key)
        if ok and not self.traits.tiers:
            for key in keys:
                found = self.call("lookup", [key_of(key)])
                self.trial.require(
                    found == 1, "OF2", f"key {key} is not found right after its store"
                )
        self.look(why=" after a store was complete" if ok else " after a store failed")

    def prepare_load(self, keys: Sequence[int]) -> None:
        """A load of stored keys."""
        slots = list(self.call("prepare_load", [key_of(k) for k in keys]))
        self.trial.require(
            len(slots) == len(keys), "OF1", f"{len(slots)} slots for a load of {len(keys)} keys"
        )
        for key, slot in zip(keys, slots, strict=True):
            if self.traits.tiers and not self.loading[key]:
                self.stored.pop(key, None)
                self._judge_slot(key, slot)
                self.stored[key] = slot
            self.trial.require(
                slot == self.stored[key],
                "OF1",
                f"key {key} is to be read from slot {slot}; it was stored in {self.stored[key]}",
            )
            self.loading[key] += 1
        self.use(keys, "load")
        self.loads.append(list(keys))
        self.read(keys)
        self.look(why=" after a load began")

    def read(self, keys: Sequence[int]) -> None:
        """OF1 by bytes, where there are some."""
        if not self.can("read"):
            return
        for key in keys:
            seen = bytes(self.call("read", key_of(key)))
            expected = payload(key, self.tokens[key] * self.traits.token_bytes)
            self.trial.require(
                seen == expected,
                "OF1",
                f"key {key} was stored with {len(expected)} bytes of its own; read are "
                f"{origin(seen)}",
            )

    def complete_load(self, keys: Sequence[int]) -> None:
        """The copies of these keys are over: until now they were what they had been."""
        self.read(keys)
        self.call("complete_load", [key_of(k) for k in keys])
        self.loading.subtract(keys)
        self.look(why=" after a load was complete")

    def touch(self, keys: Sequence[int]) -> None:
        self.call("touch", [key_of(k) for k in keys])
        self.use([k for k in keys if k in self.stored or k in self.storing], "touch")
        self.look(why=" after a touch")

    def reset(self) -> None:
        """Every block is gone; what lies in tiers below may come back."""
        self.call("reset")
        told = self.call("events") if self.can("events") else ()
        if not self.traits.tiers:  # each block's removal, or one event for all, or none
            gone = {int.from_bytes(name, "big") for kind, name in told if kind == "removed"}
            strange = sorted(gone - self.replayed)
            self.trial.require(
                not strange, "OF7", f"a reset removed keys {strange}, which were not there"
            )
        below = self.ever if self.traits.tiers else set()
        self._clear()
        self.ever |= below
        self.look(why=" after a reset")

    # ---- checks ----------------------------------------------------------------------------------

    def check(self) -> None:
        """OF7: the events say what is there."""
        if not self.can("events") or self.traits.tiers:
            return
        for kind, name in self.call("events"):
            key = int.from_bytes(name, "big")
            if kind == "stored":
                fits = key not in self.replayed and key in self.ever
                self.replayed.add(key)
            else:
                fits = kind == "removed" and key in self.replayed
                self.replayed.discard(key)
            self.trial.require(fits, "OF7", f"event {kind!r} of key {key} does not follow")
        self.trial.require(
            self.replayed == self.stored.keys(),
            "OF7",
            f"the events say that keys {sorted(self.replayed)} are stored; found are "
            f"{sorted(self.stored)}",
        )

    def choices(self) -> dict[str, Any]:
        return {"stored": dict(sorted(self.stored.items()))}

    def describe(self) -> str:
        lines = [f"stored (key: slot): {self.stored}", f"being stored: {self.storing}"]
        lines += [f"store {i}: keys {keys}" for i, keys in enumerate(self.stores)]
        lines += [f"load {i}: keys {keys}" for i, keys in enumerate(self.loads)]
        return "\n".join(lines)
