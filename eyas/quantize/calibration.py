"""Numbers that are searched by a text, with GPTQ (arXiv 2210.17323) or AWQ (2306.00978), by llmcompressor.

The searches are that library's, and so is the folder that it writes: compressed-tensors, pack-quantized. Here
the text becomes rows of tokens, and what is written is compared with what was to be written.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.common.errors import ConfigError, EyasError
from eyas.engine.checkpoint.folder import stored_tensors, weight_files
from eyas.quantize.formats import IntegerFormat
from eyas.quantize.written import Written, stays
from gateway.text.tokenizer import Tokenizer

ROW_TOKENS, MOST_ROWS = 2048, 128
"""As both papers have them: of a longer text the first are read."""

_BITS = 4


@dataclass(frozen=True)
class Calibration:
    """A search by `algorithm`, "gptq" or "awq", of numbers of which `group` have one scale.

    `rows`: what the model reads meanwhile, a text's tokens.
    """

    algorithm: str
    group: int
    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def by(cls, text: Path, folder: Path, algorithm: str, group: int) -> Calibration:
        """The calibration by a file's text, cut into rows. Raises ConfigError if it has none, or for a
        missing library.
        """
        _check(algorithm)
        try:
            read = text.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--calibration: {text} cannot be read: {error}", param="calibration") from None
        if not (ids := Tokenizer.load(folder).encode(read)):
            raise ConfigError(f"--calibration: {text} holds no text", param="calibration")
        rows = (ids[first : first + ROW_TOKENS] for first in range(0, len(ids), ROW_TOKENS))
        return cls(algorithm, group, tuple(rows)[:MOST_ROWS])

    def write(self, folder: Path, out: Path) -> tuple[Written, dict[str, Any]]:
        """Writes a folder's weights to another; what they are, and their `quantization_config`."""
        written, matrices = self._account(folder)
        self._search(folder, out, written.left_out)
        for path in weight_files(out):
            path.chmod((folder / "config.json").stat().st_mode)
            written.after += path.stat().st_size
        there = stored_tensors(out, None)
        if left := [name for name in matrices if f"{name}.weight_packed" not in there]:
            raise EyasError(f"llmcompressor left {left[0]} as it was, and {len(left) - 1} other matrices")
        written.files = {}  # it has written its own index
        described: dict[str, Any] = json.loads((out / "config.json").read_text())["quantization_config"]
        return written, described

    def _account(self, folder: Path) -> tuple[Written, list[str]]:
        """What is to be written, and the modules of the matrices among it."""
        written, form = Written(), IntegerFormat(_BITS, self.group)
        matrices: list[str] = []
        for name, (_, shape) in stored_tensors(folder, None).items():
            module = name.removesuffix(".weight")
            if ".experts." in name:
                what = "experts are chosen by their router, and may see none of a text's rows"
                raise ConfigError(f"--calibration: {folder} has experts: {what}", param="calibration")
            if module == name or len(shape) != 2:
                continue
            (written.left_out if stays(module, shape, form) else matrices).append(module)
        if not matrices:
            raise ConfigError(f"{folder} has no matrix that groups of {self.group} can hold")
        written.before = sum(path.stat().st_size for path in weight_files(folder))
        written.quantized = len(matrices)
        return written, matrices

    def _search(self, folder: Path, out: Path, left_out: list[str]) -> None:
        from llmcompressor import oneshot
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"--calibration: transformers cannot load {folder}: {error}") from error
        ids = [torch.tensor([row]) for row in self.rows]
        read: Any = [{"input_ids": each, "attention_mask": torch.ones_like(each)} for each in ids]
        oneshot(
            model=model,
            recipe=self._recipe(left_out),
            dataset=torch.utils.data.DataLoader(read, batch_size=None),
            num_calibration_samples=len(read),
            max_seq_length=ROW_TOKENS,
        )
        model.save_pretrained(out, save_compressed=True)

    def _recipe(self, left_out: list[str]) -> list[Any]:
        """The library's steps. AWQ's numbers have zero points, as its authors' have. An output head that is
        the embedding is no tensor of the folder.
        """
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier

        numbers = {"num_bits": _BITS, "type": "int", "strategy": "group", "group_size": self.group}
        group = {"targets": ["Linear"], "weights": numbers | {"symmetric": self.algorithm == "gptq"}}
        what: dict[str, Any] = {"ignore": [*left_out, "lm_head"], "config_groups": {"group_0": group}}
        if self.algorithm == "gptq":
            return [GPTQModifier(**what)]
        return [AWQModifier(), QuantizationModifier(**what)]


def _check(algorithm: str) -> None:
    """Raises ConfigError, with what to do, if the library cannot search here."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise ConfigError(
            "--calibration: needs llmcompressor: pip install 'eyas[calibration]'", param="calibration"
        )
    if algorithm == "awq" and not torch.accelerator.is_available():
        what = "AWQ of llmcompressor copies rows to a GPU, and there is none here; --format gptq needs none"
        raise ConfigError(f"--calibration: {what}", param="calibration")
