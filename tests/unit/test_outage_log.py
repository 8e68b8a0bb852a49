"""The log of an outage: a line when it begins, reminders ever more rarely, a line at its end."""

from __future__ import annotations

import logging
import time

import pytest

from eyas.common.logging import REMIND_RAREST_S, REMIND_S, OutageLog


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still."""
    at = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    return at


def test_reminders_become_rare(now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    outage, lines = OutageLog(logging.getLogger("eyas.test")), list[float]()
    for second in range(4 * 3600):
        now[0] = 1000.0 + second
        outage.failed("it is away: %s", "nobody listens")
        lines += [second] * (len(caplog.messages) - len(lines))
    waits = [later - earlier for earlier, later in zip(lines, lines[1:], strict=False)]
    assert lines[0] == 0 and waits[:3] == [REMIND_S, 2 * REMIND_S, 4 * REMIND_S]
    assert waits[-1] == REMIND_RAREST_S and waits == sorted(waits)
    outage.works("it is back")
    outage.works("it is back")
    assert caplog.messages[len(lines) :] == ["it is back"]
    outage.failed("it is away again")
    assert caplog.messages[-1] == "it is away again", "the next outage is a new one"


def test_a_short_failure_is_not_logged(now: list[float], caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageLog(logging.getLogger("eyas.test"), grace_s=5.0)
    for passed in (0.0, 4.0):
        now[0] = 1000.0 + passed
        outage.failed("it is away")
    outage.works("it is back")
    assert not caplog.messages and not outage.since
    outage.failed("it is away")
    now[0] += 5.0
    outage.failed("it is away")
    assert caplog.messages == ["it is away"] and outage.since
