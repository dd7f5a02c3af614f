"""Which releases there are, what each is held to, and where they are unpacked.

A release is a published wheel, unpacked into a folder of its own (``make peers`` does so) below
``.peers``, or below the folder that the variable ``REFCACHE_PEERS`` names.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from refcache.errors import MissingExtra

VERSIONS = ("0.5.10", "0.5.12", "0.5.23")
"""The releases that the adapters are written for."""
VARIANTS = {
    "": frozenset[str](),
    "events": frozenset({"events"}),
    "exact": frozenset({"exact"}),
    "overlap": frozenset({"fences"}),
    "loads": frozenset({"load_slots"}),
    "kernels": frozenset[str](),
    "rust": frozenset[str](),
}
"""What ``sglang:VERSION+VARIANT`` is held to beyond the plain target: its KV events tell what is
cached; it makes the choices of profile sglang-0.5.10 (0.5.10 itself does); streams alone order its
copies against forwards; a fourth load waits for the first. ``kernels``: 0.5.23's paged allocator
with its Triton kernels, instead of the plain functions it has for a CPU (earlier releases always
use their kernels). ``rust``: 0.5.23's tree with its Rust core, compared call by call with the
Python core that the plain target has."""


def root() -> Path:
    """Where releases are unpacked: one folder a version."""
    return Path(os.environ.get("REFCACHE_PEERS", ".peers"))


def folder(version: str) -> Path:
    """Where one release is unpacked."""
    return root() / version


def unpacked() -> list[str]:
    """The releases that are there, oldest first."""
    return [version for version in VERSIONS if (folder(version) / "sglang").is_dir()]


def refuse_unless_installed(version: str) -> None:
    """Refuse a release that cannot be imported here.

    Raises:
        MissingExtra: it is not unpacked, or what its kernels need is not installed.
    """
    if version not in unpacked():
        raise MissingExtra(f"sglang {version} is not unpacked in {root()}: run `make peers`")
    missing = [name for name in ("numpy", "triton") if find_spec(name) is None]
    if missing:
        raise MissingExtra(f"sglang {version} needs {' and '.join(missing)}, not installed here")
