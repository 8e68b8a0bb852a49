"""An engine's pulse beats within its steps, as often as anything was done, and is told now and then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from loopback import QueueLink
from tiny import write_tiny_eagle3, write_tiny_llama

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import FinishCause, GenerationRequest, Role
from eyas.engine.ipc import pulse
from eyas.engine.ipc.messages import (
    EngineAlive,
    EngineLoad,
    Event,
    ShutdownEngine,
    StepReply,
    SubmitGeneration,
)
from eyas.engine.ipc.pulse import EngineHeartbeat
from eyas.engine.loading.build import build_engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    write_tiny_llama(tmp_path / "target")
    write_tiny_eagle3(tmp_path / "head", tmp_path / "target")
    (tmp_path / "pools").mkdir()
    return EngineConfig(
        roles=tuple(Role),
        model=str(tmp_path / "target"),
        draft=str(tmp_path / "head"),
        num_pages=64,
        chunk_tokens=64,
        speculation=SpeculationConfig(steps=3, topk=2, draft_tokens=8),
        pool_dir=str(tmp_path / "pools"),
    )


class Batches(QueueLink):
    """Keeps what an engine sends, and stops it once an answer has ended."""

    def __init__(self) -> None:
        super().__init__(lambda event: None)
        self.sent: list[Sequence[Event]] = []

    def send(self, events: Sequence[Event]) -> None:
        self.sent += [list(events)] if events else []
        ends = [e for event in events if isinstance(event, StepReply) for e in event.entries if e.finish]
        if ends:
            assert ends[0].finish is FinishCause.LENGTH
            self.commands.put(ShutdownEngine())


def run(config: EngineConfig) -> list[Sequence[Event]]:
    link = Batches()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    link.commands.put(SubmitGeneration(GenerationRequest("r", tuple(range(3, 63)), params), 1, attach=False))
    build_engine(config, link).run()
    return link.sent


def test_a_step_beats_in_every_layer_and_a_short_one_is_not_told(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "PULSE_S", 60.0)
    assert not any(isinstance(event, EngineAlive) for batch in run(config) for event in batch)
    monkeypatch.setattr(pulse, "PULSE_S", 0.0)
    sent = run(config)
    assert any(isinstance(event, EngineLoad) for event in sent[0]), (
        "nothing is said before the engine is ready"
    )
    beats, most = 0, 0
    for batch in sent:
        beats = beats + 1 if isinstance(batch[0], EngineAlive) else 0
        most = max(most, beats)
    assert most >= 8, "a round: layers of the target, its sampling, levels of the head"


def test_it_is_told_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    link, now = Batches(), [100.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    beat = EngineHeartbeat(link)
    beat()
    beat.loop()
    for _ in range(40):
        now[0] += 0.0625
        beat()
    assert link.sent == [[EngineAlive()]] * 5
