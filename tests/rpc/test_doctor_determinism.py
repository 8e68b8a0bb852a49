"""`eyas doctor determinism`: finds nothing at an exact server, and what is there to be found at another."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from real_cluster import real_cluster
from real_worker import tiny_config
from scripted_backend import nano_tokenizer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from eyas.common.cluster.listening import free_ports
from eyas.common.config import GatewayConfig
from eyas.common.errors import EyasError
from eyas.evals import determinism
from gateway.backends.generate import ClusterBackend
from gateway.http.front import create_app
from gateway.http.protocol import HttpLimits
from gateway.http.server import HttpServer
from gateway.observe.metrics import GatewayMetrics
from tests.rpc.real_cluster import SPLIT

ASKED = 4


async def examined(app: ASGIApp, *flags: str) -> int:
    """The exit code of the command before a real HTTP server."""
    port = next(free_ports())
    server = HttpServer(app, "127.0.0.1", port, HttpLimits())
    await server.start()
    parser = argparse.ArgumentParser()
    determinism.add_flags(parser)
    words = ["--url", f"http://127.0.0.1:{port}", "--requests", f"{ASKED}", "--others", "3", *flags]
    try:
        return await asyncio.to_thread(determinism.run, parser.parse_args(words))
    finally:
        await server.aclose()


@pytest.mark.slow
async def test_a_cpus_cluster_is_exact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with real_cluster(tiny_config(tmp_path), tmp_path, SPLIT) as cluster:
        metrics = GatewayMetrics(CollectorRegistry())
        backend = ClusterBackend(cluster.cluster)
        app = create_app(GatewayConfig(), backend, nano_tokenizer(), metrics)
        assert await examined(app, "--max-tokens", "6") == 0
    shown = capsys.readouterr().out
    assert "arithmetic exact" in shown and "every answer is the same in any company" in shown
    assert shown.count(f"{ASKED:>7} {0:>7}") == 7, shown


class Fickle:
    """A server whose third token follows how many requests it has at once, if the arithmetic is not exact."""

    def __init__(self, arithmetic: str = "fast", synthetic: bool = False) -> None:
        self._running = 0
        self._model = {"served_model_name": "m", "max_model_len": 400, "vocab_size": 50}
        self._model |= {"arithmetic": arithmetic, "synthetic": synthetic}
        self.app = Starlette(
            routes=[Route("/get_model_info", self._info), Route("/generate", self._answer, methods=["POST"])]
        )

    async def _info(self, _: Request) -> JSONResponse:
        return JSONResponse(self._model)

    async def _answer(self, request: Request) -> JSONResponse:
        body = await request.json()
        self._running += 1
        try:
            await asyncio.sleep(0.05)
            beside = self._running > 1 and self._model["arithmetic"] == "fast"
            return JSONResponse({"output_ids": [len(body["input_ids"]), 7, 8 + beside, 9]})
        finally:
            self._running -= 1


async def test_an_answer_that_follows_its_company_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert await examined(Fickle().app) == 1
    shown = capsys.readouterr().out
    assert "request 0: token 2 of 4 is not that of 'alone'" in shown
    assert "answers differ: --deterministic promises that none does" in shown
    assert f"alone, without drafts {ASKED:>20} {0:>7}" in shown, shown
    assert await examined(Fickle("exact").app) == 0


async def test_what_cannot_be_judged_is_said() -> None:
    with pytest.raises(EyasError, match="its answers mean nothing"):
        await examined(Fickle(synthetic=True).app)
    with pytest.raises(EyasError, match="--max-tokens: 300 leaves no room"):
        await examined(Fickle().app, "--max-tokens", "300")
