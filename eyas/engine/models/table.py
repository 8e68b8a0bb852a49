"""The models that there are: one line per architecture, naming the file that describes it.

It loads no torch, and a family only when it is named, so that a configuration can be judged without.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Protocol, cast

from eyas.common.errors import ConfigError
from eyas.common.model_folder import TextSource
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.folder import end_tokens, read_config, weight_files
from eyas.engine.checkpoint.values import Raw, words
from eyas.engine.models import unserved
from eyas.engine.models.keys import reading

MODELS = {
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "BambaForCausalLM": "bamba",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV32ForCausalLM": "glm_moe_dsa",
    "DeepseekV3ForCausalLM": "deepseek",  # R1, V3.1 and Kimi-K2 as well
    "Dots1ForCausalLM": "dots1",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4",
    "FalconForCausalLM": "falcon",
    "FalconH1ForCausalLM": "falcon_h1",
    "FalconMambaForCausalLM": "mamba",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GemmaForCausalLM": "gemma",
    "Glm46VForConditionalGeneration": "glm4v",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",  # GLM-4.5, 4.6 and 4.7
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",  # GLM-4.7-Flash
    "Glm4vForConditionalGeneration": "glm4v",  # GLM-4.1V and 4.6V-Flash
    "Glm4vMoeForConditionalGeneration": "glm4v",  # GLM-4.5V and 4.6V
    "GlmForCausalLM": "glm",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",  # GLM-5
    "GPT2LMHeadModel": "gpt2",
    "GPTJForCausalLM": "gptj",
    "GPTNeoXForCausalLM": "gpt_neox",  # Pythia as well
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granite_moe",
    "GraniteMoeHybridForCausalLM": "granite_hybrid",  # Granite 4
    "GraniteMoeSharedForCausalLM": "granite_moe",
    "HeliumForCausalLM": "helium",
    "HunYuanDenseV1ForCausalLM": "hunyuan",
    "HunYuanMoEV1ForCausalLM": "hunyuan_moe",
    "JambaForCausalLM": "jamba",
    "KimiLinearForCausalLM": "kimi_linear",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "Lfm2VlForConditionalGeneration": "lfm2",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "MiMoForCausalLM": "qwen2",  # its MTP layer is a draft head's
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "ministral3",
    "MinistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral3",
    "Mistral4ForCausalLM": "mistral4",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "NemotronForCausalLM": "nemotron",
    "NemotronHForCausalLM": "nemotron_h",  # Nemotron 3 as well
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "OlmoeForCausalLM": "olmoe",
    "OPTForCausalLM": "opt",
    "Phi3ForCausalLM": "phi3",  # Phi-4 and Phi-4-mini as well
    "PhiForCausalLM": "phi",
    "PhimoeForCausalLM": "phimoe",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",  # Qwen1.5-MoE as well
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
"""What a config.json calls an architecture, and the module of `eyas.engine.models` that is its `Family`."""


FOREIGN = "foreign.describe"
"""The module of what transformers computes; it loads torch."""


class Family(Protocol):
    """The module of a family."""

    def describe(self, raw: Raw, folder: Path) -> ModelConfig:
        """The model whose config.json is `raw`. Raises what `reading` makes sentences of, and ConfigError."""


def read_model(
    folder: Path | str, load_format: str = "auto", texts: TextSource | None = None, impl: str = "auto"
) -> ModelConfig:
    """The model of a Hugging Face folder. `texts`: where its tokenizer and template are (None: in it).

    `impl`: "eyas" or "transformers" computes it, or "auto": transformers what has no file here. Raises
    ConfigError if it cannot be served, in one sentence that says why.
    """
    folder = Path(folder)
    raw = read_config(folder)
    architecture = check_architecture(raw, folder, impl)
    if load_format != "dummy":
        weight_files(folder)
    module = MODELS.get(architecture, FOREIGN) if impl != "transformers" else FOREIGN
    family = cast(Family, importlib.import_module(f"eyas.engine.models.{module}"))
    with reading(folder, raw):
        config = family.describe(raw, folder)
    ends = end_tokens(folder, raw, config.vocab_size, texts)
    return dataclasses.replace(config, eos_token_ids=ends, load_format=load_format)


def check_architecture(raw: Raw, folder: Path | str, impl: str = "auto") -> str:
    """The architecture's name. Raises ConfigError for one that config.json alone shows not to be served.

    `folder`: what the error names.
    """
    with reading(folder):
        architecture = next(iter(words(raw, "architectures")), "(none named)")
        why = "" if architecture in MODELS else unserved.reason(raw)
    if why:
        raise ConfigError(f"architecture {architecture} of {folder} is not supported: {why}")
    if impl == "eyas" and architecture not in MODELS:
        known = ", ".join(sorted(MODELS))
        raise ConfigError(
            f"architecture {architecture} of {folder} is not supported ({known} are): "
            "a server lets transformers compute it if it can (--model-impl auto); else it takes a file and a "
            "line in a table, as docs/adding-a-model.md says"
        )
    return architecture
