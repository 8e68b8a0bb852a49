"""Connections of callers who speak TLS, until the end of the handshake, bounded in time and number.

A connection that is still shaking hands belongs to no request: when there are too many, the oldest one goes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from eyas.common.logging import RateLimitedLogger

HANDSHAKE_S = 10.0
PAUSE_S = 0.2  # when no connection can be accepted, because too many files are open
_log = logging.getLogger("eyas.gateway")

Protocol = Callable[[], asyncio.Protocol]
"""Makes the protocol of a connection whose handshake has ended."""


class TlsDoor:
    """Accepts connections from a listening socket, which stays its owner's. `limit`: of open handshakes."""

    def __init__(self, listener: socket.socket, context: ssl.SSLContext, limit: int) -> None:
        self._listener = listener
        self._context = context
        self._limit = limit
        self._open: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._alarm = RateLimitedLogger(_log)

    async def accept(self, protocol: Protocol) -> None:
        """Accepts connections until it is cancelled; then open handshakes end too."""
        loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    self._alarm.warning("no connection can be accepted: %s", error)
                    await asyncio.sleep(PAUSE_S)
                    continue
                self._begin(loop.create_task(self._shake(connection, protocol), name="tls handshake"))
        finally:
            for handshake in self._open:
                handshake.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    def _begin(self, handshake: asyncio.Task[None]) -> None:
        if len(self._open) >= self._limit:
            self._alarm.warning("%d TLS handshakes are open: new ones replace old ones", len(self._open))
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[handshake] = None
        handshake.add_done_callback(lambda done: self._open.pop(done, None))

    async def _shake(self, connection: socket.socket, protocol: Protocol) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # no TLS, no common version, a client that leaves or is late
            _log.debug("a TLS handshake failed: %s", error)
            connection.close()
        except BaseException:
            connection.close()
            raise
