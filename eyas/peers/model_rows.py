"""Flags of vLLM and SGLang that concern what is served: a model, its tokenizer, its files and its name.

Rows of `eyas.peers.table`, which lists them all.
"""

from __future__ import annotations

from eyas.peers import values
from eyas.peers.meanings import (
    BOTH,
    MANY,
    NONE,
    SGLANG,
    VLLM,
    AcceptedFlag,
    AcceptedValues,
    AcceptedWith,
    AliasFlag,
    FlagRow,
    RefusedFlag,
    SameFlag,
)

_DTYPES = values.spelled({"half": "float16", "float": "float32"})
_KV_DTYPES = values.spelled({"fp8": "fp8_e4m3", "bfloat16": "auto", "bf16": "auto"})
_FORMATS = values.spelled({"safetensors": "auto", "hf": "auto"})
_IMPLEMENTATIONS = values.spelled({"vllm": "eyas", "sglang": "eyas"})
_TEXT_ONLY = "Eyas serves text alone: leave it out"
_NAME_ADAPTERS = "name some: --lora NAME=DIR, or --lora-dir DIR for those that callers load"
_ALL_IN_MEMORY = "the host's memory holds all that are loaded"
_OWN_COPY = "change config.json in a copy of the model's folder"
_GENERATES = "Eyas generates text: serve other models elsewhere"

