"""What an argument must be, asked before anything is done with it. All raise InvalidArgument.

These look at types, shapes, dtypes and devices only: no element of a tensor is read, so a check
never waits for a device.
"""

from operator import index
from typing import Any

import torch

from refcache.errors import InvalidArgument

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Types that slots may have outside the ops: a mask of booleans holds none."""


def whole_number(what: str, value: Any, low: int = 0) -> int:
    """``value`` as an int: an integer of at least ``low``; no bool, float or text."""
    try:
        number = low - 1 if isinstance(value, bool) else index(value)
    except (TypeError, RuntimeError):
        number = low - 1
    if number < low:
        raise InvalidArgument(f"{what}={shown(value)}: expected an integer of {low} or more")
    return number


def slot_list(what: str, slots: Any, device: Any = None) -> torch.Tensor:
    """``slots``: a tensor of integers ``[n]``, on a device of that type (None: any with bytes)."""
    fits = isinstance(slots, torch.Tensor) and slots.dim() == 1 and slots.dtype in INTEGERS
    if fits and device is None:
        fits = slots.device.type != "meta"
    elif fits:
        fits = slots.device.type == torch.device(device).type
    if not fits:
        where = "" if device is None else f" on {device}"
        raise InvalidArgument(f"{what}: {shown(slots)}; expected integers [n]{where}")
    return slots  # type: ignore[no-any-return]


def shown(value: Any) -> str:
    """An argument that does not fit, in few words."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
