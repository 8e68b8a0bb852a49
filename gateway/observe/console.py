"""The console: a page for people, its files, and the requests that it draws.

The page reads the same routes as any other client.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import PurePosixPath

from starlette.requests import Request
from starlette.responses import Response

from eyas.common.errors import NotFound
from gateway.http.openapi import HTML, HttpEndpoint
from gateway.http.pages import json_response
from gateway.observe.metrics import GatewayMetrics

CSS = "text/css; charset=utf-8"
SCRIPT = "text/javascript; charset=utf-8"
PAGE = "console.html"
_KINDS = {".html": HTML, ".css": CSS, ".js": SCRIPT}

# The page's own scripts and styles and nothing else: no other site, no inline script, no frame around it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class ConsoleEndpoints:
    """The endpoints of the console."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._recent = metrics.recent
        self._timeline = metrics.timeline
        folder = files("gateway") / "static" / "console"
        self._files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def endpoints(self) -> list[HttpEndpoint]:
        """The rows of the route table that this class answers."""
        return [
            HttpEndpoint("GET", "/", self.page, "The console", gives=(HTML,)),
            HttpEndpoint("GET", "/console/{name}", self.file, "A file of the console", gives=(SCRIPT, CSS)),
            HttpEndpoint("GET", "/requests", self.requests, "The last requests that ended, and their times"),
            HttpEndpoint("GET", "/history", self.history, "The console's figures of the last 15 minutes"),
        ]

    async def page(self, _: Request) -> Response:
        """The page."""
        return self._answer(PAGE)

    async def file(self, request: Request) -> Response:
        """A script or the styles. Raises NotFound for a name that is none of them."""
        return self._answer(request.path_params["name"])

    async def requests(self, _: Request) -> Response:
        """The recent requests and the last failures, without any text of them."""
        failures = self._timeline.failures
        return json_response({"requests": self._recent.newest_first(), "failures": failures})

    async def history(self, _: Request) -> Response:
        """The samples of `GatewayTimeline`; none where several processes share the port."""
        return json_response(self._timeline.snapshot())

    def _answer(self, name: str) -> Response:
        kind = _KINDS.get(PurePosixPath(name).suffix)
        if kind is None or name not in self._files:
            raise NotFound(f"the console has no file {name!r:.100}")
        return Response(self._files[name], media_type=kind, headers=_HEADERS)
