"""What strangers cost a gateway process, attack by attack: `door_memory` measures, its bounds hold."""

from __future__ import annotations

import pytest

from tests.e2e.door_memory import ATTACKS, allow_files, cost


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
async def test_an_attack_is_bounded(name: str) -> None:
    allow_files()
    found = await cost(name)
    assert found.bounded, str(found)
