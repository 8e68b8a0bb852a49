"""The load client: the same cases from the same seed, and figures that are what they say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from eyas.bench.cases import make_case
from eyas.bench.http import Server
from eyas.bench.load import Measurement, Result, Target, ask
from eyas.bench.run import SYNTHETIC, VERIFY_STEPS, _figure, _report
from eyas.common.errors import ConfigError, EyasError, Unavailable

EVENTS = b"""HTTP/1.1 200 OK\r
transfer-encoding: chunked\r
\r
"""


def chunk(text: str) -> bytes:
    return f"{len(text.encode()):x}\r\n{text}\r\n".encode()


@pytest.fixture
async def replies() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that answers every request with the bytes in the list, then hangs up."""
    parts: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", parts


def test_a_seed_fixes_a_case() -> None:
    assert make_case("s1k", 4096) == make_case("s1k", 4096)
    assert make_case("s1k", 4096) != make_case("s1k", 4096, seed=2)
    assert len(make_case("s1k", 4096).jobs) == 200


def test_a_shape_names_its_numbers() -> None:
    case = make_case("3x16x8x5", vocab_size=100)
    assert (case.concurrency, len(case.jobs), case.rate) == (3, 5, None)
    assert {(len(job.prompt), job.max_tokens) for job in case.jobs} == {(16, 8)}
    assert all(10 <= id < 100 for job in case.jobs for id in job.prompt if isinstance(id, int))


@pytest.mark.parametrize("name", ["bs2", "1x2x3", "0x1x1x1", "chat0", ""])
def test_what_is_no_case_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="CASE"):
        make_case(name, 4096)


def test_figures_are_what_they_say() -> None:
    good = Measurement(prompt_tokens=10, tokens=5, accepted=3, rejected=1, ttft_s=0.1, last_s=0.5)
    figures = Result("x", 2.0, [good, good, Measurement(error="refused")]).figures()
    assert (figures["ok"], figures["failed"], figures["first_error"]) == (2, 1, "refused")
    assert (figures["in_tok_s"], figures["out_tok_s"]) == (10.0, 5.0)
    assert (figures["ttft_ms_p50"], figures["tpot_ms_p50"]) == (100.0, 100.0)
    assert figures["acceptance_rate"] == 0.75


async def test_an_answer_is_timed_by_its_tokens(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    half = 'data: {"choices":[{"text":"b"}]}\n\ndata: {"choi'
    details = '{"accepted_prediction_tokens":1}'
    usage = f'{{"completion_tokens":3,"completion_tokens_details":{details}}}'
    parts += [EVENTS, chunk('data: {"choices":[{"text":"a"}]}\n\n'), chunk(half)]
    parts += [chunk('ces":[{"text":"c"}]}\n\n'), chunk(f'data: {{"choices":[],"usage":{usage}}}\n\n')]
    parts += [chunk("data: [DONE]\n\n"), b"0\r\n\r\n"]
    answer = await ask(Target(Server(url), "m"), make_case("1x2x3x1", 100).jobs[0])
    assert (answer.error, answer.tokens, answer.accepted) == ("", 3, 1)
    assert 0.015 < answer.ttft_s < answer.last_s < 1.0


async def test_an_answer_that_breaks_off_is_a_failure(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    parts += [EVENTS, chunk('data: {"choices":[{"text":"a"}]}\n\n')]
    answer = await ask(Target(Server(url), "m"), make_case("1x2x3x1", 100).jobs[0])
    assert "ended the connection" in answer.error


async def test_a_refusal_says_its_status(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    parts += [b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nbusy"]
    with pytest.raises(EyasError, match="HTTP 429: busy"):
        await Server(url).get("/health")


async def test_figures_of_a_server_are_read_off_its_page(replies: tuple[str, list[bytes]]) -> None:
    url, parts = replies
    page = f"# HELP {SYNTHETIC} text\n{SYNTHETIC} 1.0\n{VERIFY_STEPS} 12.0\n"
    parts += [f"HTTP/1.1 200 OK\r\ncontent-length: {len(page)}\r\n\r\n{page}".encode()]
    assert await _figure(Server(url), SYNTHETIC) == 1.0
    assert await _figure(Server(url), VERIFY_STEPS) == 12.0
    assert await _figure(Server(url), "eyas_none") == 0.0


def test_a_synthetic_row_is_not_shown_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"case": "x", "ok": 1, "speculative": True}
    assert _report([row], None) == 0
    assert "by chance" not in capsys.readouterr().out
    assert _report([row | {"synthetic": True}], None) == 0
    assert "drafts were accepted by chance" in capsys.readouterr().out


async def test_an_address_without_a_server_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="nothing listens"):
        await Server("http://127.0.0.1:1").get("/health")
