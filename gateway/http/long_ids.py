"""Parses a long list of token ids in a JSON body into an array of C integers, separately from the rest.

A JSON parser makes 60,000 objects of a prompt of 60,000 ids, and each later pass over them costs as much
again. Only a plain list of ids is parsed this way; any other body is left to the parser of whole bodies.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from eyas.common.params import INT32_MAX
from eyas.common.types import PromptIds

LONG_BYTES = 8192
"""The least bytes of a long list: a shorter one is parsed faster with the rest of its body."""
STAND_IN = b"[0]"
_ID_LIST = b"0123456789, \t\n\r"
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.Encoder().encode


def split(body: bytes, field: str) -> tuple[bytes, array[int]] | None:
    """The body with `STAND_IN` as its `field`, and the ids of that field, each an int32 that is not negative.

    None unless the body is a JSON object whose field is a flat list of such ids, of `LONG_BYTES` at least.
    """
    if len(body) < LONG_BYTES:
        return None
    try:
        members = _members.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # brackets may be deep
        return None
    written = bytes(members.get(field, b""))
    if len(written) < LONG_BYTES or (ids := _ids(written)) is None:
        return None
    members[field] = msgspec.Raw(STAND_IN)
    return _encode(members), ids


def settled(ids: Sequence[int]) -> PromptIds:
    """The ids of a body in the immutable form of a request."""
    return ids if isinstance(ids, array) else tuple(ids)


def all_below(ids: PromptIds, end: int) -> bool:
    """Whether each of the ids, at least one, is in 0 .. `end` - 1."""
    if isinstance(ids, array):
        values = np.frombuffer(ids, np.intc)
        return bool(values.min() >= 0 and values.max() < end)
    return min(ids) >= 0 and max(ids) < end


def _ids(written: bytes) -> array[int] | None:
    """Parses a JSON list that has only digits and separators between its brackets; None for anything else."""
    inner = written[1:-1]
    if written[:1] != b"[" or inner.translate(None, _ID_LIST) or not inner.strip():
        return None
    values = np.fromstring(inner, np.int64, sep=",")  # numbers that are too large become the largest
    if values.max() > INT32_MAX:
        return None
    ids = array("i")
    ids.frombytes(values.astype(np.intc).tobytes())
    return ids
