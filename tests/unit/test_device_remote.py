"""A device decode engine whose drafts come from a draft worker: the tokens of plain decoding, drafts or not.

Kernels are interpreted, and the draft worker is on the same process's other threads, behind no wire.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.engine.ipc.messages import DraftClosed, DraftDown, DraftUp, Event
from tests.unit.device_engines import DRAFTS, PATIENCE_S, answers, config, on_device, requests, tokens
from tests.unit.loopback import Loopback, Result, Worker, wait_all
from tests.unit.remote_drafts import apart, rounds_with_drafts

pytestmark = pytest.mark.usefixtures("one_thread")
__all__ = ["config"]  # a fixture


def served(cluster: Loopback, wanted: list[GenerationRequest]) -> list[Result]:
    """What comes of the requests; then nothing is held on either side."""
    try:
        results = [cluster.submit(request, split=False) for request in wanted]
        wait_all(results, PATIENCE_S)
        decode = cluster.workers["decode"].engine
        assert decode._scheduler.pool.used == 0 and len(decode._parts.pools) == 1
    finally:
        cluster.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_tokens_are_those_of_plain_decoding(config: EngineConfig, drafts: str) -> None:
    """Chunks, a nucleus, penalties, two choices of a prompt: with drafts that come from elsewhere."""
    spec = DRAFTS[drafts]
    assert spec is not None
    expected, _ = answers(replace(config, draft=None), requests())
    found = served(Loopback(*apart(replace(config, speculation=spec))), requests())
    assert tokens(found) == tokens(expected)
    rounds, accepted = rounds_with_drafts(found)
    assert rounds > 5 and accepted > 0
    whole = sum(entry.offered == spec.steps for result in found for entry in result.entries)
    assert whole > 3, "proposals are waited for: they are not trimmed by a step that ran ahead"


@pytest.mark.slow
def test_a_device_drafts_for_a_device(config: EngineConfig) -> None:
    chain = replace(config, speculation=DRAFTS["chain"])
    expected, _ = answers(replace(config, draft=None), requests())
    found = served(Loopback(*apart(chain, device_drafter=True)), requests())
    assert tokens(found) == tokens(expected)
    assert rounds_with_drafts(found)[1] > 0


@pytest.mark.slow
def test_without_a_head_nothing_is_drafted_outside_the_steps(config: EngineConfig) -> None:
    looking = replace(on_device(config), draft=None, speculation=SpeculationConfig(ngram=True), num_pages=64)
    assert looking.speculates
    cluster = Loopback(looking)
    try:
        assert cluster.workers["unified"].engine._parts.drafter is None
    finally:
        cluster.close()


class Killed(Loopback):
    """The draft worker dies after some batches of proposals: its stream breaks, and nothing more comes."""

    batches = 3
    waits: list[bool]

    def _handle(self, worker: Worker, event: Event) -> None:
        if isinstance(event, DraftDown) and event.proposals:
            self.batches -= 1
            if self.batches == 0:
                closed = (DraftClosed(0, 0, "the stream broke"),)
                self.by_role[Role.DECODE].send(DraftDown(closed=closed, worker="draft"))
        if self.batches > 0 or not isinstance(event, (DraftDown, DraftUp)):
            super()._handle(worker, event)


@pytest.mark.slow
def test_a_drafter_that_dies_leaves_a_plain_engine_that_runs_ahead(config: EngineConfig) -> None:
    """Had a round waited for it any longer than until its stream broke, this would take half a minute."""
    spec = SpeculationConfig(steps=2, topk=1, draft_tokens=3)
    greedy = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    wanted = [GenerationRequest("one", (5, 9, 11), greedy), GenerationRequest("two", (1, 2), greedy)]
    expected, _ = answers(replace(config, draft=None), wanted)
    cluster = Killed(*apart(replace(config, speculation=spec, transfer="grpc")))
    drafting = cluster.workers["decode"].engine._drafting
    found = served(cluster, wanted)
    assert tokens(found) == tokens(expected)
    assert not drafting.blocks_next_step() and not drafting.owed() and drafting.missed_rounds <= 2
    offered = [bool(entry.offered) for entry in found[0].entries]
    assert any(offered) and not any(offered[-2:])
