"""Short campaigns: workers are struck, each in another way; no request may notice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from eyas.common.config import GatewayConfig, ServeConfig
from eyas.common.types import Role
from tests.chaos.__main__ import read_site
from tests.chaos.adapters import AdapterTurns
from tests.chaos.campaign import Campaign, Plan
from tests.chaos.faults import Fault, Kind, Part, Phase, schedule
from tests.chaos.rig import ENGINE, EVERYTHING, Site
from tests.chaos.streams import make_requests

SEED = 4
EVERY_ROLE = (
    Fault(Kind.STOP, Role.PREFILL, Phase.STARTED, Part.WHOLE, index=0, pause_s=0.5),
    Fault(Kind.KILL, Role.DRAFT, Phase.TRANSFER, Part.ENGINE, index=1, pause_s=0.0),
    Fault(Kind.DRAIN, Role.DECODE, Phase.DECODING, Part.WHOLE, index=0, pause_s=0.5),
)
ONE_KILL = (Fault(Kind.KILL, EVERYTHING, Phase.DECODING, Part.WHOLE, index=0, pause_s=0.0),)
UNDRAFTED = dataclasses.replace(ENGINE, draft=None)
TWO_WORKERS = Site(ServeConfig(GatewayConfig(), UNDRAFTED, "unified", workers=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "count"),
    [
        pytest.param(
            Plan(SEED, seconds=0, streams=3, aborts=8, lease_s=5.0, faults=ONE_KILL, site=TWO_WORKERS),
            4,
            id="one kill",
        ),
        pytest.param(
            Plan(SEED, seconds=0, streams=8, aborts=24, stop_s=7.0, lease_s=5.0, faults=EVERY_ROLE),
            16,
            id="every role",
        ),
    ],
)
async def test_no_request_notices(tmp_path: Path, plan: Plan, count: int) -> None:
    with (tmp_path / "chaos.jsonl").open("w") as journal:
        findings = await Campaign(plan, journal, Console()).run(await make_requests(count, SEED))
    assert findings.problems == []
    assert findings.faults == list(plan.faults) and not findings.unreached
    assert sum(findings.aborts.values()) == plan.aborts and findings.aborts["finished"] < plan.aborts / 4
    events = [json.loads(line) for line in (tmp_path / "chaos.jsonl").read_text().splitlines()]
    assert sum(event["event"] == "fault" for event in events) == len(plan.faults)


@pytest.mark.slow
async def test_adapters_change_while_a_worker_is_killed(tmp_path: Path) -> None:
    adapters = AdapterTurns.written(tmp_path / "adapters")
    site = read_site(["--layout", "unified", "--draft", "none", *adapters.flags()])
    plan = Plan(SEED, seconds=0, streams=3, aborts=8, lease_s=5.0, faults=ONE_KILL, site=site)
    with (tmp_path / "chaos.jsonl").open("w") as journal:
        campaign = Campaign(plan, journal, Console(), adapters)
        findings = await campaign.run(await make_requests(10, SEED))
    assert findings.problems == []
    assert findings.adapters["loads"] > 1 and findings.adapters["answers"] > 1


def test_a_seed_repeats_its_faults() -> None:
    first, again, other = (schedule(seed, 2) for seed in (1, 1, 2))
    a, b, c = ([next(faults) for _ in range(100)] for faults in (first, again, other))
    assert a == b != c
    struck = {(fault.kind, fault.role, fault.phase) for fault in a[:39]}
    assert len({s for s in struck if s[0] is not Kind.DRAIN}) == 2 * len(Role) * len(Phase)
