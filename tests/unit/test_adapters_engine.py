"""Whole engines with adapters: every answer is its own adapter's, to the bit, whatever shares its steps, how
its prompt is cut, whether it is drafted for, and how few slots there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from adapter_rig import write_adapter, write_merged
from loopback import Loopback, wait_all
from tiny import write_tiny_pair

from eyas.common.config import EngineConfig
from eyas.common.page_names import salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
PROMPT = tuple(range(1, 60))
MANY = 16
Answers = list[list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_tiny_pair(made, vocab=64)
    for seed in range(MANY):
        modules = () if seed % 3 else ("q_proj", "v_proj")
        write_adapter(made / f"a{seed}", made / "target", rank=4 + seed, seed=seed, modules=modules)
    return made


def _config(folder: Path, **changes: object) -> EngineConfig:
    made = EngineConfig(
        model=str(folder / "target"),
        draft=None,
        num_pages=256,
        chunk_tokens=24,
        pool_dir=str(folder),
        worker="unified",
        max_loras=4,
        max_lora_rank=32,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def _request(
    number: int, adapter: str, params: SamplingParams, prompt: Sequence[int] = PROMPT
) -> GenerationRequest:
    salt = salt_of("", adapter)
    return GenerationRequest(f"r{number}", tuple(prompt), params, adapter=adapter, salt=salt)


def _answers(cluster: Loopback, requests: Sequence[GenerationRequest], *, split: bool = False) -> Answers:
    results = [cluster.submit(request, split=split) for request in requests]
    wait_all(results, 60)
    return [result.tokens[0] for result in results]


def _alone(cluster: Loopback, requests: Sequence[GenerationRequest]) -> Answers:
    return [_answers(cluster, [request])[0] for request in requests]


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Loopback]:
    made = Loopback(_config(folder))
    yield made
    made.close()


def test_an_answer_is_the_merged_models(folder: Path, tmp_path: Path, cluster: Loopback) -> None:
    adapter = cluster.load_adapter(folder / "a1").id
    requests = [_request(number, adapter, params) for number, params in enumerate((GREEDY, SEEDED))]
    found = _alone(cluster, requests)
    write_merged(tmp_path / "merged", folder / "target", folder / "a1")
    merged = Loopback(_config(folder, model=str(tmp_path / "merged"), max_loras=0))
    expected = _alone(merged, [_request(number, "", p) for number, p in enumerate((GREEDY, SEEDED))])
    merged.close()
    assert found == expected


@pytest.mark.slow
def test_sixteen_adapters_in_four_slots_answer_as_alone(folder: Path, cluster: Loopback) -> None:
    adapters = ["", *(cluster.load_adapter(folder / f"a{seed}").id for seed in range(MANY))]
    requests = [
        _request(number, adapter, GREEDY if number % 2 else SEEDED, PROMPT[number % 7 :])
        for number, adapter in enumerate([*adapters, *adapters[:6]])
    ]
    together, alone = _answers(cluster, requests), _alone(cluster, requests)
    assert together == alone
    assert len({tuple(tokens) for tokens in alone}) > MANY
    load = cluster.workers["unified"].load
    assert load is not None
    counts = load.adapters
    assert len(counts.slots) == 4 and counts.loads >= MANY and not counts.waiting
