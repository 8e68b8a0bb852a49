"""A hybrid in exact arithmetic, kernels interpreted: tokens and log-probabilities follow a request alone.

As `test_exact_engine`, in half precision with `tensor_core`'s model of Hopper's matrix unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.unit import tensor_core
from tests.unit.exact_engines import Told, answers
from tests.unit.hybrid_rig import add_mtp_layer, write_hybrid
from tests.unit.hybrid_sizes import SIZES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("one_thread"),
]

TREE = SpeculationConfig(steps=1, topk=6, draft_tokens=7)


@pytest.fixture(autouse=True, scope="module")
def _matrix_unit() -> Iterator[None]:
    with tensor_core.hopper(folds=True):
        yield


def requests() -> list[GenerationRequest]:
    """Prompts that end before a position of a state and behind it; with noise."""
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(0, SIZES["vocab_size"], (70,), generator=draw).tolist()
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=4, logprobs=1, ignore_eos=True)
    return [GenerationRequest(str(cut), tuple(text[:cut]), params) for cut in (62, 69)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder: Path = tmp_path_factory.mktemp("hybrid")
    write_hybrid(folder / "model", "qwen3_5", **SIZES)
    add_mtp_layer(folder / "model", "layers.1.", SIZES["hidden_size"])
    return EngineConfig(
        model=str(folder / "model"),
        draft=None,
        dtype="float16",
        attention_backend="triton",
        prefill_attention_backend="triton",
        deterministic=True,
        overlap_schedule=True,
        num_pages=64,
        chunk_tokens=96,
        max_running=3,
        state_slots=8,
        pool_dir=str(folder),
        worker="unified",
    )


@pytest.fixture(scope="module")
def alone(config: EngineConfig) -> dict[str, Told]:
    """Each answer by an engine that has nothing else to do, drafts nothing, and takes a prompt at once."""
    return answers(config, [[request] for request in requests()])


def test_answers_in_a_batch_with_trees_are_those_of_a_request_alone(
    config: EngineConfig, alone: dict[str, Told]
) -> None:
    """In other chunks, and with accepted rows that move."""
    ways = replace(config, draft=config.model, speculation=TREE, chunk_tokens=40)
    assert answers(ways, [requests()]) == alone


def test_by_fast_arithmetic_they_are_not(config: EngineConfig, alone: dict[str, Told]) -> None:
    fast = replace(config, deterministic=False, chunk_tokens=40)
    assert answers(fast, [requests()]) != alone
