"""Every format of calls and of reasoning, by the names that flags have for them.

A format is a file of this folder and a row here. The table knows what is special about none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.parsers import deepseek, hermes, llama3, mistral, pythonic, qwen3_coder
from gateway.parsers.calls import Tools
from gateway.parsers.output import Output
from gateway.parsers.reasoning import Tags
from gateway.parsers.source import Source, Wait
from gateway.parsers.tags import Format, Mark, Schemas


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls. `markers`: tokens that must show in the text, even special ones.

    `grammar`: what holds an answer to calls of some tools; None: nothing can. `sign`: a text that tells calls
    of this format from those of a sibling, which `read` reads too. `short_ids`: its template wants ids of 9
    letters and digits. `anywhere`: a marker tells a call wherever it stands; else only the beginning of an
    answer can be one.
    """

    name: str
    read: Callable[[Source, Output, Tools], Wait[None]]
    markers: tuple[str, ...]
    grammar: Callable[[Schemas, Mark, bool], Format] | None
    sign: str = ""
    short_ids: bool = False
    anywhere: bool = True


_FORMATS = (
    ToolFormat("deepseek_v3", deepseek.read, deepseek.MARKERS, deepseek.fenced_grammar, sign="```json"),
    ToolFormat("deepseek_v3_1", deepseek.read, deepseek.MARKERS, deepseek.bare_grammar),
    ToolFormat(
        "mistral_v11", mistral.read, mistral.MARKERS, mistral.named_grammar, sign="[ARGS]", short_ids=True
    ),
    ToolFormat("mistral", mistral.read, mistral.MARKERS, mistral.listed_grammar, short_ids=True),
    ToolFormat("qwen3_coder", qwen3_coder.read, qwen3_coder.MARKERS, qwen3_coder.grammar),
    ToolFormat("hermes", hermes.read, hermes.MARKERS, hermes.grammar),
    ToolFormat("pythonic", pythonic.read, pythonic.MARKERS, None, anywhere=False),
    ToolFormat("llama3_json", llama3.read, llama3.MARKERS, llama3.grammar, anywhere=False),
)
TOOL_FORMATS = {format.name: format for format in _FORMATS}

REASONING = {
    "deepseek_r1": Tags("<think>", "</think>"),
    "qwen3": Tags("<think>", "</think>"),
    "mistral": Tags("[THINK]", "[/THINK]"),
}
