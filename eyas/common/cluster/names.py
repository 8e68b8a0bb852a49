"""Names in a cluster, as text: addresses, registries, and clusters that share a Redis database.

An address is HOST:PORT, an IPv6 host in brackets; a registry `static:host:port,...` or
`redis[s]://host:port/db`. Nothing is resolved or dialled: they are read where flags are.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from eyas.common.errors import ConfigError
from eyas.common.security.secret_urls import shown

_HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]"
_ADDRESS = re.compile(rf"(?:{_HOST}):([0-9]{{1,5}})")
SCHEMES = ("redis", "rediss")  # in plain, and by TLS
_OF_PROXIES = ("forwarded", "via", "x-forwarded-", "x-real-ip")  # as the names begin
CLUSTER = "eyas"
"""The name of a cluster that was given none."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # none is a pattern, or a part of another one's keys


def join(host: str, port: int) -> str:
    """HOST:PORT. `host` may be an IPv6 address with or without brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_address(text: str) -> bool:
    """Whether `text` is HOST:PORT and no other target that gRPC would dial (unix:..., dns://...)."""
    match = _ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[1]) <= 65535


def is_host(text: str) -> bool:
    """Whether `text` is a name or an IP address that a client can dial, which 0.0.0.0 and :: are not."""
    return is_address(join(text, 1)) and not is_unspecified(text)


def is_unspecified(host: str) -> bool:
    """Whether `host` means all addresses of a machine: a server can listen there, no client can dial it."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return not host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`, an IP address or a name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_passed_on(headers: Iterable[str]) -> bool:
    """Whether a proxy says, in the names of a call's headers, that the call is another's than its own."""
    return any(name.lower().startswith(_OF_PROXIES) for name in headers)


def listed(spec: str) -> list[str]:
    """The addresses that `static:...` lists, each once. Raises ConfigError if that is not what it is."""
    kind, _, rest = spec.partition(":")
    addresses = [address.strip() for address in rest.split(",") if address.strip()]
    if kind != "static":
        kinds = "'static:', 'redis://' or 'rediss://'"
        raise ConfigError(f"registry must start with {kinds}, not {shown(spec)!r}", param="registry")
    for address in addresses:
        if not is_address(address):
            raise ConfigError(f"registry names {shown(address)!r}, which is not host:port", param="registry")
    return list(dict.fromkeys(addresses))


def is_redis(spec: str) -> bool:
    """Whether it names a Redis, into which workers write themselves."""
    return spec.partition(":")[0] in SCHEMES


def is_redis_url(text: str) -> bool:
    """Whether `text` is redis[s]://HOST, with or without a port, a user and a database's number."""
    try:
        url = urlsplit(text)
        places = is_address(join(url.hostname or "", url.port or 1)) and url.port != 0
    except ValueError:  # a port that is no number
        return False
    return url.scheme in SCHEMES and places and re.fullmatch(r"(/[0-9]*)?", url.path) is not None


def mooncake_master(text: str) -> tuple[str, int] | None:
    """Host and port of mooncake://HOST:PORT; None: that is no such text."""
    try:
        url = urlsplit(text)
        host, port = url.hostname or "", url.port or 0
    except ValueError:  # a port that is no number
        return None
    bare = url.path in ("", "/") and not url.query and url.username is None
    return (host, port) if url.scheme == "mooncake" and bare and host and port else None


def checked_cluster(name: str) -> str:
    """The name of a cluster. Raises ConfigError for another string."""
    if not _NAME.fullmatch(name):
        shape = "1 to 64 letters, digits, dots, dashes and underlines"
        raise ConfigError(f"--cluster: {name!r} is not {shape}", param="cluster")
    return name
