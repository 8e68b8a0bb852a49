"""/generate tells which experts an answer's rows took, where a model has some."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_client import client_of, refused
from real_cluster import real_cluster
from real_worker import tiny_config
from scripted_backend import ScriptedBackend, nano_tokenizer

from eyas.common.config import EngineConfig
from tests.rpc.real_cluster import BOTH
from tests.unit.tiny_deepseek import SMALL, write_tiny_deepseek

LAYERS, PER_ROW = SMALL["num_hidden_layers"], SMALL["num_experts_per_tok"]


def body(**fields: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 5, "temperature": 0.9, "sampling_seed": 1, "ignore_eos": True, "n": 2}
    return {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "return_routed_experts": True} | fields


async def test_each_answer_tells_the_experts_of_its_rows(tmp_path: Path) -> None:
    write_tiny_deepseek(tmp_path / "model")
    config = EngineConfig(model=str(tmp_path / "model"), draft=None, num_pages=64, chunk_tokens=48)
    async with real_cluster(config, tmp_path, (BOTH,)) as cluster:
        response = await cluster.http.post("/generate", json=body())
        assert response.status_code == 200, response.text
        answers = response.json()
        told = [np.frombuffer(b64decode(each["meta_info"]["routed_experts"]), np.int32) for each in answers]
        rows = [each.reshape(4 + 5 - 1, LAYERS, PER_ROW) for each in told]
        assert (rows[0][:4] == rows[1][:4]).all() and (rows[0] != rows[1]).any()
        assert (rows[0][:, 1:] >= 0).all() and (rows[0][:, 1:] < SMALL["n_routed_experts"]).all()


async def test_a_model_without_experts_refuses_by_name(tmp_path: Path) -> None:
    async with real_cluster(tiny_config(tmp_path), tmp_path, (BOTH,)) as cluster:
        response = await cluster.http.post("/generate", json=body())
        assert "has no experts" in refused(response, "return_routed_experts")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_streams_and_other_routes_refuse_it(path: str) -> None:
    async with client_of(ScriptedBackend(nano_tokenizer())) as http:
        asked = (
            body(stream=True)
            if path == "/generate"
            else {"model": "eyas-nano", "prompt": "a", "return_routed_experts": True}
        )
        refused(await http.post(path, json=asked), "return_routed_experts")
