"""The names of registries, `static:host:port,...` and `redis[s]://host:port/db`: what each says by itself.

It dials nothing, and is read where flags are.
"""

from __future__ import annotations

from eyas.common.cluster.address import is_address
from eyas.common.errors import ConfigError

SCHEMES = ("redis", "rediss")  # in plain, and by TLS


def listed(spec: str) -> list[str]:
    """The addresses that `static:...` lists, each once. Raises ConfigError if that is not what it is."""
    kind, _, rest = spec.partition(":")
    addresses = [address.strip() for address in rest.split(",") if address.strip()]
    if kind != "static":
        kinds = "'static:', 'redis://' or 'rediss://'"
        raise ConfigError(f"registry must start with {kinds}, not {spec!r}", param="registry")
    for address in addresses:
        if not is_address(address):
            raise ConfigError(f"registry names {address!r}, which is not host:port", param="registry")
    return list(dict.fromkeys(addresses))


def is_redis(spec: str) -> bool:
    """Whether it names a Redis, into which workers write themselves."""
    return spec.partition(":")[0] in SCHEMES
