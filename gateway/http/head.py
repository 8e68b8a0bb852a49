"""Checks the head of a request: its target and its framing, and what of it is refused or ignored.

Whoever reads a request otherwise than the sender takes a body for a request: what two readers could read in
two ways is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from eyas.common.errors import InvalidRequest

Headers: TypeAlias = list[tuple[bytes, bytes]]  # names in lower case

_ABSOLUTE = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


def target(method: bytes, url: bytes, headers: Headers) -> bytes:
    """The path and query of a request's target. The host of an absolute one replaces the Host header.

    Raises InvalidRequest for another kind of target than the method has, and for a Host that is not one.
    """
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise InvalidRequest("the request has several Host headers")
    if url.startswith(b"/") or (url == b"*" and method == b"OPTIONS"):
        return url
    absolute = _ABSOLUTE.fullmatch(url)
    if absolute is None:
        raise InvalidRequest("the request's target is neither a path nor an http:// URL")
    host, rest = absolute.groups()
    headers[:] = [(b"host", host), *((name, value) for name, value in headers if name != b"host")]
    rest = rest or b""
    return bytes(rest if rest.startswith(b"/") else b"/" + rest)


def check_framing(method: bytes, version: str, headers: Headers) -> None:
    """Raises InvalidRequest for a version, a method or a coding that is not served here.

    The parser has refused already what contradicts itself: several lengths, or a length beside a coding.
    """
    if version not in ("1.0", "1.1"):
        raise InvalidRequest("the request must be HTTP/1.0 or HTTP/1.1")
    if method == b"CONNECT":
        raise InvalidRequest("this server is no proxy: it takes no CONNECT")
    if version == "1.1" and all(name != b"host" for name, _ in headers):
        raise InvalidRequest("the request has no Host header")
    codings = [value.strip(b" \t").lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise InvalidRequest("Transfer-Encoding must be chunked, and needs HTTP/1.1")


def without_upgrade(method: bytes, url: bytes, version: str, headers: Headers) -> bytes:
    """The head's bytes without its wish for another protocol, which a server may ignore."""
    lines = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    lines += [b"%b: %b" % header for header in _plain(headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _plain(headers: Headers) -> Iterator[tuple[bytes, bytes]]:
    for name, value in headers:
        if name == b"connection":
            options = [option.strip(b" \t") for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() != b"upgrade")
        if name != b"upgrade":
            yield name, value
