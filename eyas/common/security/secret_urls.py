"""Addresses of a Redis with a password in them, which reach child processes never as an argument, nor a log.

Every user of a machine can read a process's arguments, but not its environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

VARIABLES = {"kv-store": "EYAS_KV_STORE", "registry": "EYAS_REGISTRY"}
"""By flag: the variable that has its value where there is no flag."""


def has_secret(url: str) -> bool:
    """Whether it has a user, a password or options, or may have them: it cannot be read."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return True
    return "@" in url or bool(parts.query)


def shown(url: str) -> str:
    """The address as people may read it: what stands before its host, and its options, are left out."""
    if not has_secret(url):
        return url
    scheme, separator, _ = url.partition("://")
    place = url.rpartition("@")[2].removeprefix(scheme + separator).partition("?")[0]
    return f"{scheme}://***@{place}" if separator else f"***@{place}"


def from_environment(flag: str) -> str | None:
    """The address in a flag's variable; None: there is none."""
    return os.environ.get(VARIABLES[flag], "").strip() or None


def as_flag(flag: str, url: str) -> dict[str, object]:
    """The flag of a child's command line, if the address may stand there."""
    return {} if has_secret(url) else {flag: url}


def environment(base: Mapping[str, str], urls: Mapping[str, str | None]) -> dict[str, str]:
    """The environment `base` for a child with these addresses, by flag: it has those that are no flag."""
    left = {name: value for name, value in base.items() if name not in VARIABLES.values()}
    return left | {VARIABLES[flag]: url for flag, url in urls.items() if url is not None and has_secret(url)}
