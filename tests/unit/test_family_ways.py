"""Whatever way a family's requests go, their tokens are the same, and greedy ones are transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.crossed import crossed
from tests.unit.families import SAMPLES
from tests.unit.family_ways import FamilyWays

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", crossed(SAMPLES, quick=lambda name: name == "gemma4_tokens"))
def test_every_way_gives_the_same_tokens(tmp_path: Path, family: str) -> None:
    ways = FamilyWays.of(family, tmp_path)
    assert not any(ways.differ.values()), ways
