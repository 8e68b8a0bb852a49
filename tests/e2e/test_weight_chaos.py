"""A part of `python -m tests.e2e.weight_chaos`: a worker is killed in each phase of an update."""

from __future__ import annotations

import pytest

from tests.e2e.weight_chaos import MOMENTS, ORDINARY, Chaos, campaign


@pytest.mark.slow
async def test_every_answer_is_wholly_of_one_version_whoever_dies_and_when() -> None:
    found = await campaign(len(MOMENTS), seed=3)
    assert not found.mixed
    assert set(found.statuses) <= ORDINARY
    assert all(one.success or one.killed for one in found.rounds)
    assert sum(found.answers.values()) > 50


@pytest.mark.slow
async def test_a_label_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The power of the test above: answers of B that say that they are of A."""
    monkeypatch.setattr(Chaos, "named", lambda self, name: "A")
    assert (await campaign(1, seed=5)).mixed
