"""A server in a process of its own is there while it is needed; one that does not come is told in time."""

from __future__ import annotations

import pytest

from eyas.bench.http import MeasuredServer
from eyas.common.cluster.listening import free_ports
from eyas.common.errors import DeadlineExceeded, EyasError
from tools.bench import child_server as module
from tools.bench.child_server import child_server


@pytest.fixture
def port() -> int:
    return next(free_ports())


async def test_a_server_answers_within_the_context_and_ends_with_it(port: int) -> None:
    server = MeasuredServer(f"http://127.0.0.1:{port}")
    async with child_server("http.server", (port, "--bind", "127.0.0.1"), server, "/") as child:
        assert child.running and await server.get("/")
    assert not child.running


async def test_one_that_ends_at_start_is_told_with_its_last_words(port: int) -> None:
    with pytest.raises(EyasError, match="ended at start: .*no-such-flag"):
        async with child_server(
            "http.server", ("--no-such-flag",), MeasuredServer(f"http://127.0.0.1:{port}"), "/"
        ):
            pass


async def test_one_that_never_answers_is_ended(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "START_S", 0.5)
    server = MeasuredServer(f"http://127.0.0.1:{port}")
    with pytest.raises(DeadlineExceeded, match="http.server did not answer within 0.5 s"):
        async with child_server("http.server", (port, "--bind", "127.0.0.1"), server, "/none"):
            pass
