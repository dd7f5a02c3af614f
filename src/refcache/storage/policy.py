"""How a tree uses storage: what is worth a prefetch, and how long a request waits for it.

Read from the text that operators give (SGLang's ``hicache_storage_backend_extra_config``): JSON, or
``@`` and the name of a ``.json`` or ``.toml`` file. What is not about the tree is the backend's.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refcache.errors import InvalidArgument, UnknownName
from refcache.types import PREFETCH_STOP_POLICIES


@dataclass(frozen=True)
class StoragePolicy:
    """The tree's part of the configuration.

    Attributes:
        prefetch_threshold: tokens; fewer are not asked for, nor read.
        prefetch_timeout_base, prefetch_timeout_per_ki_token: seconds of the tree's storage clock.
        hicache_storage_pass_prefix_keys: the backend is told the keys of the pages before.
    """

    prefetch_threshold: int = 256
    prefetch_timeout_base: float = 1.0
    prefetch_timeout_per_ki_token: float = 0.25
    hicache_storage_pass_prefix_keys: bool = False

    def timeout(self, pages: int, page_size: int) -> float:
        """Seconds that a prefetch of so many pages may take.

        >>> StoragePolicy().timeout(100, 64)
        2.5625
        """
        per_page = page_size / 1024 * self.prefetch_timeout_per_ki_token
        return self.prefetch_timeout_base + pages * per_page


def parse_extra_config(text: str | None) -> tuple[StoragePolicy, dict[str, Any]]:
    """The tree's part and the backend's.

    >>> parse_extra_config('{"prefetch_threshold": 8, "max_bytes": 100}')[1]
    {'max_bytes': 100}

    Raises:
        InvalidArgument: not such a text or file, or a value of another type.
    """
    options = dict(_loaded(text)) if text else {}
    numbers, chosen = (int, float), {}
    for name, types in (
        ("prefetch_threshold", (int,)),
        ("prefetch_timeout_base", numbers),
        ("prefetch_timeout_per_ki_token", numbers),
        ("hicache_storage_pass_prefix_keys", (bool,)),
    ):
        if name not in options:
            continue
        value = options.pop(name)
        wrong = not isinstance(value, types) or (isinstance(value, bool) and types != (bool,))
        if wrong or (types != (bool,) and not 0 <= value < float("inf")):
            kind = " or ".join(one.__name__ for one in types)
            raise InvalidArgument(f"{name}={value!r}: expected {kind}, not negative")
        chosen[name] = value
    return StoragePolicy(**chosen), options


def _loaded(text: str) -> dict[str, Any]:
    try:
        if not text.startswith("@"):
            found = json.loads(text)
        elif text.endswith(".toml"):
            found = tomllib.loads(Path(text[1:]).read_text())
        elif text.endswith(".json"):
            found = json.loads(Path(text[1:]).read_text())
        else:
            raise InvalidArgument(f"{text!r}: expected JSON, or @ and a .json or .toml file")
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"storage configuration {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"storage configuration {text!r}: expected an object")
    return found


def check_stop_policy(name: str) -> str:
    """The name.

    Raises:
        UnknownName: it is no stop policy.
    """
    if name not in PREFETCH_STOP_POLICIES:
        raise UnknownName("prefetch stop policy", name, PREFETCH_STOP_POLICIES)
    return name
