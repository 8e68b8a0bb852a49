"""`FetchResponse`, encoded and decoded by hand: protobuf would copy every byte twice more at each end.

The bytes are those of the message in protos/transfer.proto; any gRPC client can read them.
"""

from __future__ import annotations

from eyas.common.errors import TransferFailed

_TAG = b"\x0a"  # field 1, length-delimited


def encode(data: bytes) -> bytes:
    """FetchResponse(data=data), serialized. `data` is not empty."""
    size, length = len(data), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return b"".join((_TAG, length, data))


def decode(message: bytes) -> memoryview:
    """The data of a serialized FetchResponse, not copied. Raises TransferFailed for any other message."""
    size, at, more = 0, 1, message[:1] == _TAG
    while more and at < min(len(message), 6):
        byte = message[at]
        size |= (byte & 0x7F) << 7 * (at - 1)
        at, more = at + 1, byte > 0x7F
    if more or at + size != len(message):
        raise TransferFailed("the owner of the pages sent something that is no chunk of them")
    return memoryview(message)[at:]
