"""Llama against transformers, and the logits of all families bit for bit against themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.engine.batch.spans import QuerySpan
from tests.unit.crossed import crossed
from tests.unit.families import SAMPLES, write_family
from tests.unit.model_rig import Rig
from tests.unit.tiny import write_tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa_tied": {},
    "mha_untied": {"kv_heads": 4, "tied": False},
    "mqa_linear": {"kv_heads": 1, "rope": LINEAR, "tied": False},
    "three_queries_a_key_llama3": {"heads": 6, "hidden": 60, "rope": LLAMA3},
    "odd_head_dim": {"head_dim": 22, "rope": LLAMA3},
    "wide_group": {"heads": 20, "kv_heads": 2, "head_dim": 12, "hidden": 60, "ffn": 77, "vocab": 131},
}


def prompt(length: int, vocab: int = 131, seed: int = 0) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    folder = write_tiny_llama(tmp_path, layers=3, **VARIANTS[name])
    tokens = prompt(150)
    rig = Rig(folder)
    got = rig.logits([QuerySpan(rig.table(150), 0, 150)], tokens)
    with torch.no_grad():
        wanted = reference(folder)(torch.tensor([tokens])).logits[0]
    assert (got - wanted).abs().max() < 1e-4
    assert got.std() > 0.1


def test_a_position_off_by_one_is_detected(tmp_path: Path) -> None:
    """Power check: RoPE is relative, so one row shifted against the others must move the logits visibly."""
    rig = Rig(write_tiny_llama(tmp_path, layers=3))
    tokens, table = prompt(40), rig.table(48)
    right = rig.logits([QuerySpan(table, 0, 40)], tokens)[-1]
    tree = QuerySpan(table, 39, 1, ((39,),))
    assert torch.equal(rig.logits([tree], tokens[-1:])[0], right)
    shifted = QuerySpan(table, 38, 1, ((38, 39),))
    assert torch.equal(rig.logits([shifted], tokens[-1:])[0], right)
    late = QuerySpan(table, 39, 1, ((39, 39),))  # the same keys, but a position too far
    assert (rig.logits([late], tokens[-1:])[0] - right).abs().max() > 1e-2


@pytest.mark.parametrize(
    "length", [1, 65, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 17, 64, 300, 1000))]
)
def test_greedy_continuations_equal_transformers(tmp_path: Path, length: int) -> None:
    folder = write_tiny_llama(tmp_path, layers=3)
    tokens, new = prompt(length, 256, seed=length), 12
    rig = Rig(folder)
    table = rig.table(length + new)
    got = [int(rig.logits([QuerySpan(table, 0, length)], tokens)[-1].argmax())]
    while len(got) < new:
        got.append(int(rig.logits([QuerySpan(table, length + len(got) - 1, 1)], got[-1:])[0].argmax()))
    model = reference(folder)
    wanted = model.generate(
        torch.tensor([tokens]), max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=-1
    )
    assert got == wanted[0, length:].tolist()


def test_captured_states_are_layer_inputs(tmp_path: Path) -> None:
    """transformers' hidden_states[i] is what enters layer i; the state leaving the last layer is normed."""
    folder = write_tiny_llama(tmp_path, layers=8)
    tokens = prompt(20)
    rig = Rig(folder)
    hidden, captured = rig.forward([QuerySpan(rig.table(20), 0, 20)], tokens, capture=(0, 2, 4, 5))
    model = reference(folder)
    with torch.no_grad():
        states = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    wanted = torch.cat([states[i][0] for i in (0, 2, 4, 5)], dim=-1)
    assert (captured - wanted).abs().max() < 1e-4
    with torch.no_grad():
        assert (model.model.norm(hidden) - states[-1][0]).abs().max() < 1e-4


LENGTH = 203


