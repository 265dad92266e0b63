"""Radix keys: token ids packed once as little-endian int32, shared by slices as (buffer, offset, length).

Comparing two keys is a byte comparison at an offset, so a match costs what it compares and allocates nothing per node.
A bigram key (EAGLE) packs two ids per position; everything else is the same.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_INT_BYTES = 4
_CHUNK = 2048  # ids packed at a time: few enough for the argument stack, and the format is cached
_PREVIEW_IDS = 10
ChildKey = Any  # bytes of the first page, wrapped in a tuple when extra_key or dp_rank are present


def _pack(token_ids: Iterable[int]) -> bytes:
    """Raises OverflowError for an id outside int32 and TypeError for one that is no integer."""
    ids = token_ids if isinstance(token_ids, (list, tuple)) else list(token_ids)
    try:
        if len(ids) <= _CHUNK:
            return struct.pack(f"<{len(ids)}i", *ids)
        chunks = (ids[at : at + _CHUNK] for at in range(0, len(ids), _CHUNK))
        return b"".join(struct.pack(f"<{len(chunk)}i", *chunk) for chunk in chunks)
    except struct.error:
        array("i", ids)  # says what is wrong with which type of error
        raise


def _pack_array(token_ids: npt.NDArray[Any]) -> bytes:
    """As :func:`_pack` for an array; ids wider than int32 are checked, never wrapped."""
    if token_ids.dtype.itemsize > _INT_BYTES or token_ids.dtype == np.uint32 or token_ids.dtype == object:
        wrong = (token_ids < np.iinfo(np.int32).min) | (token_ids > np.iinfo(np.int32).max)
        if wrong.any():
            raise OverflowError(f"token id {token_ids[wrong][0]} does not fit int32")
    return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()


class TokenBuffer:
    """Growing packed token ids of one request: packed once, extended by the generated tokens only.

    Slices handed out by :meth:`key` read the same bytes, so the buffer only ever grows; it never rewrites what a key may see.
    """

    __slots__ = ("_data", "length")

    def __init__(self, token_ids: Sequence[int] | npt.NDArray[np.int32] = ()) -> None:
        self._data = bytearray()
        self.length = 0
        self.extend(token_ids)

    def __len__(self) -> int:
        return self.length

    def extend(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Append ids. Raises OverflowError for an id outside int32."""
        if isinstance(token_ids, np.ndarray):
            self._data += _pack_array(token_ids)
        else:
            self._data += _pack(token_ids)
        self.length = len(self._data) // _INT_BYTES

    def key(self, length: int, extra_key: str | None = None, dp_rank: int | None = None) -> RadixKey:
        """Key over the first ``length`` ids, without a copy. Raises ValueError when fewer ids are present."""
        if length > self.length:
            raise ValueError(f"key length {length} exceeds the {self.length} packed token ids")
        return RadixKey._view(self._data, 0, length, _INT_BYTES, extra_key, dp_rank)


