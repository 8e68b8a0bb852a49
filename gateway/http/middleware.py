"""Middleware around the application: a guard against foreign web pages, and the path prefix of a proxy.

The guard is active where no API key is needed: then any web page in any browser that reaches the server could
use it. The DNS name of a page may be pointed at this server (DNS rebinding), after which the browser lets the
page read answers: so the Host must be a name of this server. A browser also sends simple requests for every
page without a preflight: so a page of another site must send JSON, which needs a preflight (CORS). Where
there are keys, a page does not have them.

A proxy may serve the gateway under a prefix such as /eyas, which it strips or not. Routes, and the metrics by
route, have no prefix.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.common.config import GatewayConfig
from eyas.common.errors import Forbidden
from eyas.common.logging import known_as
from gateway.http.wire import error_response
from gateway.limits.keys import KeyRing

ANY = "*"
_PORT = re.compile(r":[0-9]*$")
_JSON = re.compile(r"[a-z0-9!#$&^_.+-]+/([a-z0-9!#$&^_.+-]+\+)?json", re.ASCII)
_READING = ("GET", "HEAD", "OPTIONS")


def guarded(app: ASGIApp, config: GatewayConfig) -> ASGIApp:
    """`app`, behind the guard if callers need no key. Raises ConfigError for an invalid key file."""
    return app if KeyRing(config).needed else WebGuard(app, config)


class WebGuard:
    """Middleware that refuses requests which a page of another site may have sent, with a 403."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._hosts = {_name(host) for host in (*config.allowed_hosts, config.host, socket.gethostname())}
        self._origins = config.cors_origins
        threading.Thread(target=self._learn, name="own names", daemon=True).start()

    def _learn(self) -> None:
        """Adds the machine's fully qualified name; in a thread, because DNS may be slow."""
        self._hosts.add(_name(socket.getfqdn()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                self.check(scope["method"], scope["scheme"], headers)
            except Forbidden as error:
                response = error_response(error, scope["path"])
                response.headers["x-request-id"] = known_as(headers.get("x-request-id", ""))
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def check(self, method: str, scheme: str, headers: Headers) -> None:
        """Raises Forbidden for a Host that is not this server, and for a simple request of a foreign page."""
        host = headers.get("host", "").strip()
        if ANY not in self._hosts and not self._is_own(_name(host)):
            text = "is no name of this server, which has no API keys: --allowed-host makes it one"
            raise Forbidden(f"Host {host[:200]!r} {text}")
        if method in _READING or _is_json(headers):
            return
        if self._is_foreign(headers, f"{scheme}://{host}"):
            raise Forbidden("a page of another site must send JSON, as content-type: application/json")

    def _is_own(self, host: str) -> bool:
        """Whether no page can have pointed the name at this server; also true for an address and for ""."""
        if not host or host in self._hosts or host == "localhost" or host.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return False
        return True

    def _is_foreign(self, headers: Headers, own: str) -> bool:
        """Whether the headers of a browser show a page that is neither our own nor of an allowed origin."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        return ANY not in self._origins and origin not in self._origins and origin.lower() != own.lower()


def _name(host: str) -> str:
    """The name or address of a Host header or of --host, normalized for comparison."""
    host = host if host.count(":") > 1 and not host.startswith("[") else _PORT.sub("", host)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host.lower().removesuffix(".")


def _is_json(headers: Headers) -> bool:
    kinds = headers.getlist("content-type")
    return len(kinds) == 1 and _JSON.fullmatch(kinds[0].partition(";")[0].strip().lower()) is not None


def rooted(app: ASGIApp, root: str) -> ASGIApp:
    """`app`, also served under the prefix `root`; unchanged if it is empty."""
    return RootPath(app, root) if root else app


class RootPath:
    """Middleware that strips the prefix; redirects the prefix alone to the prefix with a slash."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == self._root:
                await RedirectResponse(f"{self._root}/")(scope, receive, send)
                return
            if path.startswith(f"{self._root}/"):
                raw = scope.get("raw_path", path.encode())
                scope = {
                    **scope,
                    "path": path.removeprefix(self._root),
                    "raw_path": raw.removeprefix(self._root.encode()),
                }
        await self._app(scope, receive, send)
