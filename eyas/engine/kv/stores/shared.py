"""A store that workers share: Redis, Valkey, or what speaks as they do. What it holds, and for how long, is
bounded by its own memory policy and a time to live.
"""

from __future__ import annotations

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from eyas.common.errors import TransferFailed
from eyas.engine.kv.stores.store import SEAL_BYTES, Parts, is_sealed, seal

ANSWER_S = 1.0  # a store that takes longer costs more than it gives


class SharedStore:
    """Pages under `eyas:kv:NAMESPACE:KEY` at `url`, each for `lives_s` seconds after it was last written.

    It is dialled by the first call.
    """

    name = "store"

    def __init__(self, url: str, namespace: str, lives_s: int) -> None:
        self._lives_s = lives_s
        self._prefix = f"eyas:kv:{namespace}:".encode()
        self._client = redis.Redis.from_url(
            url,
            protocol=2,
            socket_timeout=ANSWER_S,
            socket_connect_timeout=ANSWER_S,
            retry=Retry(NoBackoff(), 0),  # a page that does not come is computed
        )

    def put(self, key: bytes, parts: Parts) -> int:
        """Stores a page, or lets it live on."""
        name = self._prefix + key
        try:
            if self._client.expire(name, self._lives_s):
                return 0
            value = b"".join([seal(key, parts), *parts])
            self._client.set(name, value, ex=self._lives_s)
        except redis.RedisError as error:
            raise TransferFailed(f"the store takes no page: {error}") from None
        return len(value)

    def get(self, key: bytes, parts: Parts) -> bool:
        """Reads a page."""
        try:
            value = self._client.get(self._prefix + key)
        except redis.RedisError as error:
            raise TransferFailed(f"the store gives no page: {error}") from None
        if not isinstance(value, bytes) or len(value) != SEAL_BYTES + sum(len(part) for part in parts):
            return False
        rest = memoryview(value)[SEAL_BYTES:]
        for part in parts:
            part[:], rest = rest[: len(part)], rest[len(part) :]
        return is_sealed(value[:SEAL_BYTES], key, parts)

    def close(self) -> None:
        """Hangs up."""
        self._client.close()
