"""Drafting ahead on a device, kernels interpreted, against the plain twin: the same hits and proposals in
whole draft engines, and the same draft KV as without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_rig import HandCopier, hand_pulls

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.pages import PagePool
from eyas.engine.loading import draft_build
from eyas.engine.loading.draft_build import draft_worker
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loop.patience import DraftWait
from eyas.engine.speculation.draft_worker.device_runner import DeviceDraftRunner
from eyas.engine.speculation.draft_worker.draft_commits import NO_FEATURES
from eyas.engine.speculation.draft_worker.draft_engine import DraftEngine, DraftParts
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput, DraftRunner
from eyas.engine.speculation.draft_worker.draft_sequences import DraftedSequence
from eyas.engine.speculation.drafters.ahead import AheadRound, AheadRunner, VerifiedRound
from tests.unit import plain_ahead
from tests.unit.loopback import Loopback
from tests.unit.plain_ahead import ChainRunner, PlainAhead
from tests.unit.test_ahead import Story, Worker
from tests.unit.test_device_draft_runner import Rings
from tests.unit.test_device_engine import PATIENCE_S, SIZES, answers, config, on_device, tokens
from tests.unit.test_device_remote import apart, served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "outcomes"), pytest.mark.timeout(300)]
__all__ = ["config"]  # a fixture

CHAIN = SpeculationConfig(steps=3, topk=1, draft_tokens=4)
STEPS, OUTCOMES = CHAIN.steps, 3
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, seed=11)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides have as many."""
    monkeypatch.setattr(draft_build, "OUTCOMES", OUTCOMES)
    monkeypatch.setattr(plain_ahead, "OUTCOMES", OUTCOMES)


class Drafting(Worker):
    """A draft engine as a start builds it. `ahead`: whether it drafts ahead."""

    def __init__(self, config: EngineConfig, *, ahead: bool) -> None:
        made = draft_worker(EngineSpec.of(config))
        self.runner, drafts_ahead = made.runner, made.ahead if ahead else None
        if isinstance(made.runner, DraftRunner):
            self.runner = ChainRunner(made.runner._head, made.runner.pool, made.runner._backend)
            drafts_ahead = PlainAhead(self.runner)
        self.pool = PagePool(made.runner.pool.shape.pages)
        outbox, copier = EventOutbox(), HandCopier()
        ready = SimpleNamespace(
            context_length=config.context_length,
            vocab_size=SIZES["vocab"],
            draft_width=SIZES["hidden"],
            rates=None,
        )
        pulls = hand_pulls(copier, made.runner.pool.page_size, outbox)
        parts = DraftParts(config, self.runner, drafts_ahead, self.pool, pulls, copier, outbox, ready)  # type: ignore[arg-type]
        self.engine = DraftEngine(parts, self)  # type: ignore[arg-type]
        self.proposals: dict[int, list[int]] = {}
        self.closed: list[int] = []

    def followed(self, seq: int) -> DraftedSequence:
        return self.engine._sequences.followed[1, seq]

    def certain(self, seq: int) -> torch.Tensor:
        """The draft KV of a sequence's written rows, from its first one on."""
        followed = self.followed(seq)
        return self.rows(seq)[:, :, followed.lowest - followed.first :]


@pytest.fixture
def engines(config: EngineConfig) -> Iterator[list[Drafting]]:
    """A plain one and a device's that draft ahead, and a device's that never does."""
    plain = replace(config, roles=(Role.DRAFT,), speculation=CHAIN, num_pages=64)
    device = replace(on_device(plain), cuda_graph_bs=(2,))
    found = [
        Drafting(plain, ahead=True),
        Drafting(replace(device, worker="ahead"), ahead=True),
        Drafting(replace(device, worker="never"), ahead=False),
    ]
    yield found
    for one in found:
        one.engine._ahead.end()
        one.runner.pool.close()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_proposals_and_draft_kv_are_the_plain_twins(engines: list[Drafting], params: SamplingParams) -> None:
    """Hits and misses of two sequences; what a hit has not written is repaired by the run that follows."""
    ours, theirs, never = engines
    story = Story(*engines, params=params)
    story.vocab = SIZES["vocab"]
    for seq, base in ((1, 0), (2, 37)):
        story.begin(seq, base)
    missed = 0
    for number in range(9):
        seq, before = 1 + number % 2, ours.hits
        if number % 4 != 3:  # else the next commits come before anything is drafted
            ours.idle(STEPS + 1)
            theirs.idle(2)
        story.round(seq)
        assert theirs.proposals == ours.proposals and theirs.hits == ours.hits
        if ours.hits == before:
            missed += 1
            assert never.proposals == ours.proposals
    theirs.idle(2)
    ours.idle(STEPS + 1)
    assert ours.hits > 2 and missed > 2 and never.hits == 0
    for seq in (1, 2):
        kv, expected = theirs.certain(seq), never.certain(seq)
        assert kv.shape == expected.shape and torch.allclose(kv, expected, atol=1e-5)


