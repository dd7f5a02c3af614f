"""What an argument must be, asked before anything is done with it. All raise InvalidArgument.

Of a tensor on a device only type, shape, dtype and device are looked at, so a check never waits.
"""

from operator import index
from typing import Any

import torch

from refcache.errors import InvalidArgument, InvalidSlot

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Types that slots may have outside the ops: a mask of booleans holds none."""


def whole_number(what: str, value: Any, low: int | None = 0) -> int:
    """``value`` as an int: an integer of at least ``low``, if that is given; no bool, no text."""
    if type(value) is int and (low is None or value >= low):
        return value
    try:
        number = None if isinstance(value, bool | torch.Tensor) else index(value)
    except TypeError:
        number = None
    if number is None or (low is not None and number < low):
        least = "" if low is None else f" of {low} or more"
        raise InvalidArgument(f"{what}={shown(value)}: expected an integer{least}")
    return number


def truth(what: str, value: Any) -> bool:
    """``value``: True or False."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"{what}={shown(value)}: expected True or False")
    return value


def is_tensor_on(value: Any, device: Any = None) -> bool:
    """Whether it is a tensor on a device of that type (None: any with bytes)."""
    if not isinstance(value, torch.Tensor):
        return False
    if device is None:
        return value.device.type != "meta"
    return value.device.type == torch.device(device).type


def slot_list(what: str, slots: Any, device: Any = None) -> torch.Tensor:
    """``slots``: a tensor of integers ``[n]``, on a device of that type (None: any with bytes)."""
    fits = is_tensor_on(slots, device) and slots.dim() == 1 and slots.dtype in INTEGERS
    if not fits:
        where = "" if device is None else f" on {device}"
        raise InvalidArgument(f"{what}: {shown(slots)}; expected integers [n]{where}")
    return slots  # type: ignore[no-any-return]


def slots_inside(what: str, slots: torch.Tensor, low: int, end: int) -> None:
    """Raise InvalidSlot unless slots on the CPU are ``low`` to ``end - 1``."""
    if slots.device.type == "cpu" and len(slots):
        first, last = (int(bound) for bound in slots.aminmax())
        if first < low or last >= end:
            raise InvalidSlot(f"{what} {first} to {last}: expected {low} to {end - 1}")


def with_attributes(what: str, value: Any, *names: str) -> None:
    """``value`` has all of these attributes."""
    for name in names:
        if not hasattr(value, name):
            raise InvalidArgument(f"{what}: {shown(value)}; expected one with {name!r}")


def shown(value: Any) -> str:
    """An argument that does not fit, in few words."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
