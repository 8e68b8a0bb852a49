"""The short campaign: a worker of every role is struck, each in another way; no request may notice."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from eyas.common.types import Role
from tests.chaos.campaign import Campaign, Plan
from tests.chaos.faults import Fault, Kind, Part, Phase, schedule
from tests.chaos.streams import make_requests

SEED = 4
FAULTS = (
    Fault(Kind.STOP, Role.PREFILL, Phase.STARTED, Part.WHOLE, index=0, pause_s=0.5),
    Fault(Kind.KILL, Role.DRAFT, Phase.TRANSFER, Part.ENGINE, index=1, pause_s=0.0),
    Fault(Kind.DRAIN, Role.DECODE, Phase.DECODING, Part.WHOLE, index=0, pause_s=0.5),
)


async def test_no_request_notices(tmp_path: Path) -> None:
    plan = Plan(SEED, seconds=0, streams=8, aborts=24, stop_s=7.0, lease_s=5.0, faults=FAULTS)
    with (tmp_path / "chaos.jsonl").open("w") as journal:
        findings = await Campaign(plan, journal, Console()).run(await make_requests(16, SEED))
    assert findings.problems == []
    assert findings.faults == list(FAULTS) and not findings.unreached
    assert sum(findings.aborts.values()) == 24 and findings.aborts["finished"] < 6
    events = [json.loads(line) for line in (tmp_path / "chaos.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "fault" for event in events) == len(FAULTS)


def test_a_seed_repeats_its_faults() -> None:
    first, again, other = (schedule(seed, 2) for seed in (1, 1, 2))
    a, b, c = ([next(faults) for _ in range(100)] for faults in (first, again, other))
    assert a == b != c
    struck = {(fault.kind, fault.role, fault.phase) for fault in a[:39]}
    assert len({s for s in struck if s[0] is not Kind.DRAIN}) == 2 * len(Role) * len(Phase)
