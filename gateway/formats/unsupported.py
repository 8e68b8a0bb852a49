"""Fields of OpenAI's, vLLM's and SGLang's APIs that this server does not support, and why.

Data only. A value that asks for nothing is accepted; any other gets a 400 with the reason. A field that is
neither here nor declared in a body is ignored and named to the caller.
"""

from __future__ import annotations

from gateway.formats.fields import UnsupportedField

_TEXT_ONLY = "the model reads and writes text only"
_BEAMS = "there is no beam search"
_LORA = "an adapter is named as the model"
_SAMPLER = "the sampler takes nothing but the parameters listed"
_ROUTING = "the gateway alone decides which worker does what"
_CACHE = "cache_salt keeps cached prefixes apart"
_TEMPLATE = "chats go through the model's own template"
_INSIDE = "the model's inner states are not told"
_SESSIONS = "requests share no state"
_SCORES = "of each place the token that stands there and the likeliest ones are told"

ANY_ROUTE = {
    "custom_logit_processor": UnsupportedField(_SAMPLER, ("",)),
    "custom_params": UnsupportedField(_SAMPLER, ({},)),
    "data_parallel_rank": UnsupportedField(_ROUTING),
    "extra_key": UnsupportedField(_CACHE, ("",)),
    "bootstrap_host": UnsupportedField(_ROUTING),
    "bootstrap_port": UnsupportedField(_ROUTING),
    "bootstrap_room": UnsupportedField(_ROUTING),
    "return_hidden_states": UnsupportedField(_INSIDE, (False,)),
    "return_routed_experts": UnsupportedField("/generate tells it", (False,)),
    "session_params": UnsupportedField(_SESSIONS, ({},)),
}

STOP_REGEX = {"stop_regex": UnsupportedField("stop strings are plain text", ("", []))}

OPENAI = {
    **ANY_ROUTE,
    **STOP_REGEX,
    "allowed_token_ids": UnsupportedField(_SAMPLER),
    "early_stopping": UnsupportedField(_BEAMS, (False,)),
    "kv_transfer_params": UnsupportedField(_ROUTING, ({},)),
    "length_penalty": UnsupportedField(_BEAMS, (1, 1.0)),
    "logits_processors": UnsupportedField(_SAMPLER, ([],)),
    "multi_modal_data": UnsupportedField(_TEXT_ONLY, ({},)),
    "prompt_logprobs": UnsupportedField("/v1/completions tells them, with echo and logprobs"),
    "return_tokens_as_token_ids": UnsupportedField("return_token_ids tells the ids", (False,)),
    "use_beam_search": UnsupportedField(_BEAMS, (False,)),
    "vllm_xargs": UnsupportedField(_SAMPLER, ({},)),
}

TEXT = OPENAI | {
    "prompt_embeds": UnsupportedField("prompts are text or ids"),
    "suffix": UnsupportedField("the model continues text, it does not fill gaps", ("",)),
}

CHAT = OPENAI | {
    "audio": UnsupportedField(_TEXT_ONLY),
    "best_of": UnsupportedField("a chat tells every choice that is generated: ask for n", (1,)),
    "chat_template": UnsupportedField(_TEMPLATE, ("",)),
    "echo": UnsupportedField("a chat's answer does not begin with its prompt", (False,)),
    "mm_processor_kwargs": UnsupportedField(_TEXT_ONLY, ({},)),
    "modalities": UnsupportedField(_TEXT_ONLY, ([], ["text"])),
    "verbosity": UnsupportedField("the model's wordiness cannot be set", ("medium",)),
    "web_search_options": UnsupportedField("this server searches nothing"),
}

BY_MODEL = {"lora_path": UnsupportedField(_LORA, ("",))}

RESPONSES = (
    ANY_ROUTE
    | BY_MODEL
    | STOP_REGEX
    | {
        "background": UnsupportedField("an answer goes to who asked for it", (False,)),
        "conversation": UnsupportedField(_SESSIONS),
        "max_tool_calls": UnsupportedField("tools are the caller's to run"),
        "previous_response_id": UnsupportedField(_SESSIONS),
        "prompt": UnsupportedField("no prompts are kept"),
        "truncation": UnsupportedField("what does not fit is refused", ("disabled",)),
    }
)

RESPONSES_TEXT = {
    "verbosity": UnsupportedField("the model's wordiness cannot be set", ("medium",)),
}

MESSAGES = {
    "container": UnsupportedField("this server runs no code"),
    "inference_geo": UnsupportedField(_ROUTING),
    "mcp_servers": UnsupportedField("tools are the caller's to run", ([],)),
}

MESSAGE = {
    "annotations": UnsupportedField(_TEXT_ONLY, ([],)),
    "audio": UnsupportedField(_TEXT_ONLY),
    "images": UnsupportedField(_TEXT_ONLY, ([],)),
    "prefix": UnsupportedField("continue_final_message continues the last message", (False,)),
}

GENERATE = {name: field for name, field in ANY_ROUTE.items() if name != "return_routed_experts"} | {
    "audio_data": UnsupportedField(_TEXT_ONLY, ([],)),
    "background": UnsupportedField("an answer goes to who asked for it", (False,)),
    "image_data": UnsupportedField(_TEXT_ONLY, ([],)),
    "input_embeds": UnsupportedField("prompts are text or ids"),
    "lora_id": UnsupportedField(_LORA, ("",)),
    "modalities": UnsupportedField(_TEXT_ONLY, ([], ["text"])),
    "return_entropy": UnsupportedField(_SCORES, (False,)),
    "token_ids_logprob": UnsupportedField(_SCORES, ([],)),
    "video_data": UnsupportedField(_TEXT_ONLY, ([],)),
}

SAMPLING_PARAMS = STOP_REGEX | {
    "custom_params": UnsupportedField(_SAMPLER, ({},)),
}
