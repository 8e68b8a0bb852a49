"""The opening of an HTTP/2 connection, until the SETTINGS are acknowledged in the caller's place.

Bytes in, bytes out: no sockets.
"""

from __future__ import annotations

PREFACE_BYTES = 24
HEAD_BYTES = 9  # of a frame: length (3), type, flags, stream (4)
SETTINGS, ACK = 4, 1
ACKNOWLEDGED = bytes((0, 0, 0, SETTINGS, ACK, 0, 0, 0, 0))
MAX_BYTES = 1 << 20  # a caller acknowledges as soon as it has read a server's first bytes
MAX_FRAMES = 1 << 13  # a look at each takes some microseconds


class SettingsOpening:
    """The server's SETTINGS are acknowledged right behind the caller's own; the caller's acknowledgement,
    which comes later, is kept back.
    """

    def __init__(self) -> None:
        self.over = False  # what comes now needs no look
        self._rest = PREFACE_BYTES  # of what has begun to pass
        self._behind = b""  # passes once that has
        self._head = b""  # the part of a frame's head that has come
        self._frames = 0
        self._bytes = 0

    def passes(self, data: bytes) -> bytes:
        """What the server gets for these bytes.

        Raises ValueError if `MAX_BYTES` or `MAX_FRAMES` came without an acknowledgement.
        """
        self._bytes += len(data)
        data, passed, at = self._head + data, bytearray(), 0
        self._head = b""
        while at < len(data) and not self.over:
            if self._rest:
                part = data[at : at + self._rest]
                passed += part
                at += len(part)
                self._rest -= len(part)
            elif len(data) - at < HEAD_BYTES:
                self._head = data[at:]
                at = len(data)
            else:
                head = data[at : at + HEAD_BYTES]
                at += HEAD_BYTES
                passed += self._begin(head)
            if not self._rest:
                passed += self._behind
                self._behind = b""
        if not self.over and self._bytes > MAX_BYTES:
            raise ValueError(f"{MAX_BYTES} bytes came, and no acknowledgement of SETTINGS")
        return bytes(passed + data[at:])

    def _begin(self, head: bytes) -> bytes:
        """A frame begins. Gives what passes of its head."""
        self._frames += 1
        if self._frames > MAX_FRAMES:
            raise ValueError(f"{MAX_FRAMES} frames came, and no acknowledgement of SETTINGS")
        length, settings, acknowledges = int.from_bytes(head[:3]), head[3] == SETTINGS, bool(head[4] & ACK)
        if self._frames == 1:
            if settings and not acknowledges:
                self._behind = ACKNOWLEDGED
            else:
                self.over = True  # a server refuses any other beginning
        elif settings and acknowledges and not length:
            self.over = True
            return b""
        self._rest = length
        return head
