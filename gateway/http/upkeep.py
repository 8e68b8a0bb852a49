"""Routes by which an operator changes a running server. Their paths are those of SGLang's server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from eyas.common.errors import Forbidden, InvalidRequest
from gateway.backends.base import GenerationBackend
from gateway.http.openapi import HttpEndpoint
from gateway.http.pages import json_response

WAIT_S = 1.0  # for what has just been answered to leave the workers, and a canary to end
MOST_WAIT_S = 600.0
OWN_PAGES = ("none", "same-origin")


class AdminEndpoints:
    """The endpoints. Each turns a request into a response; `wire` maps what they raise."""

    def __init__(self, backend: GenerationBackend) -> None:
        self._backend = backend

    def endpoints(self) -> list[HttpEndpoint]:
        """The rows of the route table that this class answers."""
        told = "Drops every worker's prefix cache, as SGLang; 400 while requests run"
        return [
            HttpEndpoint(method, "/flush_cache", self.flush, told, query=("timeout",))
            for method in ("GET", "POST")
        ]

    async def flush(self, request: Request) -> Response:
        """Drops the prefix cache of every worker; the pages that each had. Raises Busy if something runs.

        A page of another site may make a browser send a GET, with the key that it knows: that is refused.
        """
        if request.headers.get("sec-fetch-site", "none") not in OWN_PAGES:
            raise Forbidden("a page of another site must not flush the cache")
        return json_response({"flushed": await self._backend.flush(_wait_s(request))})


def _wait_s(request: Request) -> float:
    """How long to wait for what runs: `timeout` of the query, in seconds."""
    given = request.query_params.get("timeout")
    try:
        wait_s = WAIT_S if given is None else float(given)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= MOST_WAIT_S:
        raise InvalidRequest(f"timeout must be seconds, 0 to {MOST_WAIT_S:g}", param="timeout")
    return wait_s
