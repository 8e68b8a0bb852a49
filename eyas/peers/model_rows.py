"""Flags of vLLM and SGLang that concern what is served: a model, its tokenizer, its files and its name.

Rows of `eyas.peers.table`, which knows them all.
"""

from __future__ import annotations

from eyas.peers import values
from eyas.peers.meanings import BOTH, MANY, NONE, SGLANG, VLLM, Alias, Only, Refused, Row, Same, Usual

_DTYPES = values.spelled({"half": "float16", "float": "float32"})
_KV_DTYPES = values.spelled({"fp8": "fp8_e4m3", "bfloat16": "auto", "bf16": "auto"})
_FORMATS = values.spelled({"safetensors": "auto", "hf": "auto"})
_TEXT_ONLY = "Eyas serves text alone: leave it out"
_NO_ADAPTERS = "Eyas serves no adapters: merge the adapter into a copy of the model, and serve that"
_OWN_COPY = "change config.json in a copy of the model's folder"
_GENERATES = "Eyas generates text: serve other models elsewhere"

MODEL = (
    Row(BOTH, ("--model",), Same(note="or as the first word: `eyas serve DIR`"), example="m"),
    Row(SGLANG, ("--model-path",), Alias("--model"), example="m"),
    Row(BOTH, ("--served-model-name",), Same(), example="m"),
    Row(BOTH, ("--load-format",), Same(_FORMATS, "`safetensors` is `auto`"), example="safetensors"),
    Row(BOTH, ("--dtype",), Same(_DTYPES, "`half` and `float` too; float32 on a CPU"), example="half"),
    Row(
        BOTH,
        ("--kv-cache-dtype",),
        Same(_KV_DTYPES, "`fp8` is `fp8_e4m3`; for latent attention on a GPU"),
        example="fp8",
    ),
    Row(VLLM, ("--max-model-len",), Alias("--context-length", values.size, "8k and 8K too"), example="64"),
    Row(SGLANG, ("--context-length",), Same(values.size), example="64"),
    Row(BOTH, ("--device",), Same(note="cpu unless it is given"), example="cpu"),
    Row(BOTH, ("--generation-config",), Same(), example="auto"),
    Row(BOTH, ("--override-generation-config",), Same(), example="{}"),
    Row(SGLANG, ("--preferred-sampling-params",), Alias("--override-generation-config"), example="{}"),
    Row(
        SGLANG,
        ("--sampling-defaults",),
        Alias("--generation-config", values.spelled({"model": "auto", "openai": "vllm"})),
        example="model",
    ),
    Row(VLLM, ("--seed",), Same(), example="7"),
    Row(SGLANG, ("--random-seed",), Alias("--seed"), example="7"),
    Row(
        BOTH, ("--trust-remote-code",), Usual("no code of a model's folder is run; models are built in"), NONE
    ),
    Row(BOTH, ("--tokenizer",), Same(note="a folder, or a name on the hub"), example="t"),
    Row(SGLANG, ("--tokenizer-path",), Alias("--tokenizer"), example="t"),
    Row(
        BOTH,
        ("--tokenizer-mode",),
        Only(("auto", "hf"), "the fast tokenizer", "leave it out"),
        example="auto",
    ),
    Row(
        BOTH, ("--skip-tokenizer-init",), Refused("leave it out: prompts may be token ids all the same"), NONE
    ),
    Row(BOTH, ("--chat-template",), Same(note="a file, or the template itself"), example="t"),
    Row(
        VLLM,
        ("--chat-template-content-format",),
        Only(("auto", "string"), "as the template takes it", "leave it out"),
        example="auto",
    ),
    Row(
        VLLM,
        ("--trust-request-chat-template",),
        Refused("a request cannot bring a template: leave it out"),
        NONE,
    ),
    Row(VLLM, ("--response-role",), Only(("assistant",), "so it is", "leave it out"), example="assistant"),
    Row(BOTH, ("--revision",), Same(note="of a model on the hub"), example="main"),
    Row(
        VLLM,
        ("--code-revision",),
        Refused("fetch that revision, and name its folder"),
        example="main",
    ),
    Row(VLLM, ("--tokenizer-revision",), Refused("name it: `--tokenizer ORG/NAME@REVISION`"), example="main"),
    Row(BOTH, ("--download-dir",), Refused("name the model's folder, wherever it lies"), example="d"),
    Row(VLLM, ("--hf-token",), Refused("set HF_TOKEN in the environment"), example="t"),
    Row(VLLM, ("--hf-config-path",), Refused(_OWN_COPY), example="d"),
    Row(VLLM, ("--hf-overrides", "--rope-scaling", "--rope-theta"), Refused(_OWN_COPY), example="{}"),
    Row(SGLANG, ("--json-model-override-args",), Refused(_OWN_COPY), example="{}"),
    Row(
        VLLM,
        ("--config-format",),
        Only(("auto", "hf"), "config.json is read", "leave it out"),
        example="auto",
    ),
    Row(BOTH, ("--model-impl",), Only(("auto",), "models are built in", "leave it out"), example="auto"),
    Row(
        BOTH,
        ("--model-loader-extra-config",),
        Refused("leave it out: weights are read from safetensors"),
        example="{}",
    ),
    Row(
        BOTH,
        ("--quantization", "-q"),
        Refused("leave it out: config.json says how weights are quantized (FP8 in blocks)"),
        example="fp8",
    ),
    Row(VLLM, ("--task", "--runner"), Only(("auto", "generate"), "so it is", _GENERATES), example="generate"),
    Row(VLLM, ("--convert",), Only(("auto", "none"), "so it is", _GENERATES), example="none"),
    Row(SGLANG, ("--is-embedding",), Refused(_GENERATES), NONE),
    Row(VLLM, ("--pooler-config", "--override-pooler-config"), Refused(_GENERATES), example="{}"),
    Row(
        VLLM,
        ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path"),
        Refused(_TEXT_ONLY),
        example="{}",
    ),
    Row(VLLM, ("--mm-processor-cache-gb",), Only(("0",), "there is none", _TEXT_ONLY), example="0"),
    Row(SGLANG, ("--enable-multimodal",), Refused(_TEXT_ONLY), NONE),
    Row(BOTH, ("--language-model-only",), Usual("Eyas serves text alone"), NONE),
    Row(BOTH, ("--enable-lora",), Refused(_NO_ADAPTERS), NONE),
    Row(VLLM, ("--lora-modules",), Refused(_NO_ADAPTERS), MANY),
    Row(SGLANG, ("--lora-paths",), Refused(_NO_ADAPTERS), MANY),
    Row(VLLM, ("--max-loras", "--max-cpu-loras"), Refused(_NO_ADAPTERS)),
    Row(BOTH, ("--max-lora-rank",), Refused(_NO_ADAPTERS)),
    Row(SGLANG, ("--max-loras-per-batch", "--lora-backend"), Refused(_NO_ADAPTERS)),
    Row(
        VLLM,
        ("--logits-processors",),
        Refused("a request's `logit_bias` and `structured_outputs` bound its tokens"),
        MANY,
    ),
    Row(
        SGLANG,
        ("--enable-custom-logit-processor",),
        Refused("a request's `logit_bias` and `regex` bound its tokens"),
        NONE,
    ),
    Row(
        VLLM,
        ("--max-logprobs",),
        Refused("leave it out: what a request may ask for is in docs/api.md"),
        example="20",
    ),
)
