"""Turns a server's public HTTP address into its gRPC address, which the SDK dials."""

from __future__ import annotations

import dataclasses
import ssl
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from eyas.common.cluster.names import join
from eyas.common.errors import EyasError, Unauthorized, Unavailable
from eyas.common.security.tls import client_context

TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ServerAddress:
    """The address of a server. `ca`: a file of authorities for https; None: the system's."""

    url: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    ca: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """The header that carries the key, if there is one."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context of its connections; None for http. Raises ConfigError for a bad `ca`."""
        return client_context(self.ca) if self.secure else None

    @property
    def secure(self) -> bool:
        """Whether it is asked by https, and gRPC over TLS."""
        return self.url.startswith("https:")


def http_options(server: ServerAddress) -> dict[str, Any]:
    """Returns httpx's options for a server: the key, the TLS authorities, and no proxy."""
    return {"headers": server.headers, "trust_env": False, "verify": server.tls or False}


def unreachable(url: str, error: Exception) -> Unavailable:
    """The error of every command whose connection to `url` failed with `error`."""
    if "SSL" in str(error):
        return Unavailable(f"no TLS connection to {url}: {error} (--ca FILE names the authority to trust)")
    return nothing_listens(url)


def nothing_listens(url: str) -> Unavailable:
    """The error of every command that finds no server at `url`."""
    return Unavailable(f"nothing listens at {url}: start `eyas serve` first, or say where it is with --url")


def locked(url: str, api_key: str | None) -> Unauthorized:
    """The error of every command that `url` refuses, with this key or without one."""
    if api_key is None:
        return Unauthorized(f"{url} wants an API key: give --api-key, or set EYAS_API_KEY")
    return Unauthorized(f"{url} refuses the API key of --api-key or EYAS_API_KEY")


def grpc_target(server: ServerAddress) -> str:
    """Returns the address of a server's gRPC front: host:port, with https:// in front for TLS.

    Raises Unavailable if nothing listens there, Unauthorized for a wrong key, EyasError for a server that is
    not an Eyas gateway.
    """
    url = server.url
    try:
        reply = httpx.get(f"{url}/cluster", timeout=TIMEOUT_S, **http_options(server))
    except httpx.ConnectError as error:
        raise unreachable(url, error) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"{url} does not answer: {error or type(error).__name__}") from error
    if reply.status_code == Unauthorized.http_status:
        raise locked(url, server.api_key)
    try:
        port = int(reply.json()["grpc_port"])
    except (ValueError, KeyError, TypeError) as error:
        raise EyasError(f"{url} is not an Eyas gateway: it does not say where its gRPC port is") from error
    return ("https://" if server.secure else "") + join(urlsplit(url).hostname or "", port)
