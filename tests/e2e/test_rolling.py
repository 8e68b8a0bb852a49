"""The short rolling restart: a decode worker, then the gateway, while streams ask."""

from __future__ import annotations

import pytest

from eyas.common.config import ServeConfig
from tests.chaos.rolling import Restart, Seen, judge, report, roll

CONFIG = ServeConfig(layout="split", prefill=1, decode=2, draft_workers=1)


@pytest.mark.slow
async def test_no_request_notices_a_rolling_restart() -> None:
    findings = await roll(CONFIG, ["decode-0", "gateway"], width=4, seed=2)
    assert findings.problems == []
    worker, gateway = findings.restarts
    assert any(worker.began < seen.over < worker.gone for seen in findings.seen), "nothing ran at the worker"
    assert any(seen.error for seen in findings.seen if gateway.began < seen.over < gateway.back)
    assert report(findings).row_count == 2


WORKER, GATEWAY = Restart("decode-0", 10.0, 12.0, 15.0, code=0), Restart("gateway", 20.0, 21.0, 25.0, code=0)
WHOLE = Seen("a", 9.0, 11.0, "abc", "", 200, ended=True)


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (WHOLE, ""),
        (Seen("a", 11.0, 12.0, "ab", "", 200, ended=True), "another text"),
        (Seen("a", 11.0, 12.0, "abc", "", 200, ended=False), "no [DONE]"),
        (Seen("a", 11.0, 12.0, "", "no", 503), "with the gateway in place"),
        (Seen("a", 19.0, 21.0, "ab", "no", 200, ended=True), ""),
        (Seen("a", 19.0, 21.0, "ab", "no", 200, ended=False), "did not end with"),
        (Seen("a", 19.0, 21.0, "xy", "no", 200, ended=True), "did not end with"),
        (Seen("a", 21.0, 22.0, "", "no", 503), ""),
        (Seen("a", 21.0, 22.0, "", "refused", 0), ""),
        (Seen("a", 21.0, 22.0, "", "no", 500), "status 500"),
    ],
)
def test_the_judge_finds_planted_faults(seen: Seen, says: str) -> None:
    wrong = judge([WORKER, GATEWAY], [WHOLE, seen], {"a": "abc"})
    assert len(wrong) == bool(says) and all(says in line for line in wrong)
