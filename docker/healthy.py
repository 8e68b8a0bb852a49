"""Exits with 0 if a service says that it serves: asks HOST:PORT by gRPC health v1, a URL by HTTP."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def serves(target: str) -> bool:
    """Whether the service at `target` (HOST:PORT or URL) says within TIMEOUT_S that it serves."""
    try:
        if target.startswith("http://"):
            with urllib.request.urlopen(target, timeout=TIMEOUT_S) as reply:
                return bool(reply.status == 200)
        with grpc.insecure_channel(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    except (grpc.RpcError, urllib.error.URLError, TimeoutError):
        return False


if __name__ == "__main__":
    sys.exit(0 if serves(sys.argv[1]) else 1)
