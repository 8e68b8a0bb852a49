"""As many open streams as the machine's limits allow, their clients on the same cores."""

from __future__ import annotations

import pytest

from eyas.common.machine.processes import raise_limit
from tools.bench.gateway_cost import ROUTES, GatewayLoad, measure_gateway
from tools.bench.gateway_prompts import measure

STREAMS = 10_000
OTHERS = 1_000  # files that the client has open beside its streams, at most
KIB = 128  # per stream; some 50 are usual


@pytest.mark.slow
async def test_ten_thousand_streams_go_on_side_by_side() -> None:
    """None fails (`measure_gateway` raises), none is left behind, and each costs little memory."""
    streams = min(STREAMS, raise_limit() - OTHERS)
    load = GatewayLoad(streams=streams, step_ms=2000, processes=3, workers=3, seconds=20)
    figures = await measure_gateway(load)
    print(figures)
    least, most = figures["events_least_most"]
    assert least >= 3 and most - least <= 3  # of 10 each: the workers say them at different moments
    assert figures["kib_per_stream"] < KIB


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
async def test_a_few_streams_cost_what_is_told_of_them(route: str) -> None:
    figures = await measure_gateway(GatewayLoad(streams=16, step_ms=20, seconds=1, route=route))
    least, most = figures["events_least_most"]
    assert 10 < least <= most < 70 and figures["tokens_per_s"] > 16 * 10
    assert 0.0 < figures["cpu_us_per_token"] < 5000.0 and 0.0 < figures["cpu_us_per_request"] < 50_000.0


@pytest.mark.slow
async def test_long_prompts_fail_no_stream_beside_them() -> None:
    """`measure` raises if one ends."""
    calm, *rows = [row async for row in measure(tokens=2_000, seconds=1, ids_rate=10)]
    assert 10 < calm["gaps_p50_p99_max"][0] < 200
    assert [row["prompts"] for row in rows] == [20, 2, 10] and not any(row["failed"] for row in rows)
    assert all(0.0 < row["first_token_p50_p99"][0] < 5_000.0 for row in rows)
