"""A text to calibrate with, and a reader of quantized folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from eyas.common.config import NANO
from eyas.engine.batch.spans import QuerySpan
from tests.unit.model_rig import Rig

TEXT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


class Reader:
    """A folder's model, and what it finds likeliest behind each token of a text."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig(folder, pages=200)

    def likeliest(self, tokens: list[int]) -> torch.Tensor:
        span = QuerySpan(self.rig.table(len(tokens)), 0, len(tokens))
        return self.rig.logits([span], tokens).argmax(1)


@pytest.fixture(scope="module")
def story() -> tuple[list[int], torch.Tensor]:
    """A text that the embedded model goes on with, and what it finds likeliest in it."""
    tokens, reader = Tokenizer.from_file(f"{NANO}/tokenizer.json").encode(TEXT).ids, Reader(NANO)
    while len(tokens) < 48:
        tokens.append(int(reader.likeliest(tokens)[-1]))
    return tokens, reader.likeliest(tokens)
