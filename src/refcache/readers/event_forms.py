"""The forms of KV events: how each engine writes them, as our :class:`BlockEvent`.

A form recognises a value by the fields that only it has, and turns it into a batch. What it does
not know of a kind it calls ``other``: counted, not judged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refcache.readers.block_event import DEVICE, Bad, BlockEvent, EventBatch, Hash
from refcache.readers.source import shown

KV_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": ("medium",),
}
"""Fields of an event that is written as an array, in order, after the name of its kind."""

OPS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}
VLLM_ONLY = ("group_idx", "kv_cache_spec_kind", "extra_keys", "kv_cache_spec_sliding_window")


@dataclass(frozen=True)
class Form:
    """A form: whether a value is of it, and the value as a batch."""

    recognises: Callable[[Any], bool]
    batch: Callable[[Any, int, int | None, Any], EventBatch]


# SGLang and vLLM


def _is_kv(value: Any) -> bool:
    if isinstance(value, dict):
        return "events" in value or value.get("type") in KV_FIELDS or "block_hashes" in value
    if not isinstance(value, list) or not value:
        return False
    return value[0] in KV_FIELDS if isinstance(value[0], str) else len(value) > 1


def _kv_batch(value: Any, line: int, seq: int | None, source: Any) -> EventBatch:
    if not isinstance(value, dict | list) or not value:
        raise Bad(None, f"got {shown(value)}: expected an event or a batch of events")
    items, rank, engine = value, None, None
    wrap: Any = None
    if isinstance(value, dict) and "events" in value:
        items = value["events"]
        rank = value.get("data_parallel_rank", value.get("attn_dp_rank"))
        engine = "vllm" if "data_parallel_rank" in value else None
        engine = "sglang" if "attn_dp_rank" in value else engine
        wrap = {name: value[name] for name in value if name not in ("events", "seq")}
    elif isinstance(value, dict) or isinstance(value[0], str):
        items = [value]
    elif len(value) > 1:
        items, rank = value[1], value[2] if len(value) > 2 else None
        wrap = {"ts": value[0]} if rank is None else {"ts": value[0], "data_parallel_rank": rank}
    if not isinstance(items, list):
        raise Bad("events", f"got {shown(items)}: expected a list of events")
    events = tuple(_kv_event(item, rank, source) for item in items)
    if engine is None and any(_is_vllm(event.raw) for event in events):
        engine = "vllm"
    return EventBatch(line, source, seq, True, "kv-events", engine, events, wrap)


def _is_vllm(item: Any) -> bool:
    if isinstance(item, dict):
        return any(name in item for name in VLLM_ONLY)
    return isinstance(item, list) and len(item) > 8


def _kv_event(item: Any, rank: Any, source: Any) -> BlockEvent:
    data = item
    if isinstance(item, list) and item and isinstance(item[0], str):
        names = KV_FIELDS.get(item[0], ())
        data = {"type": item[0], **dict(zip(names, item[1:], strict=False))}
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        raise Bad("type", f"got {shown(item)}: expected an event with its type")
    kind = data["type"]
    if kind not in OPS:
        return BlockEvent("other", kind, raw=item)
    rank = _hashable(data.get("data_parallel_rank", rank), "data_parallel_rank")
    worker = _hashable(data.get("worker_id"), "worker_id")
    publisher = tuple(name for name in (source, worker) if name is not None)
    where = (*publisher, rank or 0) if publisher else rank or 0
    told = _text(data, "medium")
    if kind == "AllBlocksCleared":
        everywhere = rank is None and not publisher
        where = None if everywhere else where
        return BlockEvent("cleared", kind, medium=told, rank=where, raw=item)
    group = _number(data, "group_idx")
    hashes = _hashes(data, "block_hashes")
    medium = told or DEVICE
    if kind == "BlockRemoved":
        return BlockEvent("removed", kind, hashes, medium=medium, group=group, rank=where, raw=item)
    tokens = _tokens(data, "token_ids")
    size = _number(data, "block_size", required=True)
    contents, misfit = _cut(tokens, size or 0, len(hashes))
    lora = data.get("lora_name")
    lora = data.get("lora_id") if lora is None else lora
    salt = data.get("cache_salt")
    adapter = tuple(_hashable(x, "lora_name") for x in (lora, salt) if x is not None) or None
    parent = (
        _hash(data["parent_block_hash"], "parent_block_hash")
        if (data.get("parent_block_hash") is not None)
        else None
    )
    return BlockEvent(
        "stored", kind, hashes, parent, contents, misfit, medium, group, where, adapter, item
    )


def _cut(
    tokens: tuple[Any, ...] | None, size: int, blocks: int
) -> tuple[tuple[Any, ...] | None, str | None]:
    """(tokens of each block, None), or (None, what does not fit)."""
    if not tokens and size == 0:
        return None, None  # a block that changed its tier: what it holds was told before
    told = tokens or ()
    if len(told) != blocks * size:
        return None, f"{blocks} blocks of {size} tokens are announced with {len(told)} tokens"
    return tuple(told[i * size : (i + 1) * size] for i in range(blocks)), None


# Dynamo


def _is_dynamo(value: Any) -> bool:
    event = value.get("event", value) if isinstance(value, dict) else None
    if not isinstance(event, dict) or "data" not in event:
        return False
    data = event["data"]
    return isinstance(data, str) or (isinstance(data, dict) and "type" not in data)


def _dynamo_batch(value: Any, line: int, seq: int | None, source: Any) -> EventBatch:
    if not isinstance(value, dict):
        raise Bad(None, f"got {shown(value)}: expected an object")
    worker = value.get("worker_id")
    event = value.get("event", value)
    if not isinstance(event, dict) or "data" not in event:
        raise Bad("data", f"got {shown(value)}: expected an event with data")
    rank = (worker, event.get("dp_rank") or 0)
    data = event["data"]
    if isinstance(data, str):
        data = {data: None}
    if not isinstance(data, dict):
        raise Bad("data", f"got {shown(data)}: expected an object")
    kind: str
    body: Any
    kind, body = next(iter(data.items()), ("", None))
    medium = _text(event, "storage_tier") or DEVICE
    if kind == "stored":
        blocks = _list(body, "blocks")
        hashes = tuple(_hash(_field(b, "block_hash"), f"blocks[{i}]") for i, b in enumerate(blocks))
        contents = tuple(_hashable(b.get("tokens_hash"), "tokens_hash") for b in blocks)
        parent = None if body.get("parent_hash") is None else _hash(body["parent_hash"], "parent")
        told = contents if all(c is not None for c in contents) else None
        made = BlockEvent(
            "stored", kind, hashes, parent, told, None, medium, None, rank, None, value
        )
    elif kind == "removed":
        hashes = _hashes(body, "block_hashes")
        made = BlockEvent("removed", kind, hashes, medium=medium, rank=rank, raw=value)
    elif kind == "cleared":
        made = BlockEvent("cleared", kind, rank=rank, raw=value)
    else:
        made = BlockEvent("other", str(kind), raw=value)
    number = _number(event, "event_id")
    return EventBatch(line, rank, number, False, "dynamo", "dynamo", (made,), None)


# TensorRT-LLM


def _is_trtllm(value: Any) -> bool:
    data = value.get("data") if isinstance(value, dict) else None
    return isinstance(data, dict) and "type" in data


def _trtllm_batch(value: Any, line: int, seq: int | None, source: Any) -> EventBatch:
    data = _field(value, "data")
    if not isinstance(data, dict):
        raise Bad("data", f"got {shown(data)}: expected an object")
    kind = _text(data, "type") or ""
    group = _hashable(value.get("window_size"), "window_size")
    rank = _hashable(value.get("attention_dp_rank"), "attention_dp_rank") or 0
    events: tuple[BlockEvent, ...]
    if kind == "stored":
        parent = data.get("parent_hash")
        above = None if parent is None else _hash(parent, "parent_hash")
        made = []
        for i, block in enumerate(_list(data, "blocks")):
            name = _hash(_field(block, "block_hash"), f"blocks[{i}].block_hash")
            tokens = None if block.get("tokens") is None else _list(block, "tokens")
            content = None if tokens is None else (tuple(_token(t) for t in tokens),)
            where = _level(_number(block, "cache_level"))
            adapter = (block.get("lora_id"), block.get("cache_salt"))
            told = tuple(_hashable(x, "lora_id") for x in adapter if x is not None) or None
            made.append(
                BlockEvent(
                    "stored", kind, (name,), above, content, None, where, group, rank, told, value
                )
            )
            above = name
        events = tuple(made)
    elif kind == "removed":
        hashes = _hashes(data, "block_hashes")
        events = (BlockEvent("removed", kind, hashes, group=group, rank=rank, raw=value),)
    elif kind == "updated":
        name = _hash(_field(data, "block_hash"), "block_hash")
        level = data.get("cache_level")
        to = _number(level, "new_value") if isinstance(level, dict) else None
        op = "other" if to is None else "moved"
        events = (
            BlockEvent(op, kind, (name,), medium=_level(to), group=group, rank=rank, raw=value),
        )
    elif kind == "created":
        events = ()
    else:
        events = (BlockEvent("other", str(kind), raw=value),)
    return EventBatch(
        line, rank, _number(value, "event_id"), False, "trtllm", "trtllm", events, None
    )


def _level(value: int | None) -> str:
    return f"level {value or 0}"


def _token(value: Any) -> Any:
    if isinstance(value, dict):
        extra = _hashable(value.get("token_extra_id"), "token_extra_id")
        return (_hashable(value.get("token_id"), "token_id"), extra)
    return _hashable(value, "tokens")


# Mooncake's RFC 1527


def _is_mooncake(value: Any) -> bool:
    return isinstance(value, dict) and "event_type" in value


def _mooncake_batch(value: Any, line: int, seq: int | None, source: Any) -> EventBatch:
    kind = _field(value, "event_type")
    backend = _hashable(value.get("backend_id"), "backend_id")
    rank = (backend, _hashable(value.get("dp_rank"), "dp_rank") or 0)
    medium = _text(value, "medium") or DEVICE
    name = "seq_hashes" if "seq_hashes" in value else "block_hashes"
    if kind == "stored":
        hashes = _hashes(value, name)
        above = value.get("parent_hash")
        parent = None if above is None else _hash(above, "parent_hash")
        contents: tuple[Any, ...] | None = None
        misfit = None
        if value.get("token_ids"):
            size = _number(value, "block_size", required=True) or 0
            contents, misfit = _cut(_tokens(value, "token_ids"), size, len(hashes))
        adapter = tuple(
            _hashable(value[f], f)
            for f in ("tenant_id", "lora_name", "lora_id")
            if value.get(f) is not None
        )
        made = BlockEvent(
            "stored",
            kind,
            hashes,
            parent,
            contents,
            misfit,
            medium,
            None,
            rank,
            adapter or None,
            value,
        )
    elif kind == "removed":
        hashes = _hashes(value, name)
        made = BlockEvent("removed", kind, hashes, medium=medium, rank=rank, raw=value)
    elif kind == "cleared":
        told = _text(value, "medium")
        made = BlockEvent("cleared", kind, medium=told, rank=rank, raw=value)
    else:
        made = BlockEvent("other", str(kind), raw=value)
    number = _number(value, "event_id")
    return EventBatch(line, rank[0], number, False, "mooncake", "mooncake", (made,), None)


FORMS = {
    "kv-events": Form(_is_kv, _kv_batch),
    "mooncake": Form(_is_mooncake, _mooncake_batch),
    "trtllm": Form(_is_trtllm, _trtllm_batch),
    "dynamo": Form(_is_dynamo, _dynamo_batch),
}


# Fields


def _field(data: Any, name: str) -> Any:
    if not isinstance(data, dict):
        raise Bad(None, f"got {shown(data)}: expected an object")
    if name not in data:
        raise Bad(name, "the field is missing")
    return data[name]


def _hashable(value: Any, name: str) -> Any:
    if isinstance(value, list | dict):
        raise Bad(name, f"got {shown(value)}: expected a number or text")
    return value


def _list(data: Any, name: str) -> list[Any]:
    values = _field(data, name)
    if not isinstance(values, list):
        raise Bad(name, f"got {shown(values)}: expected a list")
    return values


def _hash(value: Any, name: str) -> Hash:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise Bad(name, f"got {shown(value)}: expected a hash (an integer, bytes or text)")
    return value


def _hashes(data: Any, name: str) -> tuple[Hash, ...]:
    return tuple(_hash(value, f"{name}[{i}]") for i, value in enumerate(_list(data, name)))


def _tokens(data: Any, name: str) -> tuple[Any, ...] | None:
    values = data.get(name)
    if values is None:
        return None
    if not isinstance(values, list):
        raise Bad(name, f"got {shown(values)}: expected a list of tokens")
    made: list[Any] = []
    for i, value in enumerate(values):
        token = tuple(value) if isinstance(value, list) else value
        parts = token if isinstance(token, tuple) else (token,)
        if len(parts) not in (1, 2) or any(type(part) is not int for part in parts):
            raise Bad(f"{name}[{i}]", f"got {shown(value)}: expected a token or a pair of tokens")
        made.append(token)
    return tuple(made)


def _number(data: dict[str, Any], name: str, required: bool = False) -> int | None:
    value = _field(data, name) if required else data.get(name)
    if value is None and not required:
        return None
    if type(value) is not int or value < 0:
        raise Bad(name, f"got {shown(value)}: expected an integer of 0 or more")
    return value


def _text(data: dict[str, Any], name: str) -> str | None:
    value = data.get(name)
    if value is not None and not isinstance(value, str):
        raise Bad(name, f"got {shown(value)}: expected text")
    return value
