"""The embedded model's held-out questions, answered in each format of weights and of KV.

    python -m tests.format_accuracy [--limit 50] [--answers FILE] [FORMAT ...]

prints a table in Markdown: the share of right answers with its 95 % interval (Wilson), the questions that
float32 alone has right, or the format alone, and how many answers are float32's to the letter. FILE keeps
answers: what it has is not computed again. Engines run in this process, on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import safe_open

from eyas import cli
from eyas.common.config import NANO, EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.evals.heldout import question_sets
from eyas.evals.nano import LONGEST_ANSWER
from eyas.evals.questions import EvalQuestion
from eyas.evals.scores import mcnemar
from gateway.text.tokenizer import Tokenizer
from tests.e2e.lossless import CHAIN, TOGETHER
from tests.e2e.lossless_ways import InProcess, Task
from tests.unit.bitsandbytes_formats import FORMATS as BITSANDBYTES
from tests.unit.fp4_formats import FP4
from tests.unit.packed_formats import KEPT, Packing, write_packed

BASE = "float32"
_Z = 1.959964  # of a normal distribution, whose middle 95 % end there


@dataclass(frozen=True)
class Served:
    """Weights, as `eyas quantize` writes them with these flags or as a packing does, but for those whose
    names have `kept`; and an engine's changes.
    """

    flags: tuple[str, ...] = ()
    packing: Packing | None = None
    kept: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """The folder of the model: one in `folder`, or the model's own."""
        if self.packing is not None:
            write_packed(folder / "model", NANO, self.packing, (*KEPT, *self.kept))
        elif self.flags:
            command = ["quantize", str(NANO), "--out", str(folder / "model"), "--format", *self.flags]
            assert cli.main(command) == 0
        else:
            return NANO
        return folder / "model"


def _int4(form: str, group: int) -> Served:
    return Served((form, "--group-size", str(group)))


_FP8_KV = {"kv_cache_dtype": "fp8_e4m3"}
FORMATS: dict[str, Served] = {
    BASE: Served(),
    "fp8": Served(("fp8",)),
    "int8": Served(("int8",)),
    "int4, groups of 16": _int4("int4", 16),
    "int4, groups of 32": _int4("int4", 32),
    "int4, groups of 64": _int4("int4", 64),
    "int4, groups of 128": _int4("int4", 128),
    "awq, groups of 16": _int4("awq", 16),
    "awq, groups of 128": _int4("awq", 128),
    "gptq, groups of 16": _int4("gptq", 16),
    "gptq, groups of 128": _int4("gptq", 128),
    "mxfp4": Served(("mxfp4",)),
    "nvfp4": Served(packing=FP4["nvfp4"]),
    "nf4": Served(packing=BITSANDBYTES["nf4"], kept=("down_proj",)),  # rows are no whole blocks
    "float32, FP8 KV": Served(changes=_FP8_KV),
    "int4, groups of 16, FP8 KV": replace(_int4("int4", 16), changes=_FP8_KV),
}


@dataclass(frozen=True)
class FormatAnswers:
    """The text that a format gave to each question, and the matrices that are in it."""

    matrices: int
    texts: list[str]

    @classmethod
    def of(cls, served: Served, requests: Sequence[GenerationRequest], tokenizer: Tokenizer) -> FormatAnswers:
        """Asks an engine, with the embedded model's head, which changes no token."""
        with TemporaryDirectory() as temporary:
            model = served.write(Path(temporary))
            config: EngineConfig = replace(CHAIN, model=str(model), tokenizer=str(NANO), **served.changes)
            answers = InProcess((config,), TOGETHER).serve(Task(tuple(requests), {}, lambda: None))
            texts = [tokenizer.decode(answers.tokens[request.id]) for request in requests]
            return cls(_matrices(model), texts)


def _matrices(model: Path) -> int:
    """The matrices of a folder that are stored otherwise than in the model's own."""
    with (
        safe_open(NANO / "model.safetensors", "pt") as plain,
        safe_open(model / "model.safetensors", "pt") as own,
    ):
        there = set(own.keys())
        return sum(
            name not in there or own.get_slice(name).get_shape() != plain.get_slice(name).get_shape()
            or own.get_slice(name).get_dtype() != plain.get_slice(name).get_dtype()
            for name in plain.keys()
        )  # fmt: skip


def wilson(right: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    share, square = right / of, _Z * _Z / of
    middle = (share + square / 2) / (1 + square)
    half = _Z * math.sqrt(share * (1 - share) / of + square / (4 * of)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


def row(name: str, answers: FormatAnswers, base: FormatAnswers, questions: Sequence[EvalQuestion]) -> str:
    """A line of the table."""
    right, first = _right(answers, questions), _right(base, questions)
    low, high = wilson(sum(right), len(questions))
    lost = sum(a and not b for a, b in zip(first, right, strict=True))
    won = sum(b and not a for a, b in zip(first, right, strict=True))
    same = sum(a == b for a, b in zip(base.texts, answers.texts, strict=True))
    cells = (
        name,
        str(answers.matrices),
        f"{sum(right) / len(right):.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{lost} / {won}",
        f"{mcnemar(lost, won):.2g}",
        f"{same / len(right):.1%}",
    )
    return f"| {' | '.join(cells)} |"


def _right(answers: FormatAnswers, questions: Sequence[EvalQuestion]) -> list[bool]:
    return [each.judge(text, each.expected) for each, text in zip(questions, answers.texts, strict=True)]


def main() -> None:
    """The table of the formats that are named, or of all."""
    parser = argparse.ArgumentParser(prog="python -m tests.format_accuracy")
    parser.add_argument("formats", nargs="*", choices=[[], *FORMATS], metavar="FORMAT")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="questions of each of the 8 sets")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="where answers are, and are added")
    given = parser.parse_args()
    questions = [each for one in question_sets(given.limit, 1) for each in one.questions]
    tokenizer, params = Tokenizer.load(NANO), SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER)
    requests = [
        GenerationRequest(
            str(i), asyncio.run(tokenizer.encode_chat([{"role": "user", "content": each.prompt}])), params
        )
        for i, each in enumerate(questions)
    ]
    stored = given.answers.read_text().splitlines() if given.answers and given.answers.exists() else []
    known = {line["name"]: FormatAnswers(line["matrices"], line["texts"]) for line in map(json.loads, stored)}
    print("| | matrices | right | 95 % | lost / won | p | the same text |\n|---|---|---|---|---|---|---|")
    for name in (BASE, *(each for each in given.formats or FORMATS if each != BASE)):
        if name not in known:
            known[name] = FormatAnswers.of(FORMATS[name], requests, tokenizer)
            if given.answers:
                line = {"name": name, "matrices": known[name].matrices, "texts": known[name].texts}
                with given.answers.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        print(row(name, known[name], known[BASE], questions), flush=True)


if __name__ == "__main__":
    main()
