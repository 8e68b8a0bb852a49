"""From a server's HTTP address, the one that people know, to its gRPC address, which the SDK dials.

It knows the gateway's `/cluster` and what a terminal user should read when nothing answers there.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import httpx

from eyas.common.errors import EyasError, Unauthorized, Unavailable

TIMEOUT_S = 10.0


def nothing_listens(url: str) -> Unavailable:
    """The error of every command that finds no server at `url`."""
    return Unavailable(f"nothing listens at {url}: start `eyas serve` first, or say where it is with --url")


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that carries a key, if there is one."""
    return {} if api_key is None else {"authorization": f"Bearer {api_key}"}


def grpc_address(url: str, api_key: str | None) -> str:
    """host:port of the gRPC front of the server at `url` (its HTTP address).

    Raises Unavailable if nothing listens there, Unauthorized for a wrong key, EyasError for a server that is
    not an Eyas gateway.
    """
    try:
        reply = httpx.get(f"{url}/cluster", headers=bearer(api_key), timeout=TIMEOUT_S, trust_env=False)
    except httpx.ConnectError as error:
        raise nothing_listens(url) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"{url} does not answer: {error or type(error).__name__}") from error
    if reply.status_code == Unauthorized.http_status:
        raise Unauthorized(f"{url} wants an API key: give --api-key, or set EYAS_API_KEY")
    try:
        port = int(reply.json()["grpc_port"])
    except (ValueError, KeyError, TypeError) as error:
        raise EyasError(f"{url} is not an Eyas gateway: it does not say where its gRPC port is") from error
    host = urlsplit(url).hostname or ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
