"""`eyas serve` on small models of families with much of their own: what a client gets is transformers' greedy
text, split and unified, alone and beside others, with drafts that are looked up.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from eyas.common.config import NANO
from tests.e2e.served import Folders, serving
from tests.unit.families import write_family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCAB, NEW = 4096, 8  # the embedded model's tokenizer has as many
VOCABULARY = {
    "gemma4_tokens": {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB},
    "glm4_moe_lite": {"vocab_size": VOCAB},
    "falcon_groups": {"vocab_size": VOCAB},
}
PLAIN = ("--num-pages=256", "--chunked-prefill-size=48")


def expected(model: Any, ids: list[int]) -> list[int]:
    whole = list(ids)
    with torch.no_grad():
        for _ in range(NEW):
            whole.append(int(model(torch.tensor([whole])).logits[0, -1].argmax()))
    return whole[len(ids) :]


def answer(http: httpx.Client, ids: list[int]) -> list[int]:
    params = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
    said = http.post("/generate", json={"input_ids": ids, "sampling_params": params}, timeout=120).json()
    return list(said["output_ids"])


@pytest.mark.parametrize("family", VOCABULARY)
def test_a_client_gets_transformers_tokens(tmp_path: Path, family: str) -> None:
    model = write_family(tmp_path / family, family, **VOCABULARY[family])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, tmp_path / family)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (3, 41, 150)]
    wanted = [expected(model, ids) for ids in prompts]
    for flags in (("--layout=split", "--draft=none"), ("--layout=unified", "--draft=ngram")):
        folders = Folders(str(tmp_path / family), flags[1].partition("=")[2])
        with (
            serving(folders, flags[0], *PLAIN) as served,
            httpx.Client(base_url=served.url) as http,
            ThreadPoolExecutor(len(prompts)) as callers,
        ):
            assert [answer(http, ids) for ids in prompts] == wanted
            assert list(callers.map(lambda ids: answer(http, ids), prompts)) == wanted