class RadixKey:
    """Token ids plus the namespaces (``extra_key``, ``dp_rank``) in which they may be shared.

    ``len``, iteration (ids), slicing and int-index (both a RadixKey of the same namespace) behave as on a list.
    Slices share the buffer; :meth:`compact` copies it, for nodes that outlive the request (D81). ``length`` is ``len`` without
    a call.
    """

    __slots__ = ("_buf", "_off", "_width", "dp_rank", "extra_key", "length")

    def __init__(
        self,
        token_ids: Sequence[Any] | npt.NDArray[np.int32],
        extra_key: str | None = None,
        dp_rank: int | None = None,
    ) -> None:
        self.extra_key = extra_key
        self.dp_rank = dp_rank
        self._off = 0
        self.length = len(token_ids)
        self._width = _INT_BYTES
        self._buf: bytes | bytearray
        if isinstance(token_ids, np.ndarray):
            self._buf = _pack_array(token_ids)
        elif self.length and isinstance(token_ids[0], tuple):
            self._width = _INT_BYTES * len(token_ids[0])
            self._buf = _pack(i for gram in token_ids for i in gram)
        else:
            self._buf = _pack(token_ids)

    @classmethod
    def _view(
        cls,
        buf: bytes | bytearray,
        off: int,
        length: int,
        width: int,
        extra_key: str | None,
        dp_rank: int | None,
    ) -> RadixKey:
        key = cls.__new__(cls)
        key._buf, key._off, key.length, key._width = buf, off, length, width
        key.extra_key, key.dp_rank = extra_key, dp_rank
        return key

    def __len__(self) -> int:
        return self.length

    def _bytes(self, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of ``length`` ids from ``start`` on; no copy for the whole of a compact key."""
        low = self._off + start * self._width
        high = low + (self.length - start if length is None else length) * self._width
        buf = self._buf
        return buf[low:high] if type(buf) is bytes else bytes(memoryview(buf)[low:high])

    @property
    def token_ids(self) -> list[Any]:
        """The ids as a fresh list (tuples for a bigram key)."""
        ids: list[Any] = np.frombuffer(self._bytes(), dtype="<i4").tolist()
        grams = self._width // _INT_BYTES
        if grams == 1:
            return ids
        return [tuple(ids[i : i + grams]) for i in range(0, len(ids), grams)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.token_ids)

    def __getitem__(self, idx: int | slice) -> RadixKey:
        if isinstance(idx, slice):
            start, stop, step = idx.indices(self.length)
            if step != 1:
                return RadixKey(self.token_ids[idx], self.extra_key, self.dp_rank)
            length = max(0, stop - start)
        else:
            start = idx + self.length if idx < 0 else idx
            if not 0 <= start < self.length:
                raise IndexError(f"RadixKey index {idx} out of range for length {self.length}")
            length = 1
        off = self._off + start * self._width
        return self._view(self._buf, off, length, self._width, self.extra_key, self.dp_rank)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return (
            (self.extra_key, self.dp_rank, self.length) == (other.extra_key, other.dp_rank, other.length)
            and (self._width == other._width or self.length == 0)
            and self._bytes() == other._bytes()
        )

    def __hash__(self) -> int:
        return hash((self.extra_key, self.dp_rank, self._bytes()))

    def compact(self) -> RadixKey:
        """A key with its own bytes and nothing else, safe to keep after the request is gone."""
        return self.part(0, self.length)

    def part(self, start: int, stop: int) -> RadixKey:
        """``self[start:stop].compact()`` for ``0 <= start <= stop <= length``, in one step."""
        length = stop - start
        return self._view(self._bytes(start, length), 0, length, self._width, self.extra_key, self.dp_rank)

    @property
    def packed(self) -> bytes:
        """The ids as little-endian int32 bytes; no copy on a compact key."""
        return self._bytes()

    def page_bytes(self, page_size: int) -> bytes:
        """Bytes of the first ``page_size`` ids (fewer when the key is shorter)."""
        return self._bytes(0, min(page_size, self.length))

    def match_len(self, other: RadixKey) -> int:
        """Length of the common prefix in tokens, ignoring namespaces. O(tokens compared)."""
        width = self._width
        if width != other._width:
            return 0
        limit = min(self.length, other.length) * width
        if limit == 0:
            return 0
        mine = memoryview(self._buf)[self._off : self._off + limit]
        theirs = memoryview(other._buf)[other._off : other._off + limit]
        if mine == theirs:
            return limit // width
        diff = np.frombuffer(mine, np.int32) != np.frombuffer(theirs, np.int32)
        return int(diff.argmax()) * _INT_BYTES // width

    def startswith(self, prefix: RadixKey, start: int = 0) -> bool:
        """True when ``prefix`` (same width, or empty) stands at ``start``, namespaces aside; one memcmp."""
        if prefix.length == 0:
            return True
        if start + prefix.length > self.length or prefix._width != self._width:
            return False
        if prefix._off == 0 and len(prefix._buf) == prefix.length * prefix._width:
            return self._buf.startswith(prefix._buf, self._off + start * self._width)
        return self[start:].match_len(prefix) == prefix.length

    def __repr__(self) -> str:
        preview = self[:_PREVIEW_IDS].token_ids
        more = ", ..." if self.length > _PREVIEW_IDS else ""
        body = ", ".join(str(i) for i in preview)
        return f"RadixKey(extra_key={self.extra_key!r}, dp_rank={self.dp_rank!r}, token_ids=[{body}{more}])"


def get_child_key(key: RadixKey, page_size: int = 1) -> Any:
    """Dictionary key of a child: its first token or first-page tuple, wrapped with the namespaces that are present.

    ``k``, ``(extra_key, k)``, ``(dp_rank, k)`` or ``((extra_key, dp_rank), k)``.
    """
    first: Any = key[:page_size].token_ids
    first = first[0] if page_size == 1 else tuple(first)
    if key.extra_key is not None and key.dp_rank is not None:
        return ((key.extra_key, key.dp_rank), first)
    if key.extra_key is not None:
        return (key.extra_key, first)
    if key.dp_rank is not None:
        return (key.dp_rank, first)
    return first


def packed_child_key(key: RadixKey, page_size: int, start: int = 0) -> ChildKey:
    """As :func:`get_child_key` of ``key[start:]`` with the page's bytes in place of the tuple: one slice, no int per token."""
    first = key._bytes(start, min(page_size, key.length - start))
    if key.extra_key is None and key.dp_rank is None:
        return first
    return (key.extra_key, key.dp_rank, first)
