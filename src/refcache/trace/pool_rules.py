"""Rules about the device allocator: any free page will do, but which slots of it is fixed."""

from typing import Any

from refcache.oracle.rules.violation import Violation
from refcache.trace import format as f
from refcache.trace.rules import Model, Undecidable, judges


def may_refuse(model: Model, call: f.AnyCall) -> bool:
    """Whether the contract lets this call raise: a misuse, which then changes nothing."""
    if isinstance(call, f.Free):
        pages = model.pages_of(call.slots)
        return any(not isinstance(model.device.owner.get(p), str) for p in pages)
    if isinstance(call, f.DecLockRef):
        prefix = model.nodes.get(call.node)
        return prefix is None or not model.device.holding[call.node, prefix]
    if isinstance(call, f.IncLockRef):
        prefix = model.nodes.get(call.node)
        return prefix is None or (bool(prefix[1]) and prefix not in model.device.cached)
    if isinstance(call, f.Alloc):
        return call.need_size < 0 or call.need_size % model.page_size != 0
    if isinstance(call, f.FreeGroupBegin | f.FreeGroupEnd):
        return (model.device.queued is None) == isinstance(call, f.FreeGroupEnd)
    return False


@judges(f.Alloc)
def _alloc(model: Model, call: f.Alloc) -> None:
    _grow(model, [0], [call.need_size], [-1], call.slots)


@judges(f.AllocExtend)
def _alloc_extend(model: Model, call: f.AllocExtend) -> None:
    _grow(model, call.prefix_lens, call.seq_lens, call.last_loc, call.slots)


@judges(f.AllocDecode)
def _alloc_decode(model: Model, call: f.AllocDecode) -> None:
    prefix_lens = [seq - 1 for seq in call.seq_lens]
    _grow(model, prefix_lens, call.seq_lens, call.last_loc, call.slots)


def _grow(
    model: Model, prefix_lens: list[int], seq_lens: list[int], last_loc: list[int], slots: Any
) -> None:
    """Any free pages will do; which slots of them, and in which order, is fixed."""
    import torch

    from refcache.reference import alloc_extend

    size = model.page_size
    lanes = list(zip(prefix_lens, seq_lens, last_loc, strict=False))
    if len({len(prefix_lens), len(seq_lens), len(last_loc)}) > 1 or any(
        not 0 <= prefix <= seq < 2**40 for prefix, seq, _ in lanes
    ):
        raise Undecidable(f"lengths {prefix_lens} to {seq_lens} after {last_loc}")
    need = sum(-(-seq // size) - -(-prefix // size) for prefix, seq, _ in lanes)
    free = model.device.free_count
    if slots is None:
        model.require(
            need > free or not model.totals,
            "AL2",
            f"refused {need} pages although {free} are free",
        )
        return
    count = sum(seq - prefix for prefix, seq, _ in lanes)
    model.require(len(slots) == count, "AL1", f"{len(slots)} slots, but {count} were asked for")
    opened, start = [], 0
    for before, after, end in lanes:
        growth = slots[start : start + after - before]
        start += after - before
        opened += [s // size for s in growth[-before % size :: size]]
        if growth and before % size:
            model.require(
                isinstance(model.device.owner.get(end // size), str),
                "P1",
                f"tokens were put behind slot {end}: {model.device.says(end // size)}",
            )
    prefix, seq, last, pages = (
        torch.tensor(part, dtype=torch.int64) for part in (prefix_lens, seq_lens, last_loc, opened)
    )
    expected = alloc_extend(prefix, seq, last, pages, size, count).tolist()
    wrong = next((i for i, s in enumerate(slots) if s != expected[i]), None)
    if wrong is not None:
        raise Violation(
            "AL1",
            f"slot {wrong} of the answer is {slots[wrong]}, expected {expected[wrong]} with "
            "the pages that it opens",
        )
    model.require(
        len(set(opened)) == len(opened),
        "P1",
        f"pages {sorted(p for p in opened if opened.count(p) > 1)} were handed out twice in "
        "one answer",
    )
    model.device.take([page * size for page in opened], f"record {model.n}")


@judges(f.Free)
def _free(model: Model, call: f.Free) -> None:
    model.file_written()
    model.device.release(model.pages_of(call.slots))


@judges(f.FreeGroupBegin)
def _free_group_begin(model: Model, call: f.FreeGroupBegin) -> None:
    model.device.queued = set()


@judges(f.FreeGroupEnd)
def _free_group_end(model: Model, call: f.FreeGroupEnd) -> None:
    model.device.queued = None


@judges(f.Clear)
def _clear(model: Model, call: f.Clear) -> None:
    cached = len(model.device.cached)
    model.require(not cached, "P1", f"every page was cleared while {cached} pages are cached")
    model.device.clear()


@judges(f.BackupState)
def _backup_state(model: Model, call: f.BackupState) -> None:
    model.states[call.state] = (dict(model.device.owner), dict(model.device.cached))


@judges(f.RestoreState)
def _restore_state(model: Model, call: f.RestoreState) -> None:
    if call.state not in model.states:
        raise Undecidable(f"state {call.state} was saved before the recording")
    owner, cached = model.states[call.state]
    model.require(
        cached == model.device.cached,
        "P1",
        "the free list of an earlier state was restored although what is cached has changed",
    )
    model.device.owner = dict(owner)
