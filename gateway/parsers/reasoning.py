"""Reasoning that a model writes before its answer, between a pair of tags.

Some templates open it in the prompt (DeepSeek-R1), some leave that to the model (Qwen3), and some close it in
the prompt to have none. So the prompt's end says how an answer begins.
"""

from __future__ import annotations

from typing import NamedTuple

from gateway.parsers.output import ParsedOutput
from gateway.parsers.source import ParsedText, Wait


class ReasoningTags(NamedTuple):
    """The tags before and after the reasoning. `title`: a word behind the first that is no part of it."""

    begin: str
    end: str
    title: str = ""


def is_open(tags: ReasoningTags, prompt: str, *, continues: bool = False) -> bool:
    """Whether an answer to `prompt` begins within the reasoning.

    The prompt's last tag decides. Unless the answer `continues` the last message, it must be what the prompt
    ends with, the title behind it or not: elsewhere a tag is somebody's words.
    """
    if continues:
        return prompt.rfind(tags.begin) > prompt.rfind(tags.end)
    return prompt.rstrip().endswith((tags.begin, tags.begin + tags.title.rstrip()))


def begins(source: ParsedText, out: ParsedOutput, tags: ReasoningTags, is_open: bool) -> Wait[bool]:
    """Whether an answer begins with reasoning. `is_open`: the prompt has the first tag."""
    space = yield from source.space()
    if (yield from source.skip(tags.begin)) or is_open:
        yield from source.skip(tags.title)
        return True
    out.content(space)
    return False


def read(source: ParsedText, out: ParsedOutput, tags: ReasoningTags, calls: tuple[str, ...]) -> Wait[None]:
    """Reads the reasoning to its end. `calls`: what calls begin with. Reasoning that never ends is only read
    up to the first of these: what follows may be calls.
    """
    marker = yield from source.upto((tags.end, *calls), out.reasoning)
    if marker and marker != tags.end:
        parts = [marker]
        if not (yield from source.upto((tags.end,), parts.append)):
            source.back("".join(parts))
            out.think_on()
            return
        out.reasoning("".join(parts).removesuffix(tags.end))
    if marker:
        out.reasoned()
