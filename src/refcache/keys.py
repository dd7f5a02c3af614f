"""Radix keys and page hashes: what identifies a piece of KV cache.

The KV of a token depends on every token before it and on the *namespace* (``extra_key``: which
LoRA adapter, which tenant's salt). A :class:`RadixKey` is therefore a token sequence in a
namespace. EAGLE speculative decoding caches under *bigrams*, element i being the pair
``(token[i], token[i + 1])``; such a key has one element less than it has tokens.

A *page hash* names a page and its whole prefix: ``H(hash of the page before, tokens of the page)``.
Chains start at the root of the namespace and never restart, so a split of a tree node leaves them
as they were. Hashes are hex text, made by :func:`get_hash_str`, in SGLang's encoding; that the
namespace enters the chain is refcache's rule (SGLang 0.5.10 leaves it out, so two tenants share the
keys of the lower tiers).
"""

import hashlib
import sys
from array import array
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any, overload

from refcache.errors import InvalidArgument

TOKEN = "I"  # array typecode: unsigned 32-bit, the range of a token id
MAX_TOKEN = 2**32 - 1


def token_array(token_ids: Sequence[int]) -> "array[int]":
    """``token_ids`` as ``array('I')``; the same object when it is one already.

    Raises:
        InvalidArgument: an element is not an integer of 0 to 2**32 - 1.
    """
    if isinstance(token_ids, array) and token_ids.typecode == TOKEN:
        return token_ids
    try:
        return array(TOKEN, token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidArgument(f"token_ids: {error}; expected integers of 0 to 2**32 - 1") from None


def _tokens_of_bigrams(pairs: Sequence[tuple[int, int]]) -> "array[int]":
    if any(a[1] != b[0] for a, b in pairwise(pairs)):
        raise InvalidArgument("bigram key: each pair must start with the second token of the last")
    return token_array([pairs[0][0], *(pair[1] for pair in pairs)])


class RadixKey:
    """An immutable token sequence in a namespace; with ``is_bigram``, its pairs of neighbours.

    ``len`` and slices count elements: tokens, or pairs. Two keys are equal when elements,
    namespace and kind are.

    >>> key = RadixKey([1, 2, 3, 4, 5], extra_key="lora-7")
    >>> len(key), list(key[1:3]), key[1:3].extra_key
    (5, [2, 3], 'lora-7')
    >>> key.match(RadixKey([1, 2, 3, 9], extra_key="lora-7"), page_size=2)
    2
    >>> key.match(RadixKey([1, 2, 3, 9]))  # another namespace shares nothing
    0
    >>> list(RadixKey([1, 2, 3], is_bigram=True))
    [(1, 2), (2, 3)]
    """

    __slots__ = ("_tokens", "extra_key", "is_bigram")

    def __init__(
        self,
        token_ids: Sequence[int] | Sequence[tuple[int, int]],
        extra_key: str | None = None,
        is_bigram: bool = False,
    ) -> None:
        """``token_ids``: the tokens; for a bigram key also accepted as a list of pairs."""
        if is_bigram and len(token_ids) and isinstance(token_ids[0], tuple):
            self._tokens = _tokens_of_bigrams(token_ids)  # type: ignore[arg-type]
        else:
            self._tokens = token_array(token_ids)  # type: ignore[arg-type]
        if extra_key is not None and not isinstance(extra_key, str):
            raise InvalidArgument(f"{extra_key=}: expected text or None")
        self.extra_key = extra_key
        self.is_bigram = is_bigram

    @property
    def token_ids(self) -> list[Any]:
        """The elements, as a new list: tokens, or pairs."""
        return list(self)

    def raw_token_ids(self) -> "array[int]":
        """The tokens under the key (one more than ``len`` for a bigram key). Do not modify."""
        return self._tokens

    def __len__(self) -> int:
        return max(0, len(self._tokens) - self.is_bigram)

    def __iter__(self) -> Iterator[Any]:
        if self.is_bigram:
            return zip(self._tokens, self._tokens[1:], strict=False)
        return iter(self._tokens)

    @overload
    def __getitem__(self, index: int) -> "RadixKey": ...
    @overload
    def __getitem__(self, index: slice) -> "RadixKey": ...
    def __getitem__(self, index: int | slice) -> "RadixKey":
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"element {index} of a key of {len(self)}")
            index = slice(index, index + 1 or None)
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise InvalidArgument(f"RadixKey slice with step {step}: expected 1")
        end = stop + self.is_bigram if stop > start else start
        return RadixKey(self._tokens[start:end], self.extra_key, self.is_bigram)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RadixKey)
            and self.extra_key == other.extra_key
            and self.is_bigram == other.is_bigram
            and len(self) == len(other)
            and (len(self) == 0 or self._tokens == other._tokens)
        )

    def __hash__(self) -> int:
        return hash((self.extra_key, self.is_bigram, self._tokens.tobytes() if len(self) else b""))

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self._tokens[:10])) + (", ..." if len(self._tokens) > 10 else "")
        kind = ", is_bigram=True" if self.is_bigram else ""
        return f"RadixKey([{shown}], extra_key={self.extra_key!r}{kind})"

    def page_aligned(self, page_size: int) -> "RadixKey":
        """The longest prefix in whole pages."""
        return self[: len(self) // page_size * page_size]

    def child_key(self, page_size: int) -> Hashable:
        """The first page with its namespace: what a tree node files a child under.

        >>> RadixKey([1, 2, 3]).child_key(1), RadixKey([1, 2, 3]).child_key(2)
        (1, (1, 2))
        >>> RadixKey([1, 2, 3], "lora-7").child_key(2)
        ('lora-7', (1, 2))
        """
        page = tuple(self[:page_size]) if self.is_bigram else tuple(self._tokens[:page_size])
        plain = page[0] if page_size == 1 else page
        return plain if self.extra_key is None else (self.extra_key, plain)

    def match(self, other: "RadixKey", page_size: int = 1) -> int:
        """Elements in the longest common prefix, in whole pages; 0 across namespaces or kinds."""
        if self.extra_key != other.extra_key or self.is_bigram != other.is_bigram:
            return 0
        common = _common_prefix(self._tokens, other._tokens) - self.is_bigram
        return max(0, common) // page_size * page_size


def _common_prefix(a: "array[int]", b: "array[int]") -> int:
    """Length of the common prefix, by comparing slices (memory speed) and halving."""
    low, high = 0, min(len(a), len(b)) + 1  # a[:low] == b[:low]; not so at high
    if a[: high - 1] == b[: high - 1]:
        return high - 1
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def compose_extra_key(lora_id: str | None = None, salt: str | None = None) -> str | None:
    """One namespace from several parts; different parts never give the same namespace.

    Joining bare strings is a public bug of several engines: adapter "x" without a salt and no
    adapter with salt "x" collided.

    >>> compose_extra_key(lora_id="x") == compose_extra_key(salt="x")
    False
    >>> compose_extra_key() is None
    True
    """
    parts = [("lora", lora_id), ("salt", salt)]
    named = [f"{name}={len(value)}:{value}" for name, value in parts if value is not None]
    return ";".join(named) if named else None


def namespace_seed(extra_key: str | None) -> bytes:
    """What a namespace's hash chain starts from: empty without one, else a digest of its name."""
    if extra_key is None:
        return b""
    return hashlib.sha256(b"refcache namespace\0" + extra_key.encode()).digest()


def get_hash_str(
    token_ids: Sequence[int] | Sequence[tuple[int, int]], prior_hash: str | None = None
) -> str:
    """SHA-256 in hex of ``prior_hash`` (if any), then 4 bytes a token, little-endian.

    A pair is its two tokens, one after the other.

    Raises:
        InvalidArgument: a token that is not an integer of 0 to 2**32 - 1.
    """
    if len(token_ids) and isinstance(token_ids[0], tuple):
        token_ids = [token for pair in token_ids for token in pair]  # type: ignore[union-attr]
    words = token_array(token_ids)  # type: ignore[arg-type]
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return hashlib.sha256(bytes.fromhex(prior_hash or "") + words.tobytes()).hexdigest()


def page_hashes(key: RadixKey, page_size: int, prior: str | None = None) -> list[str]:
    """Hash of each whole page of ``key``, chained; the tail that fills no page has none.

    ``prior`` is the hash of the page before the key; ``None`` means the key starts its namespace.

    >>> key = RadixKey([1, 2, 3, 4, 5, 6])
    >>> whole = page_hashes(key, 2)
    >>> whole[1:] == page_hashes(key[2:], 2, prior=whole[0])
    True
    >>> whole[0] == page_hashes(RadixKey([1, 2], extra_key="a"), 2)[0]
    False
    """
    chained = namespace_seed(key.extra_key).hex() if prior is None else prior
    hashes = []
    for start in range(0, len(key) // page_size * page_size, page_size):
        page = key[start : start + page_size]
        chained = get_hash_str(page.token_ids if key.is_bigram else page.raw_token_ids(), chained)
        hashes.append(chained)
    return hashes


def hash_str_to_int64(hash_str: str) -> int:
    """The signed 64-bit block id that KV events carry: the first 16 hex digits of a page hash."""
    return int.from_bytes(bytes.fromhex(hash_str[:16]), "big", signed=True)
