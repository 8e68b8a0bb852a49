"""Chat templates: a list of messages becomes the prompt text that the model was trained on.

Templates come with the model's folder and are run in a sandbox. It knows jinja2 and the helpers that such
templates expect; it refuses to know tokens.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eyas.common.errors import ConfigError, InvalidRequest

Message = Mapping[str, str]  # role and content

_MARK = "<|the final message ends here|>"


class ChatTemplate:
    """One compiled template. `special` are the names it may use, such as bos_token."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Raises ConfigError if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special = dict(special)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not compile: line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that asks for the next assistant message, or for the rest of the last one.

        Raises InvalidRequest if the template refuses the messages or fails on them.
        """
        chat = [dict(message) for message in messages]
        if continue_final_message:
            final = chat[-1]["content"]
            chat[-1]["content"] = f"{final}{_MARK} "
        try:
            text = self._template.render(
                **{
                    **self._special,
                    **(template_kwargs or {}),
                    "messages": chat,
                    "add_generation_prompt": add_generation_prompt and not continue_final_message,
                }
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise InvalidRequest(
                f"the chat template refused the messages: {error}", param="messages"
            ) from error
        return _cut_at_mark(text, final) if continue_final_message else text


def _cut_at_mark(text: str, final: str) -> str:
    """The prompt up to where its final message ends, stripped where the template strips messages."""
    before, mark, after = text.rpartition(_MARK)
    if not mark or final.strip() not in before:
        raise InvalidRequest(
            "the chat template changes the final message, so it cannot be continued", param="messages"
        )
    return before if after.startswith(" ") else before.rstrip()


def _to_json(value: Any, indent: int | None = None) -> str:
    """Plain JSON: the built-in filter escapes for HTML, which prompts are not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
