"""Checks API keys for both fronts, follows the file of valid keys, and names callers."""

from __future__ import annotations

import base64
import binascii
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from eyas.common.config import GatewayConfig
from eyas.common.errors import ConfigError, Unauthorized
from eyas.common.security.api_keys import ApiKey, digest_of, read

LOOK_S = 1.0  # the file is polled on calls, at most once in this time
_NAME_DIGITS = 12
_log = logging.getLogger("eyas.gateway")


@dataclass(frozen=True)
class ApiCaller:
    """The caller in limits and metrics: the name of its key; "" where no key is needed."""

    name: str


class KeyRing:
    """The valid keys. Without a source of keys none is `needed`, and every caller has the same name."""

    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError for a key file that cannot be read."""
        self._keys = _named(config.api_keys)
        self._file = None if config.api_key_file is None else _KeyFile(config.api_key_file)
        self.needed = bool(self._keys) or self._file is not None

    def caller(self, headers: Mapping[str, str]) -> ApiCaller:
        """Returns the sender of these headers (names in lower case). Raises Unauthorized without a key."""
        return self._who(_key_in(headers))

    def reader(self, headers: Mapping[str, str], method: str) -> ApiCaller:
        """Authenticates a browser, which asks its user for a name and a password: the password is the key.

        A browser sends these by itself wherever a page of any site asks for this server. So they count for
        reading, and for more only if the page is this server's own.
        """
        key = _key_in(headers)
        if not key and (method == "GET" or headers.get("sec-fetch-site") == "same-origin"):
            key = _password(headers.get("authorization", ""))
        return self._who(key)

    def _who(self, given: str) -> ApiCaller:
        if not self.needed:
            return ApiCaller("")
        keys = self._keys if self._file is None else self._file.keys()
        digest = digest_of(given)
        # Every key is compared in constant time, so that the time does not tell how close a guess was.
        matches = [key.name for key in keys if secrets.compare_digest(key.digest, digest)]
        if not given or not matches:
            raise Unauthorized(
                "the API key is missing or wrong: send 'Authorization: Bearer KEY' or 'x-api-key: KEY' "
                "(over gRPC as metadata)"
            )
        return ApiCaller(matches[0])


class _KeyFile:
    """The current keys of a file. If the file becomes invalid, its last valid keys stay, and it is logged."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen = _mark(path)
        self._keys = read(path)
        self._looked = time.monotonic()

    def keys(self) -> tuple[ApiKey, ...]:
        """The valid keys; none for a file from which all were removed."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self._look()
        return self._keys

    def _look(self) -> None:
        seen = _mark(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = read(self._path)
        except ConfigError as error:
            _log.error("%s; until it is mended, the %d keys before count", error.message, len(self._keys))
            return
        level = logging.INFO if self._keys else logging.WARNING
        _log.log(level, "%s has changed: %d keys count from now on", self._path, len(self._keys))


def _mark(path: str) -> tuple[int, ...] | None:
    """Returns a mark that changes with the file; None while there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _named(keys: Iterable[str]) -> tuple[ApiKey, ...]:
    """Names keys without a name by the beginning of their hash, alike at every gateway."""
    digests = [digest_of(key) for key in keys]
    return tuple(ApiKey(digest[:_NAME_DIGITS], digest) for digest in digests)


def _key_in(headers: Mapping[str, str]) -> str:
    """The key that headers carry; "" if they carry none."""
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    return credential if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _password(authorization: str) -> str:
    scheme, _, credential = authorization.partition(" ")
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(credential, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""
