"""Flags of vLLM and SGLang that concern what is served: a model, its tokenizer, its files and its name.

Rows of `eyas.peers.table`, which knows them all.
"""

from __future__ import annotations

from eyas.peers import values
from eyas.peers.meanings import BOTH, MANY, NONE, SGLANG, VLLM, Alias, FlagRow, Only, Refused, Same, Usual

_DTYPES = values.spelled({"half": "float16", "float": "float32"})
_KV_DTYPES = values.spelled({"fp8": "fp8_e4m3", "bfloat16": "auto", "bf16": "auto"})
_FORMATS = values.spelled({"safetensors": "auto", "hf": "auto"})
_TEXT_ONLY = "Eyas serves text alone: leave it out"
_NO_ADAPTERS = "Eyas serves no adapters: merge the adapter into a copy of the model, and serve that"
_OWN_COPY = "change config.json in a copy of the model's folder"
_GENERATES = "Eyas generates text: serve other models elsewhere"

MODEL = (
    FlagRow(BOTH, ("--model",), Same(note="or as the first word: `eyas serve DIR`"), example="m"),
    FlagRow(SGLANG, ("--model-path",), Alias("--model"), example="m"),
    FlagRow(BOTH, ("--served-model-name",), Same(), example="m"),
    FlagRow(BOTH, ("--load-format",), Same(_FORMATS, "`safetensors` is `auto`"), example="safetensors"),
    FlagRow(BOTH, ("--dtype",), Same(_DTYPES, "`half` and `float` too; float32 on a CPU"), example="half"),
    FlagRow(
        BOTH,
        ("--kv-cache-dtype",),
        Same(_KV_DTYPES, "`fp8` is `fp8_e4m3`; for latent attention on a GPU"),
        example="fp8",
    ),
    FlagRow(
        VLLM, ("--max-model-len",), Alias("--context-length", values.size, "8k and 8K too"), example="64"
    ),
    FlagRow(SGLANG, ("--context-length",), Same(values.size), example="64"),
    FlagRow(BOTH, ("--device",), Same(note="cpu unless it is given"), example="cpu"),
    FlagRow(BOTH, ("--generation-config",), Same(), example="auto"),
    FlagRow(BOTH, ("--override-generation-config",), Same(), example="{}"),
    FlagRow(SGLANG, ("--preferred-sampling-params",), Alias("--override-generation-config"), example="{}"),
    FlagRow(
        SGLANG,
        ("--sampling-defaults",),
        Alias("--generation-config", values.spelled({"model": "auto", "openai": "vllm"})),
        example="model",
    ),
    FlagRow(VLLM, ("--seed",), Same(), example="7"),
    FlagRow(SGLANG, ("--random-seed",), Alias("--seed"), example="7"),
    FlagRow(
        BOTH, ("--trust-remote-code",), Usual("no code of a model's folder is run; models are built in"), NONE
    ),
    FlagRow(BOTH, ("--tokenizer",), Same(note="a folder, or a name on the hub"), example="t"),
    FlagRow(SGLANG, ("--tokenizer-path",), Alias("--tokenizer"), example="t"),
    FlagRow(
        BOTH,
        ("--tokenizer-mode",),
        Only(("auto", "hf"), "the fast tokenizer", "leave it out"),
        example="auto",
    ),
    FlagRow(
        BOTH, ("--skip-tokenizer-init",), Refused("leave it out: prompts may be token ids all the same"), NONE
    ),
    FlagRow(BOTH, ("--chat-template",), Same(note="a file, or the template itself"), example="t"),
    FlagRow(
        VLLM,
        ("--chat-template-content-format",),
        Only(("auto", "string"), "as the template takes it", "leave it out"),
        example="auto",
    ),
    FlagRow(
        VLLM,
        ("--trust-request-chat-template",),
        Refused("a request cannot bring a template: leave it out"),
        NONE,
    ),
    FlagRow(
        VLLM, ("--response-role",), Only(("assistant",), "so it is", "leave it out"), example="assistant"
    ),
    FlagRow(BOTH, ("--revision",), Same(note="of a model on the hub"), example="main"),
    FlagRow(
        VLLM,
        ("--code-revision",),
        Refused("fetch that revision, and name its folder"),
        example="main",
    ),
    FlagRow(
        VLLM, ("--tokenizer-revision",), Refused("name it: `--tokenizer ORG/NAME@REVISION`"), example="main"
    ),
    FlagRow(BOTH, ("--download-dir",), Refused("name the model's folder, wherever it lies"), example="d"),
    FlagRow(VLLM, ("--hf-token",), Refused("set HF_TOKEN in the environment"), example="t"),
    FlagRow(VLLM, ("--hf-config-path",), Refused(_OWN_COPY), example="d"),
    FlagRow(VLLM, ("--hf-overrides", "--rope-scaling", "--rope-theta"), Refused(_OWN_COPY), example="{}"),
    FlagRow(SGLANG, ("--json-model-override-args",), Refused(_OWN_COPY), example="{}"),
    FlagRow(
        VLLM,
        ("--config-format",),
        Only(("auto", "hf"), "config.json is read", "leave it out"),
        example="auto",
    ),
    FlagRow(BOTH, ("--model-impl",), Only(("auto",), "models are built in", "leave it out"), example="auto"),
    FlagRow(
        BOTH,
        ("--model-loader-extra-config",),
        Refused("leave it out: weights are read from safetensors"),
        example="{}",
    ),
    FlagRow(
        BOTH,
        ("--quantization", "-q"),
        Refused("leave it out: config.json says how weights are quantized (FP8 in blocks)"),
        example="fp8",
    ),
    FlagRow(
        VLLM, ("--task", "--runner"), Only(("auto", "generate"), "so it is", _GENERATES), example="generate"
    ),
    FlagRow(VLLM, ("--convert",), Only(("auto", "none"), "so it is", _GENERATES), example="none"),
    FlagRow(SGLANG, ("--is-embedding",), Refused(_GENERATES), NONE),
    FlagRow(VLLM, ("--pooler-config", "--override-pooler-config"), Refused(_GENERATES), example="{}"),
    FlagRow(
        VLLM,
        ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path"),
        Refused(_TEXT_ONLY),
        example="{}",
    ),
    FlagRow(VLLM, ("--mm-processor-cache-gb",), Only(("0",), "there is none", _TEXT_ONLY), example="0"),
    FlagRow(SGLANG, ("--enable-multimodal",), Refused(_TEXT_ONLY), NONE),
    FlagRow(BOTH, ("--language-model-only",), Usual("Eyas serves text alone"), NONE),
    FlagRow(BOTH, ("--enable-lora",), Refused(_NO_ADAPTERS), NONE),
    FlagRow(VLLM, ("--lora-modules",), Refused(_NO_ADAPTERS), MANY),
    FlagRow(SGLANG, ("--lora-paths",), Refused(_NO_ADAPTERS), MANY),
    FlagRow(VLLM, ("--max-loras", "--max-cpu-loras"), Refused(_NO_ADAPTERS)),
    FlagRow(BOTH, ("--max-lora-rank",), Refused(_NO_ADAPTERS)),
    FlagRow(SGLANG, ("--max-loras-per-batch", "--lora-backend"), Refused(_NO_ADAPTERS)),
    FlagRow(
        VLLM,
        ("--logits-processors",),
        Refused("a request's `logit_bias` and `structured_outputs` bound its tokens"),
        MANY,
    ),
    FlagRow(
        SGLANG,
        ("--enable-custom-logit-processor",),
        Refused("a request's `logit_bias` and `regex` bound its tokens"),
        NONE,
    ),
    FlagRow(
        VLLM,
        ("--max-logprobs",),
        Refused("leave it out: what a request may ask for is in docs/api.md"),
        example="20",
    ),
)
