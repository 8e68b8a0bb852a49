"""Every format of calls and of reasoning, by the names that flags have for them.

A format is a file of this folder and a row here. The table knows what is special about none.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gateway.parsers import (
    deepseek,
    glm,
    harmony,
    hermes,
    kimi,
    llama3,
    mistral,
    python_grammar,
    pythonic,
    qwen3_coder,
)
from gateway.parsers.calls import Tools
from gateway.parsers.output import Output
from gateway.parsers.reasoning import Tags
from gateway.parsers.source import Source, Wait
from gateway.parsers.tags import Format, Mark, Schemas


class Ids(enum.Enum):
    """How calls are named, so that their results can name them."""

    FREE = "any text"
    SHORT = "9 letters and digits"
    COUNTED = "functions.NAME:N, where N counts the chat's calls from 0"


def counted_id(name: str, count: int) -> str:
    """The id of a call before which the chat has `count` others, where calls are counted."""
    return f"functions.{name}:{count}"


class Frame(NamedTuple):
    """How a format frames all that an answer has, so that it is read whether there are tools or not.

    `reasoning`: its tags. `content`: the grammar of an answer with this content; `free`: of any words.
    """

    reasoning: Tags
    content: Callable[[Format, Mark], Format]
    free: Callable[[Mark], Format]


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. `markers`: tokens that must show in the text, even special ones.

    `grammar`: what holds an answer to calls of some tools. `sign`: a text that tells calls of this format
    from those of a sibling, which `read` reads too. `ids`: how calls are named. `opener`: the characters,
    with one of which an answer begins that is calls; "": a marker tells a call wherever it stands. `frame`:
    of a format that has words for the whole answer; its `read` finds the reasoning too.
    """

    name: str
    read: Callable[[Source, Output, Tools], Wait[None]]
    markers: tuple[str, ...]
    grammar: Callable[[Schemas, Mark, bool], Format]
    sign: str = ""
    ids: Ids = Ids.FREE
    opener: str = ""
    frame: Frame | None = None

    @property
    def beginnings(self) -> tuple[str, ...]:
        """What may stand before a call, in the middle of other words."""
        return (*self.markers, *(f"\n{character}" for character in self.opener))


_FORMATS = (
    ToolFormat("deepseek_v3", deepseek.read, deepseek.MARKERS, deepseek.fenced_grammar, sign="```json"),
    ToolFormat("deepseek_v3_1", deepseek.read, deepseek.MARKERS, deepseek.bare_grammar),
    ToolFormat(
        "mistral_v11", mistral.read, mistral.MARKERS, mistral.named_grammar, sign="[ARGS]", ids=Ids.SHORT
    ),
    ToolFormat("mistral", mistral.read, mistral.MARKERS, mistral.listed_grammar, ids=Ids.SHORT),
    ToolFormat("qwen3_coder", qwen3_coder.read, qwen3_coder.MARKERS, qwen3_coder.grammar),
    ToolFormat("glm45", glm.read, hermes.MARKERS, glm.grammar),
    ToolFormat("kimi_k2", kimi.read, kimi.MARKERS, kimi.grammar, ids=Ids.COUNTED),
    ToolFormat(
        "gpt_oss",
        harmony.read,
        harmony.MARKERS,
        harmony.grammar,
        frame=Frame(harmony.REASONING, harmony.final, harmony.free),
    ),
    ToolFormat("hermes", hermes.read, hermes.MARKERS, hermes.grammar),
    ToolFormat("pythonic", pythonic.read, pythonic.MARKERS, python_grammar.grammar, opener="["),
    ToolFormat("llama3_json", llama3.read, llama3.MARKERS, llama3.grammar, opener="{["),
)
TOOL_FORMATS = {format.name: format for format in _FORMATS}

REASONING = {
    "deepseek_r1": Tags("<think>", "</think>"),
    "qwen3": Tags("<think>", "</think>"),
    "mistral": Tags("[THINK]", "[/THINK]"),
}
