"""The path under which a proxy shows the gateway, as /eyas: part of a call's path, or cut off by the proxy.

Routes, and all that counts calls by them, have no prefix.
"""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


def rooted(app: ASGIApp, root: str) -> ASGIApp:
    """`app`, also under `root`; "": as it is."""
    return RootPath(app, root) if root else app


class RootPath:
    """Middleware that takes the prefix off. The prefix alone leads to the page whose links are below it."""

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
