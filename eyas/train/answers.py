"""The target's own answers to the questions of the data: tokens in a file that grows as they come.

An engine of a process of its own writes them, so that its memory is free again when training begins. Answers
that the file has already are kept. `eyas.bench.answering` runs the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from eyas.bench.answering import EngineAnswer, EnginePrompt, answer
from eyas.bench.parts import ChildPart, Tell, run_parts
from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.errors import ConfigError, EyasError
from eyas.common.params import SamplingParams
from kv_transfer.backends.table import NONE

Tokens = list[int]


@dataclass(frozen=True)
class AnswerOptions:
    """The options of a target that answers.

    `target`: its folder. `longest`: tokens per answer; `length`: with the question before it.
    """

    target: str
    device: str
    temperature: float
    longest: int
    length: int
    seed: int

    @property
    def engine(self) -> EngineConfig:
        """The target without a head."""
        return engine_of(self.device, self.target)

    @property
    def about(self) -> dict[str, Any]:
        """The options on which answers depend: the file's first line."""
        return {name: value for name, value in asdict(self).items() if name != "device"}

    def prompt(self, number: int, question: Sequence[int]) -> EnginePrompt:
        """One question, and how long its answer may be."""
        return EnginePrompt(number, question, min(self.longest, self.length - len(question)))


def engine_of(device: str, target: str, draft: str | None = None, **settings: Any) -> EngineConfig:
    """An engine that serves this process alone."""
    return resolve_engine(device, model=target, draft=draft, worker="train", transfer=NONE, **settings)


def answers(asking: AnswerOptions, questions: Mapping[int, Sequence[int]], file: Path) -> dict[int, Tokens]:
    """The answer to every question, by its number. Raises EyasError if the engine gives up."""
    known = _known(asking, file)
    missing = [asking.prompt(number, ids) for number, ids in questions.items() if number not in known]
    if missing:
        with file.open("a") as out, Progress() as bar:
            task = bar.add_task("answers", total=len(questions), completed=len(questions) - len(missing))

            def tell(line: dict[str, Any]) -> None:
                out.write(json.dumps(line) + "\n")
                out.flush()
                known[line["number"]] = line["tokens"]
                bar.advance(task)

            work = partial(_ask, asking.engine, missing, _params(asking))
            if run_parts([ChildPart("answers", work)], tell):
                raise EyasError(f"{asking.target} did not answer all questions; --resume goes on")
    return {number: known[number] for number in questions}


def _known(asking: AnswerOptions, file: Path) -> dict[int, Tokens]:
    """The answers that the file has. A line that a kill cut short is dropped."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asking.about) + "\n")
        return {}
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    first, *lines = whole.splitlines() or [""]
    if not first or json.loads(first) != asking.about:
        raise ConfigError(f"--out: the answers in {file} were asked for in another way: remove the file")
    return {line["number"]: line["tokens"] for line in map(json.loads, lines)}


def _params(asking: AnswerOptions) -> SamplingParams:
    return SamplingParams(temperature=asking.temperature, seed=asking.seed)


def _ask(config: EngineConfig, prompts: Sequence[EnginePrompt], params: SamplingParams, tell: Tell) -> None:
    """Runs in the process of the part: asks the engine."""

    def said(one: EngineAnswer) -> None:
        tell({"number": one.number, "tokens": one.tokens})

    answer(config, prompts, params, said)
