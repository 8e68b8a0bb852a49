"""Two device engines, kernels interpreted: one computes prompts, the other decodes as the plain engine does.

Pages move through shared memory. `test_device_engine` has the same requests on one device engine.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, KvKind, RequestChoice
from eyas.engine.ipc.messages import CancelGeneration, Event, OpenPull, PullFailed, WireFailure
from tests.unit.device_engines import DRAFTS, PROMPT, answers, config, logprobs, on_device, requests, tokens
from tests.unit.device_roles import PATIENCE_S, by_choice, let_go, roles, together
from tests.unit.loopback import Loopback, Worker, wait_all

__all__ = ["config"]

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(300)]
SLOW = pytest.mark.slow


def two(plain: EngineConfig, **decode: int) -> tuple[EngineConfig, EngineConfig]:
    """Device engines; of the decode engine's configuration `decode` differs."""
    return roles(on_device(plain), **decode)


WAYS = [pytest.param(DRAFTS[name], id=name, marks=SLOW) for name in DRAFTS]


@pytest.mark.parametrize("drafts", WAYS)
def test_tokens_and_drafts_are_the_plain_engines(
    config: EngineConfig, drafts: SpeculationConfig | None
) -> None:
    """Drafting goes on where prefill left it: rounds end at the same places, from the first one on."""
    plain = replace(config, draft=None) if drafts is None else replace(config, speculation=drafts)
    expected, _ = answers(plain, requests())
    found = together(Loopback(*two(plain)), requests())
    assert tokens(found) == tokens(expected)
    assert [by_choice(result) for result in found] == [by_choice(result) for result in expected]
    assert logprobs(found[2]) == pytest.approx(logprobs(expected[2]), abs=1e-4)
    assert all(entry.offered for entry in found[0].entries if entry.index == 1) or drafts is None


@pytest.mark.parametrize("drafts", [DRAFTS["chain"], DRAFTS["tree"]], ids=["chain", "tree"])
def test_plain_engines_have_the_same_roles(config: EngineConfig, drafts: SpeculationConfig) -> None:
    """A decode engine that drafts by itself pulls draft KV, whatever runs its steps."""
    plain = replace(config, speculation=drafts)
    expected, _ = answers(plain, requests())
    found = together(Loopback(*roles(plain)), requests())
    assert [by_choice(result) for result in found] == [by_choice(result) for result in expected]


class Refused(Loopback):
    """Draft KV stays where it is."""

    def _handle(self, worker: Worker, event: Event) -> None:
        if isinstance(event, OpenPull) and event.handle.group is KvKind.DRAFT and worker.address == "decode":
            worker.pulls[event.pull] = event.handle, event.attempt
            worker.send(PullFailed(event.pull, WireFailure("transfer_failed", "no draft KV for you")))
        super()._handle(worker, event)


@SLOW
def test_without_its_draft_kv_a_prompt_decodes_plainly(config: EngineConfig) -> None:
    plain = replace(config, speculation=DRAFTS["chain"])
    found = together(Refused(*two(plain)), requests()[:2])
    assert tokens(found) == tokens(answers(plain, requests()[:2])[0])
    assert not any(entry.offered for result in found for entry in result.entries)


@SLOW
def test_preemption_changes_no_token(config: EngineConfig) -> None:
    """Two pulled sequences that grow over a page's end, and pages for one of them."""
    plain = replace(config, draft=None)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
    wanted = [GenerationRequest(f"r{i}", PROMPT[i : i + 28], params) for i in (0, 5)]
    cluster = Loopback(*two(plain, num_pages=4))
    found = together(cluster, wanted)
    assert cluster.workers["decode"].engine._scheduler.preemptions > 0, "the pool was large enough"
    assert tokens(found) == tokens(answers(plain, wanted)[0])


@SLOW
def test_who_is_cancelled_leaves_nothing_and_changes_nothing(config: EngineConfig) -> None:
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=5, ignore_eos=True)
    wanted = [
        GenerationRequest(f"r{i}", PROMPT[i:], params, (RequestChoice(0), RequestChoice(1))[: 1 + i % 2])
        for i in range(4)
    ]
    plain = replace(config, speculation=DRAFTS["chain"])
    cluster = Loopback(*two(plain))
    try:
        results = [cluster.submit(request, split=True) for request in wanted]
        for i, after_s in ((1, 0.05), (2, 0.5)):
            time.sleep(after_s)
            for worker in cluster.workers.values():
                worker.send(CancelGeneration(f"r{i}"))
        kept = [results[0], results[3]]
        wait_all(kept, PATIENCE_S)
        let_go(cluster)
    finally:
        cluster.close()
    assert tokens(kept) == tokens(answers(plain, [wanted[0], wanted[3]])[0])
