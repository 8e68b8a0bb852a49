"""Whole engines whose drafts go by shared memory: no token is another, and no dead drafter is waited for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from loopback import Loopback, Worker, split_configs
from loopback_runs import assert_idle, mixed_requests, run_all, undrafted

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.types import Role
from eyas.engine.ipc.messages import DraftDown, DraftUp, Event
from eyas.engine.scheduling.turns import StepRoom
from eyas.engine.speculation.draft_worker.draft_engine import PostedCommits
from eyas.engine.speculation.drafters.channels import GRPC, SHM, DraftChannels
from tests.unit.draft_channel_pair import mapped
from tests.unit.eagle_engines import CHAIN, TREE, base

pytestmark = pytest.mark.usefixtures("one_thread")
__all__ = ["base"]  # a fixture

ASKED = mixed_requests(3, seed=4)
Answers = list[dict[int, list[int]]]

PATIENCE_S = 20.0  # no draft comes too late, however slow the machine; one that is waited for shows


class Pair(Loopback):
    """A decode and a draft engine. From `die` on nothing comes from the draft worker or reaches it."""

    dead = False

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(*split_configs(config)[1:])
        waits = SimpleNamespace(seconds=PATIENCE_S, record_step=lambda landed, seconds: None)
        self.decode.engine._drafting.draft_wait = waits
        channels = self.decode.engine._drafting.drafter._head._channels
        deadline = time.monotonic() + PATIENCE_S
        while config.transfer != GRPC and channels.mailbox("draft") is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def decode(self) -> Worker:
        return self.by_role[Role.DECODE]

    def sent(self) -> dict[str, int]:
        return dict(self.decode.engine._drafting.sent)

    def _handle(self, worker: Worker, event: Event) -> None:
        if not (self.dead and isinstance(event, (DraftUp, DraftDown))):
            super()._handle(worker, event)


@pytest.fixture(scope="module")
def expected(base: EngineConfig) -> Answers:
    return undrafted(base, ASKED)


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        pytest.param(CHAIN, SHM, id="chain"),
        pytest.param(TREE, SHM, id="tree", marks=pytest.mark.slow),
        pytest.param(CHAIN, GRPC, id="by the front"),
    ],
)
def test_no_token_is_another_by_either_path(
    base: EngineConfig, expected: Answers, spec: SpeculationConfig, path: str
) -> None:
    cluster = Pair(replace(base, speculation=spec, transfer=path))
    assert run_all(cluster, ASKED) == expected
    assert any(entry.accepted for result in cluster.results.values() for entry in result.entries)
    sent = cluster.sent()
    assert sent.get(SHM, 0) > 5 * sent[GRPC] if path == SHM else set(sent) == {GRPC}
    assert_idle(cluster)
    cluster.close()
    assert mapped() == 0


@pytest.mark.slow
def test_no_token_is_another_where_steps_have_little_room(base: EngineConfig, expected: Answers) -> None:
    """Rounds are plain, and take turns, until few sequences are left: those have drafts again."""
    cluster = Pair(replace(base, speculation=CHAIN))
    turns = cluster.decode.engine._scheduler._turns
    steps: list[tuple[bool, bool]] = []  # crowded, with drafts
    choose = turns.choose

    def noted(*sequences: Any) -> Any:
        chosen = choose(*sequences)
        steps.append((turns.crowded, any(seq.tree for seq in chosen)))
        return chosen

    turns.room, turns.choose = StepRoom(2.5, 2.5, 1000.0), noted
    params = msgspec.structs.replace(ASKED[0].params, max_tokens=50)
    longer = msgspec.structs.replace(ASKED[0], params=params)
    assert run_all(cluster, [longer, *ASKED[1:]]) == [*undrafted(base, [longer]), *expected[1:]]
    first = steps.index((True, False))
    assert (False, True) in steps[first:], "the last one should have had drafts again"
    assert (True, True) not in steps[first:]
    assert_idle(cluster)
    cluster.close()


@pytest.mark.parametrize("answers", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7))])
def test_a_drafter_that_dies_is_not_waited_for(
    base: EngineConfig, expected: Answers, answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its channel ends as it does with its process, before or after it has left some of its proposals."""
    cluster = Pair(replace(base, speculation=CHAIN))
    left, answer = [answers], PostedCommits.answer
    woken = DraftChannels.wake

    def last_words(posted: PostedCommits, *rest: Any) -> bool:
        left[0] -= 1
        return left[0] >= 0 and answer(posted, *rest)

    def dies(channels: DraftChannels, peers: Iterable[int]) -> None:
        if left[0] > 0:
            woken(channels, peers)
        elif not cluster.dead:
            cluster.dead = True
            channels.close()

    monkeypatch.setattr(PostedCommits, "answer", last_words)
    monkeypatch.setattr(DraftChannels, "wake", dies)
    assert run_all(cluster, ASKED) == expected, "or it took too long: a dead drafter was waited for"
    drafting = cluster.decode.engine._drafting
    assert cluster.dead and not drafting.blocks_next_step() and not drafting.owed()
    assert drafting.missed_rounds == 0
    cluster.close()
    assert mapped() == 0
