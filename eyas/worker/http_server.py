"""uvicorn inside an event loop that is not its own: it serves an application and leaves signals alone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from eyas.worker.http_protocol import Connections, HttpLimits
from eyas.worker.ports import listen

GRACE_S = 3  # after `aclose`, the last bytes of answers have this long to leave


class HttpServer:
    """Serves `app` from `start` to `aclose`. Binds at once. Raises ConfigError for an unusable address."""

    def __init__(self, app: ASGIApp, host: str, port: int, limits: HttpLimits, shared: bool = False) -> None:
        """`shared`: other processes may listen there too."""
        self._listener = listen(host, port, "port", shared)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Connections(limits).protocol,  # type: ignore[arg-type]  # uvicorn only calls it
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
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")

    async def aclose(self) -> None:
        """Accepts nothing more, gives open answers GRACE_S to be written, then cancels them."""
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process: uvicorn's handlers would end it before its other servers."""
        yield
