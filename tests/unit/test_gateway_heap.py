"""What a gateway's start leaves behind is not searched by the collector while it serves."""

from __future__ import annotations

import subprocess
import sys

SERVE = """
import asyncio, gc, os, time
from eyas.common.config import GatewayConfig
from gateway.main import _run

async def serve():
    config = GatewayConfig(registry="static:127.0.0.1:1", port=0, grpc_port=0)
    running = asyncio.create_task(_run(config))
    until = time.monotonic() + 30
    while not gc.get_freeze_count() and not running.done() and time.monotonic() < until:
        await asyncio.sleep(0.01)
    print(gc.get_freeze_count(), len(gc.get_objects()), flush=True)
    os._exit(0)

asyncio.run(serve())
"""


def test_a_full_collection_looks_at_little() -> None:
    ran = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=60)
    kept, searched = map(int, ran.stdout.split())
    assert kept > 30_000 and searched < kept / 20, ran.stderr