@pytest.fixture(
    scope="module",
    params=["odd_head_dim", "gemma2", "deepseek_v3"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "gqa_tied",
            "wide_group",
            "gemma3",
            "mistral",
            "qwen3",
            "qwen3_moe",
            "qwen2_moe",
            "gpt_oss",
            "cohere2",
            "apertus",
            "hunyuan",
            "ministral3",
        )
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if request.param in SAMPLES:
        write_family(folder, request.param)
        return folder
    return write_tiny_llama(folder, layers=3, **VARIANTS[request.param])


@pytest.fixture
def rig(folder: Path) -> Rig:
    return Rig(folder)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return prompt(LENGTH)


@pytest.fixture(scope="module")
def alone(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Logits of every row, one forward a row: what all other ways must reproduce to the bit."""
    rig = Rig(folder)
    table = rig.table(LENGTH)
    return torch.cat([rig.logits([QuerySpan(table, i, 1)], tokens[i : i + 1]) for i in range(LENGTH)])


def test_bits_of_a_whole_prompt(rig: Rig, tokens: list[int], alone: torch.Tensor) -> None:
    assert torch.equal(rig.logits([QuerySpan(rig.table(LENGTH), 0, LENGTH)], tokens), alone)


@pytest.mark.parametrize("chunk", [5, pytest.param(64, marks=pytest.mark.slow), 71])
def test_bits_of_chunks(rig: Rig, tokens: list[int], alone: torch.Tensor, chunk: int) -> None:
    table = rig.table(LENGTH)
    parts = [
        rig.logits([QuerySpan(table, i, min(chunk, LENGTH - i))], tokens[i : i + chunk])
        for i in range(0, LENGTH, chunk)
    ]
    assert torch.equal(torch.cat(parts), alone)


def test_bits_in_company(rig: Rig, tokens: list[int], alone: torch.Tensor) -> None:
    """A decode row, a chain verify and a prefill chunk of one text share a step with two others."""
    other = prompt(400, seed=1)
    tables = [rig.table(LENGTH) for _ in range(3)]
    for table, known in zip(tables, (150, 127, 70), strict=True):
        rig.logits([QuerySpan(table, 0, known)], tokens[:known])
    spans = [
        QuerySpan(rig.table(90), 0, 90),
        QuerySpan(tables[0], 150, 1),
        QuerySpan(tables[1], 127, 6),
        QuerySpan(rig.table(310), 0, 310),
        QuerySpan(tables[2], 70, 100),
    ]
    step = other[:90] + tokens[150:151] + tokens[127:133] + other[90:400] + tokens[70:170]
    logits = rig.logits(spans, step)
    assert torch.equal(logits[90:91], alone[150:151])
    assert torch.equal(logits[91:97], alone[127:133])
    assert torch.equal(logits[-100:], alone[70:170])


@pytest.mark.parametrize(
    ("order", "start"),
    crossed(
        [(0, 1, 2, 3, 4, 5, 6), (0, 4, 1, 5, 2, 6, 3)],
        [1, 62, 64, 190],
        quick=lambda order, start: start == (64 if order[1] == 1 else 62),
    ),
)
def test_bits_of_a_tree(
    rig: Rig, tokens: list[int], alone: torch.Tensor, start: int, order: tuple[int, ...]
) -> None:
    """Nodes 0..3 follow the text, 4..6 branch off it; siblings lie in the pool in any order."""
    parents = {0: None, 1: 0, 2: 1, 3: 2, 4: 0, 5: 4, 6: 1}
    drafts = {i: tokens[start + i] for i in range(4)}
    drafts |= {i: (tokens[start + 1] + i) % 131 for i in (4, 5, 6)}
    place = {node: start + i for i, node in enumerate(order)}

    def lineage(node: int | None) -> list[int]:
        return [] if node is None else [*lineage(parents[node]), node]

    table = rig.table(LENGTH)
    rig.logits([QuerySpan(table, 0, start)], tokens[:start])
    paths = tuple(tuple(place[n] for n in lineage(node)) for node in order)
    logits = rig.logits([QuerySpan(table, start, len(order), paths)], [drafts[node] for node in order])
    for i, node in enumerate(order):
        if node < 4:
            assert torch.equal(logits[i], alone[start + node])
        else:
            text = tokens[:start] + [drafts[n] for n in lineage(node)]
            branch = rig.logits([QuerySpan(rig.table(len(text)), 0, len(text))], text)
            assert torch.equal(logits[i], branch[-1])


def test_bits_after_recomputation_and_on_other_threads(
    rig: Rig, tokens: list[int], alone: torch.Tensor
) -> None:
    for threads in (2, 1):
        torch.set_num_threads(threads)
        table = rig.table(LENGTH)
        first = rig.logits([QuerySpan(table, 0, LENGTH)], tokens)
        again = rig.logits([QuerySpan(table, 100, LENGTH - 100)], tokens[100:])
        assert torch.equal(first, alone) and torch.equal(again, alone[100:])
        assert torch.equal(rig.logits([QuerySpan(table, 160, 1)], tokens[160:161])[0], alone[160])
