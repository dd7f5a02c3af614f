"""KV events as data: the same three kinds that engines publish."""

from typing import Any

from msgspec import Struct, convert


class BlockStored(Struct, tag="BlockStored", tag_field="type", omit_defaults=True, kw_only=True):
    """Pages became resident on ``medium`` (None: the device)."""

    block_hashes: list[int]
    parent_block_hash: int | None = None
    token_ids: list[int | tuple[int, int]] = []
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


class BlockRemoved(Struct, tag="BlockRemoved", tag_field="type", omit_defaults=True, kw_only=True):
    """Pages left ``medium``."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(Struct, tag="AllBlocksCleared", tag_field="type", omit_defaults=True):
    """Nothing is resident on any tier."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared

KINDS: dict[str, Any] = {k.__name__: k for k in (BlockStored, BlockRemoved, AllBlocksCleared)}


def event_of(event: Any) -> KVEvent:
    """An engine's event object as one of these kinds, by its class name and fields."""
    name = type(event).__name__
    fields = {k: getattr(event, k) for k in KINDS[name].__struct_fields__ if hasattr(event, k)}
    made: KVEvent = convert({"type": name, **fields}, KVEvent)
    return made
