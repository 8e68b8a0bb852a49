"""Sockets in the file system by which processes of one user of one host meet."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from eyas.common.errors import ConfigError

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def listen_at(path: Path, waiting: int) -> socket.socket:
    """A listener at `path`, a new file in a folder that other users cannot enter.

    `waiting`: connections that may wait to be accepted. Raises ConfigError if it cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"the socket {path} cannot be made: {error.strerror or error}") from None
    os.chmod(path, 0o600)
    listener.listen(waiting)
    return listener


def is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1]) == os.geteuid()
