"""Models that transformers computes over Eyas' pages: tokens are those of a file, or of transformers alone,
whatever shares a step. What cannot be served so is refused in a sentence that says what to do.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from families import SAMPLES, VOCAB, write_family
from foreign_families import FOREIGN
from loopback import Loopback, split_configs, wait_all

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.checkpoint.weights import CPU
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.foreign.check import check_rows
from eyas.engine.models.foreign.weights import load
from eyas.engine.models.table import MODELS, read_model

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 8
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=NEW),
    "seeded": SamplingParams(temperature=1.0, seed=5, max_tokens=NEW),
}
LENGTHS = (3, 41, 150)  # a window of 40 is crossed; the last one is cut into chunks
BOTH_WAYS = (
    *("gemma2", "llama", "qwen2", "qwen3", "gemma3", "olmo2", "granite", "phi3_short", "smollm3", "mistral"),
    *("cohere", "mixtral", "gpt_oss", "gpt2", "gpt_neox"),
)


@pytest.fixture(autouse=True)
def known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, sample in FOREIGN.items():
        monkeypatch.setitem(SAMPLES, name, sample)
        monkeypatch.delitem(MODELS, sample.model, raising=False)


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in LENGTHS]


def config_of(folder: Path, impl: str = "transformers", **changes: Any) -> EngineConfig:
    plain = EngineConfig(
        model=str(folder / "model"),
        model_impl=impl,
        draft=None,
        num_pages=128,
        chunk_tokens=48,
        pool_dir=str(folder),
        worker="unified",
    )
    return replace(plain, **changes)


def asked(*kinds: str) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"{kind} {i}", prompt, SAMPLING[kind])
        for kind in kinds
        for i, prompt in enumerate(prompts())
    ]


def together(
    requests: list[GenerationRequest], *configs: EngineConfig, patience_s: float = 120.0
) -> list[list[int]]:
    cluster = Loopback(*configs)
    try:
        results = [cluster.submit(request, split=len(configs) > 1) for request in requests]
        wait_all(results, patience_s)
        return [result.tokens[0] for result in results]
    finally:
        cluster.close()


def one_by_one(requests: list[GenerationRequest], config: EngineConfig) -> tuple[list[list[int]], list[int]]:
    """Tokens, and how many of each prompt's were found in the cache."""
    cluster, tokens, cached = Loopback(config), [], []
    try:
        for request in requests:
            result = cluster.submit(request, split=False)
            wait_all([result], 120)
            tokens.append(result.tokens[0])
            cached.append(next(entry.timings for entry in result.entries if entry.timings).cached_tokens)
        return tokens, cached
    finally:
        cluster.close()


def generated(model: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gemma2" else pytest.mark.slow) for name in BOTH_WAYS]
)
def test_a_family_with_a_file_gives_the_same_tokens_both_ways(tmp_path: Path, name: str) -> None:
    """Greedy and seeded, in chunks, together and alone, of cached prefixes, and with drafts looked up."""
    write_family(tmp_path / "model", name)
    requests = asked("greedy", "seeded")
    expected = together(requests, config_of(tmp_path, "eyas"))
    assert together(requests, config_of(tmp_path)) == expected
    again, cached = one_by_one(requests, config_of(tmp_path))
    assert again == expected
    assert cached[5] == 144  # the long prompt, a second time
    ngram = SpeculationConfig(steps=3, draft_tokens=4, ngram=True)
    assert together(requests, config_of(tmp_path, speculation=ngram)) == expected


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "olmo" else pytest.mark.slow) for name in FOREIGN]
)
def test_a_family_without_a_file_is_served_as_transformers_generates(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_family(tmp_path / "model", name)
    expected = [generated(model, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS)
    requests = asked("greedy")
    with caplog.at_level(logging.WARNING):
        assert together(requests, config_of(tmp_path, "auto")) == expected
    assert f"transformers computes {SAMPLES[name].model}" in caplog.text
    prefill, decode = split_configs(config_of(tmp_path, "auto"))[:2]
    assert together(requests, prefill, decode) == expected
    ngram = SpeculationConfig(steps=3, draft_tokens=4, ngram=True)
    assert together(requests, config_of(tmp_path, speculation=ngram)) == expected
    assert one_by_one(requests, config_of(tmp_path))[0] == expected


def write_config(folder: Path, config: str, **changes: Any) -> Path:
    made = getattr(transformers, config)(**changes)
    if not made.architectures:
        made.architectures = [config.replace("TextConfig", "Config").replace("Config", "ForCausalLM")]
    made.save_pretrained(folder)
    return folder


SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "eos_token_id": None,
}


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        ("Qwen3NextConfig", {}, "or a hybrid with one"),
        ("BloomConfig", {}, "does not attend through the attention interface"),
        ("BertConfig", {"architectures": ["BertLMHeadModel"]}, "sees more than the tokens before its own"),
        ("HrmTextConfig", SMALL | {"architectures": ["HrmTextForCausalLM"]}, "runs layers more than once"),
        ("DeepseekV32Config", SMALL, "tells its attention indices"),
        ("LlamaConfig", {"architectures": ["OddForCausalLM"]}, "try a newer transformers, or give it a file"),
        (
            "LlamaConfig",
            {"architectures": ["OddForCausalLM"], "auto_map": {"AutoModelForCausalLM": "odd.Odd"}},
            "auto_map.*which Eyas never runs",
        ),
        ("OlmoConfig", SMALL | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized"),
        ("OlmoConfig", SMALL | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic RoPE"),
    ],
)
def test_what_transformers_cannot_do_over_pages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, changes: dict[str, Any], says: str
) -> None:
    folder = write_config(tmp_path, config, **changes)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    monkeypatch.delitem(MODELS, architecture, raising=False)
    with pytest.raises(ConfigError, match=f"is not supported: .*{says}"):
        read_model(folder, "dummy", impl="transformers")


