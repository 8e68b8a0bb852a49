"""Every format of calls and of reasoning, by the names that flags have for them.

A format is a file of this folder and a row here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from gateway.parsers import (
    deepseek,
    functionary,
    gemma4,
    glm,
    harmony,
    hermes,
    kimi,
    lists,
    llama3,
    minimax,
    mistral,
    pythonic,
    qwen3_coder,
)
from gateway.parsers.calls import Format, Mark, Schemas, Tools
from gateway.parsers.output import ParsedOutput
from gateway.parsers.reasoning import ReasoningTags
from gateway.parsers.source import ParsedText, Wait


class CallIds(enum.Enum):
    """How calls are named, so that their results can name them."""

    FREE = "any text"
    SHORT = "9 letters and digits"
    COUNTED = "functions.NAME:N, where N counts the chat's calls from 0"


def counted_id(name: str, count: int) -> str:
    """The id of a call before which the chat has `count` others, where calls are counted."""
    return f"functions.{name}:{count}"


class AnswerFrame(NamedTuple):
    """How a format frames all that an answer has, so that it is read whether there are tools or not.

    `reasoning`: its tags. `content`: the grammar of an answer with this content; `free`: of any words.
    """

    reasoning: ReasoningTags
    content: Callable[[Format, Mark], Format]
    free: Callable[[Mark], Format]


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. `markers`: tokens that must show in the text, even special ones.

    `grammar`: what holds an answer to calls of some tools. `sign`: a text that tells calls of this format
    from those of a sibling, which `read` reads too. `says`: what a template tells the model beside its tools
    that writes no calls itself. `ids`: how calls are named. `opener`: the
    characters, with one of which an answer begins that is calls; "": a marker tells a call wherever it
    stands. `frame`: of a format that has words for the whole answer; its `read` finds the reasoning too.
    """

    name: str
    read: Callable[[ParsedText, ParsedOutput, Tools], Wait[None]]
    markers: tuple[str, ...]
    grammar: Callable[[Schemas, Mark, bool], Format]
    sign: str = ""
    says: str = ""
    ids: CallIds = CallIds.FREE
    opener: str = ""
    frame: AnswerFrame | None = None

    @property
    def beginnings(self) -> tuple[str, ...]:
        """The texts that may begin a call in the middle of other words."""
        return (*self.markers, *(f"\n{character}" for character in self.opener))


_FORMATS = (
    ToolFormat("deepseek_v3", deepseek.read, deepseek.MARKERS, deepseek.fenced_grammar, sign="```json"),
    ToolFormat("deepseek_v3_1", deepseek.read, deepseek.MARKERS, deepseek.bare_grammar),
    ToolFormat(
        "mistral_v11", mistral.read, mistral.MARKERS, mistral.named_grammar, sign="[ARGS]", ids=CallIds.SHORT
    ),
    ToolFormat("mistral", mistral.read, mistral.MARKERS, mistral.listed_grammar, ids=CallIds.SHORT),
    ToolFormat(
        "seed_oss",
        qwen3_coder.reader(qwen3_coder.SEED),
        qwen3_coder.SEED,
        qwen3_coder.writer(qwen3_coder.SEED),
        sign=qwen3_coder.SEED[0],
    ),
    ToolFormat(
        "qwen3_coder",
        qwen3_coder.reader(qwen3_coder.MARKERS),
        qwen3_coder.MARKERS,
        qwen3_coder.writer(qwen3_coder.MARKERS),
    ),
    ToolFormat("glm45", glm.read, hermes.MARKERS, glm.grammar),
    ToolFormat("kimi_k2", kimi.read, kimi.MARKERS, kimi.grammar, ids=CallIds.COUNTED),
    ToolFormat(
        "gpt_oss",
        harmony.read,
        harmony.MARKERS,
        harmony.grammar,
        frame=AnswerFrame(harmony.REASONING, harmony.final, harmony.free),
    ),
    ToolFormat("minimax_m2", minimax.read, minimax.MARKERS, minimax.grammar, says=minimax.BEGIN),
    ToolFormat("gemma4", gemma4.read, gemma4.MARKERS, gemma4.grammar),
    ToolFormat("functionary", functionary.read, functionary.MARKERS, functionary.grammar, says="<function="),
    ToolFormat(
        "command_r",
        lists.reader(lists.COMMAND_R),
        lists.COMMAND_R,
        lists.command_r_grammar,
        says=lists.COMMAND_R[0],
    ),
    ToolFormat(
        "granite", lists.reader(lists.GRANITE), lists.GRANITE, lists.granite_grammar, says=lists.GRANITE[0]
    ),
    ToolFormat("hunyuan", lists.reader(lists.HUNYUAN), lists.HUNYUAN, lists.writer(lists.HUNYUAN)),
    ToolFormat("nemotron", lists.reader(lists.NEMOTRON), lists.NEMOTRON, lists.writer(lists.NEMOTRON)),
    ToolFormat("olmo3", lists.read_lines, lists.OLMO3, lists.olmo3_grammar),
    ToolFormat("lfm2", lists.reader(lists.LFM2), lists.LFM2, lists.lfm2_grammar, says=lists.LFM2_TOOLS),
    ToolFormat("phi4_mini", lists.reader(lists.PHI4), lists.PHI4, lists.phi4_grammar, says=lists.PHI4[0]),
    ToolFormat("hermes", hermes.read, hermes.MARKERS, hermes.grammar, says='<tool_call>\n{"name"'),
    ToolFormat("pythonic", pythonic.read, pythonic.MARKERS, pythonic.grammar, opener="["),
    ToolFormat("llama3_json", llama3.read, llama3.MARKERS, llama3.grammar, opener="{["),
)
TOOL_FORMATS = {format.name: format for format in _FORMATS}

REASONING = {
    "deepseek_r1": ReasoningTags("<think>", "</think>"),
    "qwen3": ReasoningTags("<think>", "</think>"),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
    "command_r": lists.COMMAND_R_REASONING,
    "gemma4": gemma4.REASONING,
    "seed_oss": qwen3_coder.SEED_REASONING,
}
