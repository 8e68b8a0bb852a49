"""Steps launched ahead in every role: prompts that come from elsewhere, and prompts for elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from overlap_world import Setting, some_requests
from roles_world import RolesWorld

from eyas.engine.batch.sequence import Sequence
from eyas.engine.kv.pages import PagePool
from tests.unit.crossed import crossed

TIGHT = 14  # pages: the largest request needs 13


@pytest.mark.parametrize(("width", "seed"), crossed([1, 3], range(3), quick=lambda width, seed: seed == 1))
def test_tokens_are_the_plain_rules(width: int, seed: int) -> None:
    world = RolesWorld(seed, Setting(width))
    world.run(some_requests(seed, 40, held=0.3), cancels=0.02)
    assert min(world.runner.ahead, len(world.pulled), len(world.handed_over)) >= 2


@pytest.mark.parametrize(("width", "seed"), crossed([1, 3], range(4), quick=lambda width, seed: seed == 1))
def test_copies_and_steps_share_a_pool_that_is_too_small(width: int, seed: int) -> None:
    """Everybody ends, although pages of steps in flight have to be waited for."""
    world = RolesWorld(seed, Setting(width, pages=TIGHT))
    world.run(some_requests(seed, 40))
    assert world.rig.scheduler.preemptions > 0, "the pool was large enough"


# --- power: each of these mistakes is noticed ----------------------------------------------------------


def _pages_are_free_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagePool, "_release", lambda pool, page: pool._settled.append(page))


def _prompts_for_elsewhere_decode_here(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "is_shared", property(lambda seq: bool(seq.forks)))


@pytest.mark.parametrize(
    "fault",
    [_pages_are_free_at_once, pytest.param(_prompts_for_elsewhere_decode_here, marks=pytest.mark.slow)],
)
def test_a_mistake_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(4):
            RolesWorld(seed, Setting(pages=TIGHT)).run(some_requests(seed, 40))
