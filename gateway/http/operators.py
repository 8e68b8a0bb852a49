"""Checks that a caller may act on the whole server, and reads the small bodies of such requests."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from eyas.common.cluster.names import is_loopback, is_passed_on
from eyas.common.errors import Forbidden
from gateway.formats.fields import RequestBody, ignored, parse
from gateway.http.wire import PendingBodies, read_body

OWN_PAGES = ("none", "same-origin")
B = TypeVar("B", bound=RequestBody)


def check_page(request: Request, what: str) -> None:
    """Raises Forbidden for a request from a page of another site, for which a browser may use a stored key.
    `what`: the action, as "flush the cache".
    """
    if request.headers.get("sec-fetch-site", "none") not in OWN_PAGES:
        raise Forbidden(f"a page of another site must not {what}")


class EndpointBodies:
    """Reads the bodies of a few endpoints, each of at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._arriving = PendingBodies()

    async def read(self, kind: type[B], request: Request) -> B:
        """The body as `kind`; the response's headers will name its ignored fields."""
        body = parse(kind, await read_body(request, self._most, self._arriving) or b"{}")
        request.state.ignored = ignored(body)
        return body


class OperatorBodies(EndpointBodies):
    """Reads the bodies by which an operator does `what`, as "change the weights". `keyed`: callers need a
    key; otherwise only callers on this machine are allowed.
    """

    def __init__(self, most: int, what: str, *, keyed: bool) -> None:
        super().__init__(most)
        self._what = what
        self._keyed = keyed

    async def read(self, kind: type[B], request: Request) -> B:
        """Reads a body as `EndpointBodies` does. Raises Forbidden, before a byte is read, for other
        callers.
        """
        check_page(request, self._what)
        if not (self._keyed or _is_near(request)):
            raise Forbidden(f"without API keys callers of the server's machine alone may {self._what}")
        return await super().read(kind, request)


def _is_near(request: Request) -> bool:
    """Whether the caller is on this machine; not if a proxy on it forwards the request."""
    near = request.client is None or is_loopback(request.client.host)
    return near and not is_passed_on(request.headers)
