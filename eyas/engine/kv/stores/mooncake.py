"""A store that workers share: Mooncake's, whose memory is that of its own processes on any hosts.

This engine is a client that gives no memory itself. Where pages lie, and which go when there is no room, is
the master's business. Tried with 0.3.13: wheels mooncake-transfer-engine-non-cuda, or -cuda13, which need the
system's libibverbs.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
from concurrent.futures import Future
from typing import Any

from eyas.common.errors import ConfigError, TransferFailed
from eyas.engine.kv.stores.bounded_calls import BoundedCalls
from eyas.engine.kv.stores.store import SEAL_BYTES, Parts, is_sealed, seal

ANSWER_S = 1.0  # for a master to take a connection, and for each call of a client
DIAL_S = (
    3.0  # a call waits so long for a client that is being made: its own tries go on for a minute and a half
)
CLOSE_S = 3.0  # and so long for one to hang up
BUFFER_BYTES = 256 << 20  # of a client, for pages on their way
PEER_TO_PEER = "P2PHANDSHAKE"  # ends find each other without a service for metadata


class MooncakeStore:
    """Pages under `eyas:kv:NAMESPACE:KEY` at the master `address`, (host, port), which the first call dials.

    ConfigError if Mooncake's library cannot be loaded.
    """

    name = "store"

    def __init__(self, address: tuple[str, int], namespace: str) -> None:
        self._address = address
        self._prefix = f"eyas:kv:{namespace}:"
        self._lock = threading.Lock()
        self._client: Future[Any] | None = None  # being made, by a thread of its own, or made
        self._closed = False
        self._bounded = BoundedCalls("store-call")  # the library has no bound of its own for most of them
        try:
            self._library = importlib.import_module("mooncake.store")
        except ImportError as error:
            text = f"--kv-store: Mooncake's library cannot be loaded: {error}"
            raise ConfigError(text, param="kv-store") from None

    def put(self, key: bytes, parts: Parts) -> int:
        """Stores a page, unless it is there. (What is given up may yet store other bytes: its seal tells.)"""
        client, name = self._dialled(), self._name(key)
        if self._is_there(client, name):
            return 0
        sealed = seal(key, parts)
        code = self._called(client, "put_parts", name, sealed, *parts)
        if code:
            raise self._lost(client, f"takes no page: code {code}")
        return SEAL_BYTES + sum(len(part) for part in parts)

    def get(self, key: bytes, parts: Parts) -> bool:
        """Reads a page."""
        client, name = self._dialled(), self._name(key)
        value = self._called(client, "get_buffer", name)
        if value is None:
            if self._is_there(client, name):
                raise self._lost(client, "has a page that it does not give")
            return False
        whole = memoryview(value).cast("B")
        if len(whole) != SEAL_BYTES + sum(len(part) for part in parts):
            return False
        rest = whole[SEAL_BYTES:]
        for part in parts:
            part[:], rest = rest[: len(part)], rest[len(part) :]
        return is_sealed(bytes(whole[:SEAL_BYTES]), key, parts)

    def close(self) -> None:
        """Hangs up, or leaves that to the library if it takes longer than CLOSE_S."""
        with self._lock:
            self._closed, client = True, self._client
        if client is not None and client.done() and client.exception() is None:
            with contextlib.suppress(TimeoutError):
                self._bounded(CLOSE_S, client.result().close)
        self._bounded.close()

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _is_there(self, client: Any, name: str) -> bool:
        code = self._called(client, "is_exist", name)
        if code < 0:
            raise self._lost(client, f"does not answer: code {code}")
        return bool(code)

    def _called(self, client: Any, name: str, *args: Any) -> Any:
        """The result of a call of the library. TransferFailed for one that does not return in time."""
        try:
            return self._bounded(ANSWER_S, getattr(client, name), *args)
        except TimeoutError:
            raise self._lost(client, f"has not answered within {ANSWER_S:g} s") from None

    def _dialled(self) -> Any:
        """The client. TransferFailed if no master answers, or not soon."""
        with self._lock:
            if self._client is None:
                self._client = Future()
                threading.Thread(
                    target=self._make, args=(self._client,), name="store-dial", daemon=True
                ).start()
            client = self._client
        try:
            return client.result(DIAL_S)
        except TimeoutError:
            raise TransferFailed(f"the store has taken no client within {DIAL_S:g} s") from None
        except TransferFailed:
            self._forget(client)
            raise

    def _make(self, client: Future[Any]) -> None:
        """Makes the client, however long that takes; what comes after the end hangs up again."""
        try:
            made = self._dial()
        except Exception as error:
            failed = error if isinstance(error, TransferFailed) else TransferFailed(f"the store: {error!r}")
            client.set_exception(failed)
            return
        with self._lock:
            client.set_result(made)
            if not self._closed:
                return
        made.close()

    def _forget(self, client: Future[Any]) -> None:
        """The next call makes another one."""
        with self._lock:
            if self._client is client:
                self._client = None

    def _dial(self) -> Any:
        host, port = self._address
        try:
            with socket.create_connection(self._address, ANSWER_S) as there:
                here = there.getsockname()[0]
        except OSError as error:
            raise TransferFailed(
                f"the store is not reached at {host}:{port}: {error.strerror or error}"
            ) from None
        client = self._library.MooncakeDistributedStore()
        code = client.setup(here, PEER_TO_PEER, 0, BUFFER_BYTES, "tcp", "", f"{host}:{port}")
        if code:
            raise TransferFailed(f"the store takes no client: code {code}")
        return client

    def _lost(self, client: Any, what: str) -> TransferFailed:
        """It is dialled anew by the next call: a client does not always outlive its master's death."""
        made = self._client
        if made is not None and made.done() and made.exception() is None and made.result() is client:
            self._forget(made)
        return TransferFailed(f"the store {what}")
