"""Torch's settings of the process, which a call on a cache must leave alone."""

from typing import NamedTuple

import torch


class TorchSettings(NamedTuple):
    """What :func:`torch_settings` sees. ``deterministic``: torch's debug mode, 0, 1 or 2."""

    dtype: torch.dtype
    device: torch.device
    grad: bool
    deterministic: int


NAMES = ("default dtype", "default device", "grad mode", "deterministic debug mode")


def torch_settings() -> TorchSettings:
    """As they are now. An empty tensor tells dtype and device ten times faster than torch does."""
    probe = torch.empty(0)
    return TorchSettings(
        probe.dtype,
        probe.device,
        torch.is_grad_enabled(),
        torch.get_deterministic_debug_mode(),
    )


def put_back(before: TorchSettings) -> str:
    """Set what is not as ``before``; says what that was, or nothing.

    A default device that was the CPU is set to none, which means the same.
    """
    now = torch_settings()
    if now == before:
        return ""
    torch.set_default_dtype(before.dtype)
    if now.device != before.device:
        torch.set_default_device(None if before.device.type == "cpu" else before.device)
    torch.set_grad_enabled(before.grad)
    torch.set_deterministic_debug_mode(before.deterministic)
    changes = zip(NAMES, before, now, strict=True)
    return ", ".join(f"{name} from {old} to {new}" for name, old, new in changes if old != new)
