"""X-Request-ID: the caller's own or a new one, on every answer, and in the logs of every service."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from real_cluster import RealCluster, real_cluster
from real_worker import tiny_config

from eyas.common.logging import TextFormatter, serving
from tests.rpc.http_wire import door
from tests.rpc.keyed_front import CONFIG, GENERATE, KEY, SOON_S, served
from tests.rpc.log_lines import PROMPT, SPLIT, Lines


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    caplog.set_level(logging.INFO)
    logger, handler = logging.getLogger("eyas"), Lines()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def ask(cluster: RealCluster, id: str, stream: bool) -> str:
    """The id that the answer has."""
    response = await cluster.http.post(
        "/v1/completions", json=PROMPT | {"stream": stream}, headers={"x-request-id": id}
    )
    assert response.status_code == 200, response.text
    return response.headers["x-request-id"]


async def test_every_service_that_touches_a_request_logs_its_id(tmp_path: Path, lines: Lines) -> None:
    async with real_cluster(tiny_config(tmp_path), tmp_path, SPLIT) as cluster:
        for id, stream in (("whole-1", False), ("stream-1", True)):
            assert await ask(cluster, id, stream) == id
            by = {line["logger"]: line for line in lines.json if line.get("request_id") == id}
            assert {"eyas.gateway", "eyas.prefill", "eyas.decode"} <= by.keys()
            known = by["eyas.decode"]["message"].split(",")[0].removeprefix("request ")
            assert known in by["eyas.gateway"]["message"]  # the cluster's own id stands beside it
            assert any(line.endswith(f"[{id}]") and known in line for line in lines.text)
        assert all(
            " 40 prompt tokens" in line["message"] for line in lines.json if line["logger"] == "eyas.decode"
        )


@pytest.mark.parametrize("given", ["mine-1", "a b", "x" * 129, "", "zwölf"])
async def test_grpc_calls_have_one_too(given: str) -> None:
    metadata = (*KEY, ("x-request-id", given.encode("ascii", "replace").decode())) if given else KEY
    async with served() as (channel, backend):
        call = channel.unary_stream(GENERATE)(b"\x12\x01x", metadata=metadata, timeout=SOON_S)
        await call.read()
        told = dict(await call.initial_metadata())["x-request-id"]
        assert told == given if given == "mine-1" else len(told) == 24 or told == "zw?lf"
        assert backend.requests[-1].request_id == told
        wrong = channel.unary_stream(GENERATE)(b"\xff" * 9, metadata=metadata, timeout=SOON_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wrong.read()
        refused = dict(caught.value.trailing_metadata() or ())["x-request-id"]
        assert (refused == told) == (given in ("mine-1", "zwölf"))
        assert CONFIG.api_keys  # and so has a call without a key
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_stream(GENERATE)(b"", timeout=SOON_S).read()
        assert len(dict(caught.value.trailing_metadata() or ())["x-request-id"]) == 24


async def test_what_is_no_request_gets_one() -> None:
    async with door() as gate:
        wire = await gate.wire()
        wire.say(b"nonsense\r\n\r\n")
        head = (await wire.reader.readuntil(b"\r\n\r\n")).lower()
        assert len(head.split(b"x-request-id: ")[1].split(b"\r\n")[0]) == 24


@pytest.mark.parametrize(
    ("id", "shown"),
    [("a]x[b", "[a\\x5dx\\x5bb]"), ("a\nb\x1b[2J", "[a\\x0ab\\x1b\\x5b2J]"), ("plain-1", "[plain-1]")],
)
def test_an_id_ends_where_it_ends_in_a_line_of_text(id: str, shown: str) -> None:
    """And no word of a line moves a terminal's cursor."""
    record = logging.LogRecord("l", logging.INFO, "", 0, "word \x1b[2J \r é", (), None)
    with serving(id):
        line = TextFormatter("p").format(record)
    assert line.endswith(f"word \\x1b[2J \\x0d é {shown}")