def test_tokens_are_those_of_plain_decoding(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device decodes, another drafts ahead for it: greedy and seeded requests, side by side."""
    monkeypatch.setattr(DraftWait, "draft_wait_s", PATIENCE_S / 3)  # as in `test_device_remote`
    monkeypatch.setattr(draft_build, "OUTCOMES", 8)
    asked = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        "seeded": SamplingParams(temperature=0.8, seed=5, max_tokens=16, ignore_eos=True),
    }
    wanted = [GenerationRequest(name, (5, 9, 11), params) for name, params in asked.items()]
    expected, _ = answers(replace(config, draft=None), wanted)
    spec = SpeculationConfig(steps=2, topk=1, draft_tokens=3)
    cluster = Loopback(*apart(replace(config, speculation=spec), device_drafter=True))
    drafter = cluster.workers["draft"].engine
    found = served(cluster, wanted)
    assert tokens(found) == tokens(expected)
    counts = drafter._ahead.counts
    assert counts.hits > 2, counts
    assert counts.drafted > 0 and drafter._parts.pool.used == 0


@pytest.fixture
def device(config: EngineConfig) -> Iterator[tuple[DeviceDraftRunner, AheadRunner]]:
    made = draft_worker(EngineSpec.of(replace(on_device(config), roles=(Role.DRAFT,), speculation=CHAIN)))
    assert isinstance(made.runner, DeviceDraftRunner) and isinstance(made.ahead, AheadRunner)
    yield made.runner, made.ahead
    made.runner.pool.close()


def landed(ahead_runner: AheadRunner, verified: VerifiedRound) -> AheadRound:
    one = ahead_runner.begin(verified, 0.5)
    ahead_runner.advance([one])
    ahead_runner.advance([one])
    assert one.drafted
    return one


def test_repairs_from_a_ring_are_those_from_the_host(
    device: tuple[DeviceDraftRunner, AheadRunner],
) -> None:
    """After a hit some true features lie in a ring; or they do not any more."""
    runner, ahead_runner = device
    rings, pages, found = Rings(), list(range(8, 16)), []
    features = torch.randn(12, SIZES["hidden"], generator=torch.Generator().manual_seed(4))
    first = DraftInput("a", DraftExtension(pages, 0, [1, 2, 3, 4, 5], features[:5]), GREEDY, 0)
    for known in (None, 1, 9):  # the generation of whose rows the runner is told; None: it has the features
        [proposed] = runner.draft([first], CHAIN)
        assert proposed.chain is not None
        again = replace(first, extension=DraftExtension(pages, 4, [5], NO_FEATURES))
        one = landed(ahead_runner, VerifiedRound(again, proposed.chain, again=True))
        _, accepted, own = max(one._outcomes or (), key=lambda outcome: outcome[1])
        since = [*proposed.chain.tokens[:accepted], own[0]]
        answer, new = (
            one.answer(since, STEPS),
            DraftExtension(pages, 5, since, features[5 : 5 + accepted + 1]),
        )
        assert answer is not None and accepted > 0
        asked = DraftInput("a", new, GREEDY, 0)
        asked = rings.ringed(asked, 0, 1, known=known) if known else asked
        below = landed(ahead_runner, VerifiedRound(asked, answer))
        found.append((below.written, below._outcomes, runner.pool.tensor[8].clone()))
    host, ring, lost = found
    assert host[0] and host[1] and ring[:2] == host[:2] and torch.equal(ring[2], host[2])
    assert lost[:2] == (False, [])
