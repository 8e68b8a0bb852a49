"""`eyas plan --model`: what it says of memory is what a worker's pages, slots and page tables take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.cli import main
from eyas.common.errors import ConfigError
from eyas.engine.kernels.states.order import SolvedRows
from eyas.engine.models.table import read_model
from eyas.engine.states.store import LayerStates
from eyas.planning.memory import ModelMemory
from eyas.simulator.hardware import WindowedKv, WorkerHardware, example
from tests.window_pages import SEQUENCES, SHAPES, in_use

SIZES: dict[str, Any] = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
    },
    "Gemma 3 27B": {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 168,
        "max_position_embeddings": 131_072,
    },
    "Gemma 4 31B": {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
    },
    "Qwen3-Next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 262_144,
    },
}


def folder_of(top: Path, name: str, **changes: Any) -> Path:
    (top / "config.json").write_text(json.dumps(SIZES | MODELS[name] | changes))
    return top


def memory(top: Path, name: str, kv_dtype: str = "auto") -> tuple[ModelMemory, WorkerHardware]:
    made = ModelMemory.of(folder_of(top, name), 140.0, kv_dtype)
    return made, made.worker(example())


@pytest.mark.parametrize("length", [8192, 32768])
@pytest.mark.parametrize("name", ["gpt-oss-20b", "Gemma 3 27B"])
def test_sequences_hold_what_page_tables_give_them(tmp_path: Path, name: str, length: int) -> None:
    made, worker = memory(tmp_path, name)
    sights, row = SHAPES[name]
    counted = in_use(sights, length).decoding * row * 16
    assert SEQUENCES * worker.held(length) * made.token_bytes == pytest.approx(counted, rel=0.04)


@pytest.mark.parametrize(
    ("name", "layers", "row", "scales"),  # a scale of 4 bytes for 128 elements of a head, or fewer
    [
        ("gpt-oss-20b", 24, 2 * 8 * 64, 2 * 8),
        ("Gemma 3 27B", 70, 2 * 16 * 128, 2 * 16),  # eight of seven groups' places are no layer's
        ("Gemma 4 31B", 60, 2 * 16 * 256, 2 * 16 * 2),
        ("Qwen3-Next", 12, 2 * 2 * 256, 2 * 2 * 2),
    ],
)
def test_a_token_takes_its_rows_in_all_layers(
    tmp_path: Path, name: str, layers: int, row: int, scales: int
) -> None:
    assert memory(tmp_path, name)[0].token_bytes == 2 * layers * row
    eight = memory(tmp_path, name, "fp8_e4m3")[0]
    assert eight.token_bytes == layers * (row + 4 * scales)


def test_states_are_those_of_the_pool_and_of_its_kernels(tmp_path: Path) -> None:
    made, worker = memory(tmp_path, "Qwen3-Next")
    model = read_model(tmp_path, "dummy")
    assert model.delta is not None
    ring, parts = 128, model.delta.parts(128)
    stored = LayerStates(
        **{
            name: torch.empty(
                1, *sides, dtype=torch.float32 if name in ("states", "gates") else torch.bfloat16
            )
            for name, sides in parts.items()
        }
    )
    beside = SolvedRows.on(stored, model.delta)
    tensors = [getattr(stored, name) for name in parts]
    tensors += vars(beside).values()
    assert made.config.round_width <= 32 and ring == 128
    assert worker.state_bytes == 36 * sum(each.numel() * each.element_size() for each in tensors)
    assert made.slots == worker.max_running < made.config.max_running
    assert abs(made.states - made.room) < 2 * made.state_bytes, "half of the room"


def test_layers_with_windows_take_their_span_and_no_more() -> None:
    worker = example()
    assert worker.held(1000) == 1000
    half = WorkerHardware(**{**vars(worker), "windows": (WindowedKv(0.5, 224),)})
    assert [half.held(tokens) for tokens in (100, 224, 1000)] == [100, 224, 612]


def test_a_plan_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_of(tmp_path, "gpt-oss-20b")
    words = ["plan", "--model", str(tmp_path), "--gpus", "1", "--input-len", "32000", "--output-len", "768"]
    assert main([*words, "--slo", "ttft=9s,tpot=40ms", "--seconds", "2"]) == 0
    said = capsys.readouterr().out
    assert "49,152 bytes of KV for each token, 50% of them for the last 240 tokens alone" in said
    assert "sequences of 32,768 tokens, 773.6 MiB each" in said and "by --rates" in said


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder_of(tmp_path, "Qwen3-Next")
    with pytest.raises(
        ConfigError, match=r"takes beside its KV is .* GiB \(21\.\d of it are --state-slots\)"
    ):
        ModelMemory.of(tmp_path, 20.0, slots=80)
    assert ModelMemory.of(tmp_path, 20.0, slots=16).most_running == 16
