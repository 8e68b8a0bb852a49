"""Whole engines on tiny models of other families give transformers' tokens, with drafts and without."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import write_family
from loopback import Loopback, split_configs, wait_all
from tiny import write_tiny_eagle3

from eyas.common.config import SpeculationConfig
from eyas.common.types import GenerationRequest
from tests.unit.family_engines import GREEDY, LENGTHS, config_of, generated, prompts, served

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "cohere2",
            "hunyuan",
            "ministral3",
            "gemma2",
            "mistral",
            "qwen2_windows",
            "gemma3",
            "deepseek_v2_lite",
            "mixtral",
            "qwen3_moe",
            "gpt_oss",
        )
    ],
)
def test_a_family_is_served_as_transformers_generates(tmp_path: Path, name: str) -> None:
    model = write_family(tmp_path / "model", name)
    expected = [generated(model, prompt) for prompt in prompts()]
    assert len({tuple(tokens) for tokens in expected}) == len(LENGTHS)
    assert served(Loopback(config_of(tmp_path))) == expected
    assert served(Loopback(*split_configs(config_of(tmp_path))[:2]), split=True) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(SpeculationConfig(steps=3), id="chain", marks=pytest.mark.slow),
        pytest.param(SpeculationConfig(3, 4, 12), id="tree"),
    ],
)
def test_drafts_change_no_token_of_a_windowed_model(tmp_path: Path, spec: SpeculationConfig) -> None:
    model = write_family(tmp_path / "model", "gemma3_linear")
    write_tiny_eagle3(tmp_path / "head", tmp_path / "model")
    expected = [generated(model, prompt) for prompt in prompts()]
    config = config_of(tmp_path, draft=str(tmp_path / "head"), speculation=spec)
    assert served(Loopback(config)) == expected


def test_cached_latents_are_found_again(tmp_path: Path) -> None:
    """The second time a prompt is asked its pages are there; only its last rows are computed."""
    model = write_family(tmp_path / "model", "deepseek_v3")
    prompt = prompts()[-1]
    expected = generated(model, prompt)
    cluster = Loopback(config_of(tmp_path))
    for cached in (0, 144):
        result = cluster.submit(GenerationRequest(f"r{cached}", prompt, GREEDY), split=False)
        wait_all([result], 60)
        assert result.tokens[0] == expected
        assert next(entry.timings for entry in result.entries if entry.timings).cached_tokens == cached
    cluster.close()
