"""Architectures that no server here can run, known by config.json alone: why, and what a user can do.

It loads neither torch nor transformers, so that a refusal takes no seconds and comes before a download.
"""

from __future__ import annotations

from eyas.engine.checkpoint.values import Raw, words

ITSELF = "transformers itself runs it (`transformers serve`)"
OWN_FILE = "or give it a file (docs/adding-a-model.md)"
NO_DECODER = "it does not write text token by token (a decoder's name ends in ForCausalLM): take a decoder"

STATE_SPACE = frozenset({"rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"})
"""Model types none of whose layers attends, and that have no file here."""

HYBRIDS = frozenset({"minimax", "recurrent_gemma", "zamba", "zamba2", "zaya"})
"""Model types some of whose layers keep a state, and that have no file here."""

ENCODER_DECODERS = frozenset(
    {"bart", "blenderbot", "led", "longt5", "m2m_100", "marian", "mbart", "mt5", "nllb-moe", "pegasus"}
    | {"prophetnet", "speech_to_text", "switch_transformers", "t5", "t5gemma", "umt5", "whisper"}
)
"""Those whose config.json may leave `is_encoder_decoder` out."""

MISTRALS_OWN = "Mistral's own format (params.json, consolidated*.safetensors), which is not read"

_SERVED_HYBRIDS = "Falcon-H1, Granite 4, Jamba, Kimi-Linear, LFM2, Nemotron-H or Qwen3.5"
_SERVED_STATES = "Falcon-Mamba, Mamba or Mamba-2"
_NO_TEXT = ("Classification", "ForMaskedLM", "ForPreTraining", "Model", "QuestionAnswering")
_LARGE_3 = "MistralLarge3ForCausalLM"


def reason(raw: Raw) -> str:
    """Why an architecture without a file is not served, with a colon before what can be done.

    "": its config.json does not show that it cannot be. Raises ValueError for `architectures` that is no list
    of names.
    """
    architecture, kind = next(iter(words(raw, "architectures")), ""), raw.get("model_type")
    if raw.get("is_encoder_decoder") is True or kind in ENCODER_DECODERS:
        return (
            f"it is an encoder-decoder ({kind}), and Eyas serves decoders alone: take a decoder, or let "
            "transformers run it (its `generate`)"
        )
    if kind in STATE_SPACE:
        return (
            f"none of its layers attends (a state-space model, {kind}), and no file here has its states: "
            f"take {_SERVED_STATES}, or a decoder that attends; {ITSELF}, {OWN_FILE}"
        )
    if kind in HYBRIDS:
        return (
            f"some of its layers keep a running state ({kind}), which Eyas computes for hybrids with a file "
            f"alone: take {_SERVED_HYBRIDS}; {ITSELF}, {OWN_FILE}"
        )
    if architecture == _LARGE_3:
        return (
            f"Mistral Large 3 has {MISTRALS_OWN}: take a copy converted to transformers' "
            "Mistral4ForCausalLM, which computes the same"
        )
    if architecture.endswith(_NO_TEXT) and not architecture.endswith("LMHeadModel"):
        return NO_DECODER
    return ""
