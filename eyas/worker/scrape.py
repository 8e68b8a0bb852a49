"""The /metrics server of a worker: one page per connection, served by threads outside the event loop."""

from __future__ import annotations

import contextlib
import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from eyas.common.cluster.listening import listen

MOST_CONNECTIONS = 32  # one more closes the oldest
SILENCE_S = 10.0  # then a connection is closed


class _Page(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves the metrics of a registry until `shutdown` and `server_close` are called."""

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Starts to serve. Raises ConfigError, which names the flag, for a port that cannot be used."""
        listening = listen(host, port, "metrics-port")
        super().__init__(listening.getsockname(), _Page, bind_and_activate=False)
        self.socket.close()  # the base class's own socket, which is not bound
        self.socket = listening
        self.server_name, self.server_port = listening.getsockname()[:2]
        self.setup_environ()
        self.set_app(make_wsgi_app(registry))
        self._connections: list[socket.socket] = []  # the oldest first
        self._lock = threading.Lock()
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection; closes the oldest one if there are too many."""
        with self._lock:
            self._connections.append(request)
            oldest = self._connections.pop(0) if len(self._connections) > MOST_CONNECTIONS else None
        if oldest is not None:
            with contextlib.suppress(OSError):  # its thread then reads the end, and closes it
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock, contextlib.suppress(ValueError):
            self._connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores the error: a client that is silent or disconnects is no fault of the worker."""
