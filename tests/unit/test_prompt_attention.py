"""Prompts by attention that is planned on the host, beside the device's kernels: the same tokens."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.attention.prompts import PromptAttention
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.kernels.attention.scores import ScoreScaling
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import PoolShape
from tests.unit.families import write_family
from tests.unit.loopback import Loopback, wait_all
from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

BACKEND = "eyas.engine.attention.flashinfer_backend"
PROMPTS = (70, 40)  # tokens: three steps, of which one has parts of both
LAYERS = 4
CHUNK = 48


class Build:
    """A build that is done, or has failed, when it has been asked `asks` times."""

    asks = 2
    failed = False

    def __init__(self, dtype: torch.dtype, head_dim: int, device: str) -> None:
        assert (dtype, head_dim, device) == (torch.float32, 16, "cpu")
        self.asked = 0

    def ready(self) -> bool:
        self.asked += 1
        if self.asked >= self.asks and self.failed:
            raise ConfigError("no compiler")
        return self.asked >= self.asks


class Attention:
    """`PrefillAttention` in plain torch."""

    planned: list[list[tuple[int, int]]] = []  # (start, count) of the spans of each plan
    runs = 0

    def __init__(self, heads: int, shape: PoolShape, scale: float, build: Build) -> None:
        self._group, self._scale, self.ready = heads // shape.kv_heads, scale, build.ready

    def made_up(self, rows: int) -> list[QuerySpan]:
        return []

    def plan(self, spans: Sequence[QuerySpan]) -> bool:
        self.planned.append([(span.start, span.count) for span in spans])
        self._spans = spans
        return True

    def run(self, q: torch.Tensor, layer_pool: torch.Tensor, out: torch.Tensor) -> None:
        type(self).runs += 1
        row = 0
        for span in self._spans:
            end, mine = span.start + span.count, slice(row, row + span.count)
            rows = layer_pool[list(span.pages)].transpose(0, 1).flatten(1, 2)[:, :end]
            keys, values = rows.repeat_interleave(self._group, 2).transpose(1, 2)
            seen = torch.ones(end, end, dtype=torch.bool).tril()[span.start :]
            out[mine] = scaled_dot_product_attention(
                q[mine].transpose(0, 1), keys, values, attn_mask=seen, scale=self._scale
            ).transpose(0, 1)
            row += span.count


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for flashinfer's kernels."""
    module = ModuleType(BACKEND)
    monkeypatch.setattr(module, "Fa3Build", Build, raising=False)
    monkeypatch.setattr(module, "PrefillAttention", Attention, raising=False)
    monkeypatch.setitem(sys.modules, BACKEND, module)
    monkeypatch.setattr(Attention, "planned", [])
    monkeypatch.setattr(Attention, "runs", 0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target", layers=LAYERS)
    return target, write_tiny_eagle3(folder / "head", target)


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "chain"])
def test_prompts_go_over_when_the_kernels_are_built(
    models: tuple[Path, Path], drafted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step finds the build unfinished; the head, with the target's heads, shares the plans."""
    caplog.set_level(logging.INFO, "eyas.engine")
    draft = str(models[1]) if drafted else None
    tokens = _answers(models, draft, "flashinfer")
    spans = [span for plan in Attention.planned for span in plan]
    assert sum(count for _, count in spans) == sum(PROMPTS) - CHUNK
    assert spans[-1][0] > 0
    assert Attention.runs == len(Attention.planned) * (LAYERS + drafted)
    assert [record.levelname for record in caplog.records if "flashinfer" in record.message] == ["INFO"]
    assert tokens == _answers(models, draft, "torch")


@pytest.mark.usefixtures("flashinfer")
def test_layers_with_a_window_stay_with_the_triton_kernel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And those that see everything go over, by their own scale; both are said once."""
    caplog.set_level(logging.INFO, "eyas.engine")
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 24}
    write_family(tmp_path / "gemma", "gemma3", vocab_size=256, num_hidden_layers=2, **kinds)
    models = tmp_path / "gemma", tmp_path
    tokens = _answers(models, None, "flashinfer")
    assert Attention.runs == len(Attention.planned) > 0
    assert [record.message for record in caplog.records if "attend" in record.message] == [
        "prompts attend by the triton kernel in 1 of 2 layers, which have windows, soft caps or sinks",
        "prompts attend by flashinfer from now on",
    ]
    assert tokens == _answers(models, None, "torch")


@pytest.mark.usefixtures("flashinfer")
def test_prompts_stay_where_the_kernels_cannot_be_built(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, and the build is not asked again."""
    monkeypatch.setattr(Build, "failed", True)
    build = Build(torch.float32, 16, "cpu")
    attention = Attention(4, PoolShape(KvFormat(LAYERS, 2, 16), 1, 16), 0.25, build)
    prompts = PromptAttention(attention, ScoreScaling(0.25))
    assert [prompts.plan([QuerySpan((0,), 0, 1)]) for _ in range(4)] == [False] * 4
    assert (Attention.planned, build.asked) == ([], Build.asks)
    assert [record.message for record in caplog.records] == [
        "prompts stay with the triton kernel: no compiler"
    ]


def test_a_missing_flashinfer_is_an_error_that_names_the_flag(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="--prefill-attention-backend flashinfer") as refusal:
        _answers(models, None, "flashinfer")
    assert refusal.value.param == "prefill-attention-backend"


def _answers(models: tuple[Path, Path], draft: str | None, prompts: str) -> list[list[int]]:
    """Greedy tokens after each of `PROMPTS`, whose attention is by `prompts`; the rest is then by triton."""
    config = EngineConfig(
        model=str(models[0]),
        draft=draft,
        attention_backend="torch" if prompts == "torch" else "triton",
        prefill_attention_backend=prompts,
        num_pages=64,
        max_running=4,
        chunk_tokens=CHUNK,
        speculation=SpeculationConfig(steps=2, draft_tokens=3),
    )
    generator = torch.Generator().manual_seed(3)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    cluster = Loopback(config)
    try:
        prompts_ids = [torch.randint(256, (n,), generator=generator).tolist() for n in PROMPTS]
        requests = [GenerationRequest(str(i), tuple(ids), params) for i, ids in enumerate(prompts_ids)]
        results = [cluster.submit(request, split=False) for request in requests]
        wait_all(results, 60)
    finally:
        cluster.close()
    return [result.tokens[0] for result in results]