@pytest.mark.parametrize(
    ("config", "changes", "says"),
    [
        (
            "LlamaConfig",
            SMALL | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "are quantized",
        ),
        ("Gemma3Config", {"architectures": ["Gemma3ForConditionalGeneration"]}, "it reads more than text"),
        ("BloomConfig", {"architectures": ["LlamaForCausalLM"]}, "model_type 'bloom' is another model's"),
    ],
)
def test_an_architecture_with_a_file_is_sent_to_it(
    tmp_path: Path, config: str, changes: dict[str, Any], says: str
) -> None:
    folder = write_config(tmp_path, config, **changes)
    with pytest.raises(ConfigError, match=f"is not supported there: .*{says}.*: leave --model-impl transf"):
        read_model(folder, "dummy", impl="transformers")


def test_without_a_file_and_without_transformers_an_architecture_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "OlmoConfig", **SMALL)
    assert read_model(folder, "dummy").foreign is not None
    with pytest.raises(ConfigError, match="OlmoForCausalLM .* is not supported.*--model-impl auto"):
        read_model(folder, "dummy", impl="eyas")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000 must be 4096 or less"),
        ({"num_hidden_layers": "two"}, "not one that transformers reads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 must be 1 or more"),
        ({"num_attention_heads": 0}, "num_attention_heads 0 must be 1 or more"),
        ({"head_dim": 0.5}, "head_dim 0.5 must be a whole number"),
        ({"head_dim": 3}, "describes no model to transformers: .*num_attention_heads 2, .*head_dim 3"),
        ({"hidden_size": 2**40}, "hidden_size 1099511627776 must be 16777216 or less"),
        ({"max_position_embeddings": -1}, "max_position_embeddings -1 must be 1 or more"),
        ({"hidden_act": "swoosh"}, "describes no model to transformers: hidden_act 'swoosh' is nothing that"),
        ({"model_type": "gpt2"}, "is not supported: model_type 'gpt2' is another model's: it must be olmo"),
        ({"architectures": []}, "is not supported: config.json has no architectures"),
        ({"eos_token_id": 4000}, "eos_token_id 4000 must be 130 or less"),
    ],
)
def test_values_that_make_no_model_are_one_sentence(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder = write_config(tmp_path, "OlmoConfig", **SMALL)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stated | changes))
    with pytest.raises(ConfigError, match=says):
        read_model(folder, "dummy")


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"draft": "head"}, "draft"),
        ({"tensor_parallel_size": 2}, "tensor-parallel-size"),
        ({"dp_attention": 2}, "dp-attention"),
        ({"deterministic": True}, "deterministic"),
    ],
)
def test_flags_that_do_not_work_there_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], flag: str
) -> None:
    write_config(tmp_path / "model", "OlmoConfig", **SMALL)
    config = config_of(tmp_path, "auto", load_format="dummy", **changes)
    with pytest.raises(ConfigError, match=f"--{flag}.*transformers computes OlmoForCausalLM"):
        EngineSpec.of(config)


