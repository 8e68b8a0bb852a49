"""One metrics page of several processes: nothing is lost, nothing is mixed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.http.siblings import METRICS, GatewaySiblings, labelled
from gateway.observe.metrics import GatewayMetrics
from gateway.text.entries import TextDelta


def page_of(tokens: int) -> bytes:
    metrics = GatewayMetrics(CollectorRegistry())
    metrics.generation_tokens.inc(tokens)
    metrics.responses.labels("/v1/completions", 200).inc()
    with metrics.meter() as meter:
        for _ in range(3):
            meter.deltas([TextDelta(0, "a", (5,))])
    return generate_latest(metrics.registry)


def series(page: bytes) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            labels = sorted(f"{name}={value}" for name, value in sample.labels.items())
            found[family.type, sample.name, *labels] = sample.value
    return found


def test_every_series_of_each_process_is_there_under_its_name() -> None:
    pages = {"gateway-0": page_of(3), "gateway-1": page_of(40)}
    both = series(labelled(pages))
    for name, page in pages.items():
        mark = f"process={name}"
        own = {tuple(part for part in key if part != mark): both[key] for key in both if mark in key}
        assert own == series(page)
    assert len(both) == sum(len(series(page)) for page in pages.values())


def test_a_page_is_one_that_prometheus_reads() -> None:
    page = labelled({"gateway-0": page_of(3), "gateway-1": b""}).decode().splitlines()
    assert 'eyas_generation_tokens_total{process="gateway-0"} 3.0' in page
    types = [line for line in page if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) and "# TYPE eyas_generation_tokens_total counter" in types


async def test_one_that_does_not_answer_is_left_out(tmp_path: Path) -> None:
    held: list[asyncio.StreamWriter] = []
    stuck = await asyncio.start_unix_server(lambda _, to: held.append(to), tmp_path / "gateway-2.sock")
    (tmp_path / "gateway-3.sock").touch()  # left behind by a process that was killed
    first, second = (GatewaySiblings(tmp_path / f"gateway-{i}.sock") for i in range(2))
    (tmp_path / "gateway-0.sock").touch()  # by the one before this
    first.on(METRICS, lambda _: b"# TYPE a_total counter\na_total 1.0\n")
    second.on(METRICS, lambda _: b"# TYPE a_total counter\na_total 2.0\n")
    for one in (first, second):
        await one.start()
    assert (await first.page()) == (await second.page())
    assert series(await first.page()) == {
        ("counter", "a_total", "process=gateway-0"): 1.0,
        ("counter", "a_total", "process=gateway-1"): 2.0,
    }
    await second.aclose()
    assert list(series(await first.page()).values()) == [1.0]
    await first.aclose()
    stuck.close()
    assert held
    for writer in held:
        writer.close()


async def test_others_are_asked_by_the_name_of_the_question(tmp_path: Path) -> None:
    asker, other = (GatewaySiblings(tmp_path / f"gateway-{i}.sock") for i in range(2))
    asker.on("twice", lambda about: b"itself is not asked")
    other.on("twice", lambda about: 2 * about)
    for one in (asker, other):
        await one.start()
    long = b"two\nlines" * 50_000
    assert await asker.ask("twice", long, 60.0) == {"gateway-1": 2 * long}
    assert await asker.ask("unknown", within_s=60.0) == {"gateway-1": b""}
    for one in (asker, other):
        await one.aclose()
    assert await asker.ask("twice") == {}
