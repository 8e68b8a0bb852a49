"""uvicorn inside someone else's event loop: it serves an application and leaves signals alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from eyas.worker.http_protocol import Connections, HttpLimits
from eyas.worker.ports import listen

GRACE_S = 3  # how long the last bytes of answers may take to leave after `aclose`


class HttpServer:
    """Serves `app` from `start` to `aclose`. Binds at once: raises ConfigError if the address is no good."""

    def __init__(self, app: ASGIApp, host: str, port: int, limits: HttpLimits) -> None:
        self._listener = listen(host, port, "port")
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Connections(limits).protocol,  # type: ignore[arg-type]  # all that is asked of a class
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
        return int(self._listener.getsockname()[1])

    async def start(self) -> None:
        """From here on requests are accepted (the socket has been listening since it was made)."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")

    async def aclose(self) -> None:
        """Accepts nothing more, gives what is still being written GRACE_S, then cancels it."""
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process: uvicorn's handlers would end it before its other servers."""
        yield
