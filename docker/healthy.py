"""Exits with 0 if a service says that it serves: asks HOST:PORT by gRPC health v1, a URL by HTTP.

With EYAS_TLS_DIR a worker is asked with the service's own certificates, as other services ask it. The name
behind https is not checked, and no proxy is used: the question is how the process of this container is.
"""

from __future__ import annotations

import http.client
import os
import ssl
import sys
import urllib.request
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
DIRECT = ("grpc.enable_http_proxy", 0)


def serves(target: str) -> bool:
    """Whether the service at `target` (HOST:PORT or URL) says within TIMEOUT_S that it serves."""
    try:
        if target.startswith(("http://", "https://")):
            unchecked = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), unchecked)
            with opener.open(target, timeout=TIMEOUT_S) as reply:
                return bool(reply.status == 200)
        with channel(target, os.environ.get("EYAS_TLS_DIR")) as opened:
            stub = health_pb2_grpc.HealthStub(opened)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    except (grpc.RpcError, http.client.HTTPException, OSError):
        return False


def channel(target: str, folder: str | None) -> grpc.Channel:
    """A channel to a worker; `folder` has the service's certificates, None: it speaks in plain."""
    if folder is None:
        return grpc.insecure_channel(target, [DIRECT])
    ca, key, certificate = (Path(folder, name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    options = [("grpc.ssl_target_name_override", "eyas.internal"), DIRECT]
    return grpc.secure_channel(target, credentials, options)


if __name__ == "__main__":
    sys.exit(0 if serves(sys.argv[1]) else 1)
