"""Runs uvicorn as a task of an existing event loop, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from eyas.common.cluster.listening import listen
from eyas.common.security.tls import TlsListener
from gateway.http.protocol import HttpLimits, OpenConnections

GRACE_S = 3  # seconds for open answers to be written after `aclose`


class HttpServer:
    """Serves `app` from `start` to `aclose`. The constructor binds the socket; ConfigError for an unusable
    address.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: HttpLimits,
        shared: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`shared`: other processes may listen on the port too. `tls` None: plain HTTP."""
        self._listener = listen(host, port, "port", shared)
        self._tls = None if tls is None else TlsListener(self._listener, tls, limits.connections)
        self._server = _HttpServer(
            uvicorn.Config(
                app,
                http=OpenConnections(limits).protocol,  # type: ignore[arg-type]  # uvicorn only calls it
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                log_level="warning",
                timeout_graceful_shutdown=GRACE_S,
            )
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._listener.getsockname()[1])

    async def start(self) -> None:
        """Accepts requests from now on (the socket has listened since the construction)."""
        plain = [self._listener] if self._tls is None else []
        self._serving = asyncio.create_task(self._server.serve(sockets=plain), name="http")
        self._accepting: list[asyncio.Task[None]] = []
        if self._tls is not None:
            self._accepting = [asyncio.create_task(self._tls.accept(self._server.protocol), name="https")]

    async def aclose(self) -> None:
        """Stops accepting, waits GRACE_S for open answers to be written, then cancels them."""
        self._server.should_exit = True
        for accepting in self._accepting:
            accepting.cancel()
        if self._accepting:
            await asyncio.wait(self._accepting)
            self._listener.close()  # uvicorn closes it only if it accepts itself
        await self._serving


class _HttpServer(uvicorn.Server):
    def protocol(self) -> asyncio.Protocol:
        """Makes the protocol of a new connection, as uvicorn does."""
        make: Any = self.config.http_protocol_class
        return cast(
            asyncio.Protocol,
            make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state),
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no handlers: those of uvicorn would end the process before its other servers are
        closed.
        """
        yield
