"""Addresses as text: HOST:PORT, an IPv6 host in brackets. Nothing is resolved or dialled."""

from __future__ import annotations

import ipaddress
import re

_HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]"
_ADDRESS = re.compile(rf"(?:{_HOST}):([0-9]{{1,5}})")


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
