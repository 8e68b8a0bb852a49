"""DeepSeek whole on the device path, kernels interpreted: the plain engine's tokens, whatever is drafted.

The NextN layer behind the model's own is the draft head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.attention.latent_prompts import ExpandedPrompts
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.device.buckets import GraphBuckets
from eyas.engine.device.executor import CapturedStep, StepExecutor
from eyas.engine.device.program import StepProgram
from eyas.engine.device.step import StepInput, StepShape
from eyas.engine.loading import device_build
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.step_shapes import buckets_of
from tests.unit.device_engines import answers, on_device, rounds, tokens
from tests.unit.tiny import edit
from tests.unit.tiny_deepseek import V3, write_tiny_nextn_deepseek

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

LITE = V3 | {"q_lora_rank": None, "n_shared_experts": 2}
V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}
"""What else a config.json of V2-Lite says."""
CORRECTION = "model.layers.{}.mlp.gate.e_score_correction_bias"  # which V2 does not have

CHAIN = SpeculationConfig(steps=2, topk=1, draft_tokens=3)
DRAFTS = {
    "plain": None,
    "chain": CHAIN,
    "tree": SpeculationConfig(steps=2, topk=2, draft_tokens=4),
}
PROMPT = tuple((7 * i * i + i) % 16 for i in range(22))  # random drafts are right now and then


def write(folder: Path, sizes: dict[str, Any]) -> EngineConfig:
    """The plain engine of such a model."""
    write_tiny_nextn_deepseek(folder, sizes)
    if sizes is LITE:
        edit(folder, {CORRECTION.format(layer): None for layer in (1, 2)}, **V2)
    return EngineConfig(
        model=str(folder),
        draft=str(folder),
        num_pages=32,
        chunk_tokens=16,
        max_running=4,
        context_length=128,
        pool_dir=str(folder),
        worker="unified",
    )


def asked() -> list[GenerationRequest]:
    """A prompt of two chunks, and a short one whose answer is drawn."""
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=2**63 + 7, max_tokens=5, ignore_eos=True)
    return [GenerationRequest("chunks", PROMPT, greedy), GenerationRequest("short", (7, 9, 11), seeded)]


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("sizes", [V3, LITE], ids=["V3", "V2-Lite"])
def test_the_tokens_are_the_plain_engines(tmp_path: Path, sizes: dict[str, Any], drafts: str) -> None:
    config, spec = write(tmp_path, sizes), DRAFTS[drafts]
    config = replace(config, draft=None) if spec is None else replace(config, speculation=spec)
    expected, _ = answers(config, asked())
    found, _ = answers(on_device(config), asked())
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    if spec is not None:
        assert any(entry.accepted for result in found for entry in result.entries), "no draft was ever right"


def test_latents_in_fp8_have_the_plain_engines_tokens(tmp_path: Path) -> None:
    config = replace(write(tmp_path, V3), speculation=CHAIN, kv_cache_dtype="fp8_e4m3")
    expected, _ = answers(config, asked())
    found, _ = answers(on_device(config), asked())
    assert tokens(found) == tokens(expected)


def test_prompts_in_the_expanded_form_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the target and of its head, whether it pays or not."""
    config = replace(write(tmp_path, V3), speculation=CHAIN)
    expected, _ = answers(config, asked())
    spans: list[QuerySpan] = []

    def pays(self: ExpandedPrompts, planned: Sequence[QuerySpan]) -> bool:
        spans.extend(planned)
        return True

    monkeypatch.setattr(ExpandedPrompts, "pays", pays)
    found, _ = answers(on_device(config), asked())
    assert tokens(found) == tokens(expected)
    assert any(span.start for span in spans) and len(spans) >= 3, "chunks with and without a prefix"


@dataclass
class Played:
    """In place of a graph: the same launches, kernel by kernel."""

    launches: Callable[[], object]

    def replay(self) -> None:
        self.launches()


def played(executor: StepExecutor, shapes: Sequence[StepShape], _: object) -> None:
    """In place of `capture`: graphs of prompts, which read their room whatever was planned since."""
    prompts = executor.state.prompts
    assert isinstance(prompts, ExpandedPrompts)
    for shape in shapes:
        room = prompts.room(shape.chunk, shape.prompts)
        program = StepProgram(executor.state, shape, executor._inputs, executor._results, planned=True)

        def forward(layout: Any = room.layout, program: StepProgram = program) -> None:
            prompts._layout = layout
            program.forward()

        def rest(program: StepProgram = program) -> None:
            program.rest(program.choose())

        parts = Played(forward), Played(rest)
        executor._captured[shape] = CapturedStep(program, *parts, room)  # type: ignore[arg-type]


def test_prompts_that_a_graph_plans_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer rows than the graph has; with a head, which follows them."""
    config = replace(write(tmp_path, V3), speculation=CHAIN)
    expected, _ = answers(config, asked())
    begin, replayed = StepExecutor.begin, []

    def with_chunks(loaded: EngineSpec) -> GraphBuckets:
        return replace(buckets_of(loaded), lone_chunks=(24,))

    def noted(self: StepExecutor, step: StepInput) -> None:
        begin(self, step)
        if self._replayed is not None:
            replayed.append((step.shape.chunk, sum(span.count for span in step.spans)))

    monkeypatch.setattr(device_build, "buckets_of", with_chunks)
    monkeypatch.setattr(device_build, "captured", lambda loaded: list(with_chunks(loaded).captured()))
    monkeypatch.setattr(StepExecutor, "capture", played)
    monkeypatch.setattr(StepExecutor, "begin", noted)
    monkeypatch.setattr(ExpandedPrompts, "pays", lambda self, spans: True)
    found, _ = answers(on_device(config), asked())
    assert tokens(found) == tokens(expected)
    assert replayed and any(rows < chunk for chunk, rows in replayed), replayed
