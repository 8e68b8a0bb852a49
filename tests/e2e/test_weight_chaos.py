"""A part of `python -m tests.e2e.weight_chaos`: a worker is killed in each phase of an update."""

from __future__ import annotations

import pytest

from tests.e2e.weight_chaos import MOMENTS, ORDINARY, campaign


@pytest.mark.slow
async def test_every_answer_is_wholly_of_one_version_whoever_dies_and_when() -> None:
    findings = await campaign(len(MOMENTS), seed=3)
    assert not findings.mixed
    assert set(findings.statuses) <= ORDINARY
    assert all(one.success or one.killed for one in findings.rounds)
    assert sum(findings.answers.values()) > 50