MODEL = (
    FlagRow(BOTH, ("--model",), SameFlag(note="or as the first word: `eyas serve DIR`"), example="m"),
    FlagRow(SGLANG, ("--model-path",), AliasFlag("--model"), example="m"),
    FlagRow(BOTH, ("--served-model-name",), SameFlag(), example="m"),
    FlagRow(BOTH, ("--load-format",), SameFlag(_FORMATS, "`safetensors` is `auto`"), example="safetensors"),
    FlagRow(
        BOTH, ("--dtype",), SameFlag(_DTYPES, "`half` and `float` too; float32 on a CPU"), example="half"
    ),
    FlagRow(
        BOTH,
        ("--kv-cache-dtype",),
        SameFlag(_KV_DTYPES, "`fp8` is `fp8_e4m3`"),
        example="fp8",
    ),
    FlagRow(
        VLLM, ("--max-model-len",), AliasFlag("--context-length", values.size, "8k and 8K too"), example="64"
    ),
    FlagRow(SGLANG, ("--context-length",), SameFlag(values.size), example="64"),
    FlagRow(BOTH, ("--device",), SameFlag(note="cpu unless it is given"), example="cpu"),
    FlagRow(BOTH, ("--generation-config",), SameFlag(), example="auto"),
    FlagRow(BOTH, ("--override-generation-config",), SameFlag(), example="{}"),
    FlagRow(
        SGLANG, ("--preferred-sampling-params",), AliasFlag("--override-generation-config"), example="{}"
    ),
    FlagRow(
        SGLANG,
        ("--sampling-defaults",),
        AliasFlag("--generation-config", values.spelled({"model": "auto", "openai": "vllm"})),
        example="model",
    ),
    FlagRow(VLLM, ("--seed",), SameFlag(), example="7"),
    FlagRow(SGLANG, ("--random-seed",), AliasFlag("--seed"), example="7"),
    FlagRow(
        BOTH,
        ("--trust-remote-code",),
        AcceptedFlag("no code of a model's folder is run; models are built in"),
        NONE,
    ),
    FlagRow(BOTH, ("--tokenizer",), SameFlag(note="a folder, or a name on the hub"), example="t"),
    FlagRow(SGLANG, ("--tokenizer-path",), AliasFlag("--tokenizer"), example="t"),
    FlagRow(
        BOTH,
        ("--tokenizer-mode",),
        AcceptedValues(("auto", "hf"), "the fast tokenizer", "leave it out"),
        example="auto",
    ),
    FlagRow(
        BOTH,
        ("--skip-tokenizer-init",),
        RefusedFlag("leave it out: prompts may be token ids all the same"),
        NONE,
    ),
    FlagRow(BOTH, ("--chat-template",), SameFlag(note="a file, or the template itself"), example="t"),
    FlagRow(
        VLLM,
        ("--chat-template-content-format",),
        AcceptedValues(("auto", "string"), "as the template takes it", "leave it out"),
        example="auto",
    ),
    FlagRow(
        VLLM,
        ("--trust-request-chat-template",),
        RefusedFlag("a request cannot bring a template: leave it out"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--response-role",),
        AcceptedValues(("assistant",), "so it is", "leave it out"),
        example="assistant",
    ),
    FlagRow(BOTH, ("--revision",), SameFlag(note="of a model on the hub"), example="main"),
    FlagRow(
        VLLM,
        ("--code-revision",),
        RefusedFlag("fetch that revision, and name its folder"),
        example="main",
    ),
    FlagRow(
        VLLM,
        ("--tokenizer-revision",),
        RefusedFlag("name it: `--tokenizer ORG/NAME@REVISION`"),
        example="main",
    ),
    FlagRow(BOTH, ("--download-dir",), RefusedFlag("name the model's folder, wherever it lies"), example="d"),
    FlagRow(VLLM, ("--hf-token",), RefusedFlag("set HF_TOKEN in the environment"), example="t"),
    FlagRow(VLLM, ("--hf-config-path",), RefusedFlag(_OWN_COPY), example="d"),
    FlagRow(VLLM, ("--hf-overrides", "--rope-scaling", "--rope-theta"), RefusedFlag(_OWN_COPY), example="{}"),
    FlagRow(SGLANG, ("--json-model-override-args",), RefusedFlag(_OWN_COPY), example="{}"),
    FlagRow(
        VLLM,
        ("--config-format",),
        AcceptedValues(("auto", "hf"), "config.json is read", "leave it out"),
        example="auto",
    ),
    FlagRow(
        BOTH,
        ("--model-impl",),
        SameFlag(_IMPLEMENTATIONS, "`vllm` and `sglang` are `eyas`"),
        example="auto",
    ),
    FlagRow(
        BOTH,
        ("--model-loader-extra-config",),
        RefusedFlag("leave it out: weights are read from safetensors"),
        example="{}",
    ),
    FlagRow(
        BOTH,
        ("--quantization", "-q"),
        RefusedFlag("leave it out: config.json says how weights are quantized"),
        example="fp8",
    ),
    FlagRow(
        VLLM,
        ("--task", "--runner"),
        AcceptedValues(("auto", "generate"), "so it is", _GENERATES),
        example="generate",
    ),
    FlagRow(VLLM, ("--convert",), AcceptedValues(("auto", "none"), "so it is", _GENERATES), example="none"),
    FlagRow(SGLANG, ("--is-embedding",), RefusedFlag(_GENERATES), NONE),
    FlagRow(VLLM, ("--pooler-config", "--override-pooler-config"), RefusedFlag(_GENERATES), example="{}"),
    FlagRow(
        VLLM,
        ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path"),
        RefusedFlag(_TEXT_ONLY),
        example="{}",
    ),
    FlagRow(
        VLLM, ("--mm-processor-cache-gb",), AcceptedValues(("0",), "there is none", _TEXT_ONLY), example="0"
    ),
    FlagRow(SGLANG, ("--enable-multimodal",), RefusedFlag(_TEXT_ONLY), NONE),
    FlagRow(BOTH, ("--language-model-only",), AcceptedFlag("Eyas serves text alone"), NONE),
    FlagRow(
        BOTH,
        ("--enable-lora",),
        AcceptedWith(("--lora", "--lora-dir", "--max-loras"), "there are adapters", _NAME_ADAPTERS),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--lora-modules",),
        AliasFlag("--lora", values.lora, "also as JSON: `name` and `path`"),
        MANY,
        example="a=/adapters/a",
    ),
    FlagRow(
        SGLANG,
        ("--lora-paths",),
        AliasFlag(
            "--lora", values.lora, "a path alone is its name, too; also as JSON: `lora_name` and `lora_path`"
        ),
        MANY,
        example="/adapters/a",
    ),
    FlagRow(VLLM, ("--max-loras",), SameFlag()),
    FlagRow(VLLM, ("--max-cpu-loras",), AcceptedFlag(_ALL_IN_MEMORY)),
    FlagRow(SGLANG, ("--max-loaded-loras",), AcceptedFlag(_ALL_IN_MEMORY)),
    FlagRow(BOTH, ("--max-lora-rank",), SameFlag()),
    FlagRow(SGLANG, ("--max-loras-per-batch",), AliasFlag("--max-loras")),
    FlagRow(
        SGLANG,
        ("--lora-backend", "--lora-target-modules"),
        AcceptedFlag("any linear module may have an update (experts: --lora-experts)"),
        MANY,
    ),
    FlagRow(
        SGLANG,
        ("--lora-eviction-policy",),
        AcceptedValues(("lru",), "so it is", "leave it out"),
        example="lru",
    ),
    FlagRow(VLLM, ("--lora-dtype",), AcceptedValues(("auto",), "so it is", "leave it out"), example="auto"),
    FlagRow(
        VLLM,
        ("--logits-processors",),
        RefusedFlag("a request's `logit_bias` and `structured_outputs` bound its tokens"),
        MANY,
    ),
    FlagRow(
        SGLANG,
        ("--enable-custom-logit-processor",),
        RefusedFlag("a request's `logit_bias` and `regex` bound its tokens"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--max-logprobs",),
        RefusedFlag("leave it out: what a request may ask for is in docs/api.md"),
        example="20",
    ),
)
