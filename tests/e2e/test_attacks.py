"""The attacks that take a second each, on a gateway alone: each is answered, and others go on."""

from __future__ import annotations

import time

import pytest

from tests.e2e.attacks.__main__ import ATTACKS
from tests.e2e.attacks.attack import SILENCE, Tally, Target, attack
from tests.e2e.door_memory import ANSWER_S, KEY, allow_files, ask_grpc, ask_http, gateway, seconds

QUICK = (
    "300 floods of headers",
    "120 bodies without an end",
    "24 bodies of tiny chunks",
    "20 x 5,000 requests sent ahead",
    "4 x 180,000 small frames",
    "4 headers of 32 MB",
)


@pytest.mark.slow
async def test_quick_attacks_are_answered() -> None:
    allow_files()
    async with gateway() as there:
        for name in QUICK:
            tally = Tally()
            await ATTACKS[name].run(Target(there.port, there.grpc_port, KEY), tally)
            assert ATTACKS[name].problems(tally) == [], name
            assert await seconds(ask_http, there) < ANSWER_S, name
            assert await seconds(ask_grpc, there) < ANSWER_S, name


async def test_what_is_wrong_is_noticed() -> None:
    async def run(target: Target, tally: Tally) -> None: ...

    tally = Tally()
    one = attack("x", run, "400 closed", 5)
    assert one.problems(tally) == ["no answer was counted"]
    tally.note("400", time.monotonic())
    assert one.problems(tally) == []
    tally.note(SILENCE, time.monotonic() - 6)
    assert one.problems(tally) == ["1 x silence", "an answer took 6.0 s"]
