"""Fields of OpenAI's, vLLM's and SGLang's APIs that this server does not support, and why.

Data only. A value that asks for nothing is accepted; any other gets a 400 with the reason. A field that is
neither here nor declared in a body is ignored and named to the caller.
"""

from __future__ import annotations

from gateway.formats.fields import Unsupported

_TEXT_ONLY = "the model reads and writes text only"
_BEAMS = "there is no beam search"
_LORA = "no adapters are served"
_SAMPLER = "the sampler takes nothing but the parameters listed"
_ROUTING = "the gateway alone decides which worker does what"
_CACHE = "prefix caches are not divided by caller"
_TEMPLATE = "chats go through the model's own template"
_INSIDE = "the model's inner states are not told"
_SESSIONS = "requests share no state"
_SCORES = "of each place the token that stands there and the likeliest ones are told"

ANY_ROUTE = {
    "cache_salt": Unsupported(_CACHE, ("",)),
    "custom_logit_processor": Unsupported(_SAMPLER, ("",)),
    "custom_params": Unsupported(_SAMPLER, ({},)),
    "data_parallel_rank": Unsupported(_ROUTING),
    "extra_key": Unsupported(_CACHE, ("",)),
    "bootstrap_host": Unsupported(_ROUTING),
    "bootstrap_port": Unsupported(_ROUTING),
    "bootstrap_room": Unsupported(_ROUTING),
    "lora_path": Unsupported(_LORA, ("",)),
    "return_hidden_states": Unsupported(_INSIDE, (False,)),
    "return_routed_experts": Unsupported(_INSIDE, (False,)),
    "session_params": Unsupported(_SESSIONS, ({},)),
}

STOP_REGEX = {"stop_regex": Unsupported("stop strings are plain text", ("", []))}

OPENAI = {
    **ANY_ROUTE,
    **STOP_REGEX,
    "allowed_token_ids": Unsupported(_SAMPLER),
    "early_stopping": Unsupported(_BEAMS, (False,)),
    "kv_transfer_params": Unsupported(_ROUTING, ({},)),
    "length_penalty": Unsupported(_BEAMS, (1, 1.0)),
    "logits_processors": Unsupported(_SAMPLER, ([],)),
    "prompt_logprobs": Unsupported("/v1/completions tells them, with echo and logprobs"),
    "return_tokens_as_token_ids": Unsupported("return_token_ids tells the ids", (False,)),
    "use_beam_search": Unsupported(_BEAMS, (False,)),
    "vllm_xargs": Unsupported(_SAMPLER, ({},)),
}

TEXT = OPENAI | {
    "prompt_embeds": Unsupported("prompts are text or ids"),
    "suffix": Unsupported("the model continues text, it does not fill gaps", ("",)),
}

CHAT = OPENAI | {
    "audio": Unsupported(_TEXT_ONLY),
    "best_of": Unsupported("a chat tells every choice that is generated: ask for n", (1,)),
    "chat_template": Unsupported(_TEMPLATE, ("",)),
    "echo": Unsupported("a chat's answer does not begin with its prompt", (False,)),
    "mm_processor_kwargs": Unsupported(_TEXT_ONLY, ({},)),
    "modalities": Unsupported(_TEXT_ONLY, ([], ["text"])),
    "verbosity": Unsupported("the model's wordiness cannot be set", ("medium",)),
    "web_search_options": Unsupported("this server searches nothing"),
}

RESPONSES = (
    ANY_ROUTE
    | STOP_REGEX
    | {
        "background": Unsupported("an answer goes to who asked for it", (False,)),
        "conversation": Unsupported(_SESSIONS),
        "max_tool_calls": Unsupported("tools are the caller's to run"),
        "previous_response_id": Unsupported(_SESSIONS),
        "prompt": Unsupported("no prompts are kept"),
        "truncation": Unsupported("what does not fit is refused", ("disabled",)),
    }
)

RESPONSES_TEXT = {
    "verbosity": Unsupported("the model's wordiness cannot be set", ("medium",)),
}

MESSAGES = {
    "container": Unsupported("this server runs no code"),
    "inference_geo": Unsupported(_ROUTING),
    "mcp_servers": Unsupported("tools are the caller's to run", ([],)),
}

MESSAGE = {
    "annotations": Unsupported(_TEXT_ONLY, ([],)),
    "audio": Unsupported(_TEXT_ONLY),
    "prefix": Unsupported("continue_final_message continues the last message", (False,)),
}

GENERATE = ANY_ROUTE | {
    "audio_data": Unsupported(_TEXT_ONLY, ([],)),
    "background": Unsupported("an answer goes to who asked for it", (False,)),
    "image_data": Unsupported(_TEXT_ONLY, ([],)),
    "input_embeds": Unsupported("prompts are text or ids"),
    "lora_id": Unsupported(_LORA, ("",)),
    "modalities": Unsupported(_TEXT_ONLY, ([], ["text"])),
    "return_entropy": Unsupported(_SCORES, (False,)),
    "token_ids_logprob": Unsupported(_SCORES, ([],)),
    "video_data": Unsupported(_TEXT_ONLY, ([],)),
}

SAMPLING_PARAMS = STOP_REGEX | {
    "custom_params": Unsupported(_SAMPLER, ({},)),
}