def test_windows_chunks_caps_and_sinks_are_what_masks_and_arguments_say(tmp_path: Path) -> None:
    def layers(config: str, **changes: Any) -> list[tuple[int, float, bool]]:
        folder = write_config(tmp_path / config, config, **SMALL | changes)
        specs = [layer.attention for layer in read_model(folder, "dummy", impl="transformers").layers]
        return [(spec.window, spec.soft_cap, spec.sinks) for spec in specs]

    assert layers("Gemma2Config", sliding_window=40, num_key_value_heads=2) == [
        (40, 50.0, False),
        (0, 50.0, False),
    ]
    assert layers("GptOssConfig", sliding_window=24, num_key_value_heads=2) == [(24, 0, True), (0, 0, True)]
    assert layers("OlmoConfig") == [(0, 0.0, False)] * 2


@pytest.mark.parametrize(
    ("change", "says"),
    [("neighbours", "mixes neighbouring tokens"), ("positions", "counts positions by itself")],
)
def test_code_that_mixes_rows_is_found_out_before_it_serves(tmp_path: Path, change: str, says: str) -> None:
    target = read_model(write_config(tmp_path, "OlmoConfig", **SMALL), "dummy")
    model = load(target, CPU)
    check_rows(target, model, "cpu")

    def mixed(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (given[0] + given[0].roll(1, 1), *given[1:])

    def counted(_: Any, given: Any, said: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return given, said | {"position_ids": torch.arange(said["position_ids"].shape[1])[None]}

    if change == "neighbours":
        model.model.layers[0].mlp.register_forward_pre_hook(mixed)
    else:
        model.model.register_forward_pre_hook(counted, with_kwargs=True)
    with pytest.raises(ConfigError, match=says):
        check_rows(target, model, "cpu")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("missing", "has no tensor model.layers.1.mlp.up_proj.weight"),
        ("more", "tensor model.layers.1.mlp.up_proj.bias .* is none that OlmoForCausalLM reads"),
        ("broken", "tensor model.layers.1.mlp.up_proj.weight .* holds NaN or infinity"),
        ("shape", "model.layers.1.mlp.up_proj.weight .* has another shape"),
        ("whole numbers", "tensor model.layers.1.mlp.up_proj.weight is stored as I8: only F64, F32, F16"),
    ],
)
def test_weights_that_are_not_the_models_are_named(tmp_path: Path, change: str, says: str) -> None:
    from safetensors.torch import load_file, save_file

    write_family(tmp_path / "model", "olmo")
    path, name = tmp_path / "model" / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(path)
    if change == "missing":
        del tensors[name]
    elif change == "more":
        tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(96)
    elif change == "broken":
        tensors[name][3, 5] = torch.nan
    elif change == "whole numbers":
        tensors[name] = tensors[name].char()
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=says):
        load(read_model(tmp_path / "model"), CPU)


def test_two_ways_are_two_models_to_whoever_exchanges_pages(tmp_path: Path) -> None:
    write_config(tmp_path, "LlamaConfig", **SMALL)
    here, there = (read_model(tmp_path, "dummy", impl=impl) for impl in ("eyas", "transformers"))
    assert here.fingerprint != there.fingerprint
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"rms_norm_eps": 1e-3}))
    assert read_model(tmp_path, "dummy", impl="transformers").fingerprint != there.fingerprint


LAYERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"]},
}


def on_kernels(folder: Path, **changes: Any) -> EngineConfig:
    triton = {"attention_backend": "triton", "prefill_attention_backend": "triton"}
    small = {"max_running": 4, "chunk_tokens": 32, "num_pages": 32, "context_length": 256}
    return replace(config_of(folder), overlap_schedule=True, **triton, **small, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "minicpm3", "gpt_oss"])
def test_kernels_attend_for_transformers_as_plain_torch_does(tmp_path: Path, name: str) -> None:
    """Windows, caps, sinks, heads that are filled up; a chunk beside rounds, and drafts looked up."""
    write_family(tmp_path / "model", name, num_hidden_layers=2, **LAYERS.get(name, {}))
    few = {kind: msgspec.structs.replace(params, max_tokens=4) for kind, params in SAMPLING.items()}
    requests = [GenerationRequest(kind, prompts()[1], params) for kind, params in few.items()]
    expected = together(requests, config_of(tmp_path))
    assert together(requests, on_kernels(tmp_path), patience_s=600) == expected
    ngram = SpeculationConfig(steps=2, draft_tokens=3, ngram=True)
    assert together(requests, on_kernels(tmp_path, speculation=ngram), patience_s=600) == expected
