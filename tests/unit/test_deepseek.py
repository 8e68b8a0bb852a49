"""DeepSeek-V3 against transformers, and every mistake that its readers have made, seen to be noticed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ExpertsSpec, LatentSpec, LayerSpec, ModelConfig
from eyas.engine.checkpoint.rope import RopeConfig
from eyas.engine.checkpoint.weights import CPU, FolderWeights, Part, Shape
from eyas.engine.layers.routing import Routes, allowed, sigmoid, weights_of
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models import feed_forward
from eyas.engine.models.latent_attention import LatentMixer
from eyas.engine.models.ops import torch_ops
from eyas.engine.models.ops.machine import Blocks
from eyas.engine.models.ops.parts import LatentPart, RouterPart
from eyas.engine.models.ops.torch_ops import TorchMachine, TorchOps, routed
from eyas.engine.models.table import read_model
from tests.unit import model_rig
from tests.unit.families import write_family
from tests.unit.model_rig import Rig
from tests.unit.tiny_deepseek import RAGGED, SMALL, WHOLE, write_tiny_deepseek

ROWS = 96  # position 0 alone sees neither a wrong rotation nor a wrong scale
CLOSE = 5e-5
"""Root mean square, of logits one unit wide. transformers in float32 is as far from itself in float64."""
SEEN = 0.03


@dataclass(frozen=True)
class Case:
    """A stored model, and transformers' logits of `tokens`."""

    folder: Path
    tokens: list[int]
    expected: torch.Tensor

    def rig(self, config: ModelConfig | None = None) -> Rig:
        return Rig(self.folder, config, pages=16)

    def found(self, rig: Rig) -> torch.Tensor:
        return rig.logits([QuerySpan(rig.table(ROWS), 0, ROWS)], self.tokens)

    def error(self, rig: Rig) -> float:
        return float((self.found(rig) - self.expected).pow(2).mean().sqrt() / self.expected.std())

    def agreement(self, rig: Rig) -> float:
        return float((self.found(rig).argmax(-1) == self.expected.argmax(-1)).float().mean())


def case_of(folder: Path, sizes: dict[str, Any], shift: float = 0.0) -> Case:
    model = write_tiny_deepseek(folder, sizes, shift)
    tokens = torch.randint(sizes["vocab_size"], (ROWS,), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return Case(folder, tokens.tolist(), model(tokens[None]).logits[0])


@pytest.fixture(scope="module", params=["small", pytest.param("ragged", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    sizes = {"small": SMALL, "ragged": RAGGED}[request.param]
    return case_of(tmp_path_factory.mktemp("model"), sizes)


@pytest.mark.parametrize(
    ("sizes", "shift"),
    [
        pytest.param(SMALL, 0.0, id="small"),
        pytest.param(WHOLE, 0.0, id="whole", marks=pytest.mark.slow),
        pytest.param(RAGGED, -2.0, id="ragged, negative"),
        pytest.param(RAGGED, 0.0, id="ragged", marks=pytest.mark.slow),
        pytest.param(SMALL, -2.0, id="small, negative", marks=pytest.mark.slow),
        pytest.param(WHOLE, -2.0, id="whole, negative", marks=pytest.mark.slow),
    ],
)
def test_logits_equal_transformers(tmp_path: Path, sizes: dict[str, Any], shift: float) -> None:
    """With corrections below 0 every score that chooses is negative."""
    case = case_of(tmp_path, sizes, shift)
    rig = case.rig()
    assert case.error(rig) < CLOSE
    assert (case.found(rig) - case.expected).abs().max() < 4 * CLOSE


# --- mistakes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mistake:
    """What is done otherwise: in a specification, in a tensor as it is read, or in a model that is built."""

    attention: Callable[[LatentSpec], LatentSpec] = lambda spec: spec
    experts: Callable[[ExpertsSpec], ExpertsSpec] = lambda spec: spec
    tensor: Callable[[str, torch.Tensor, LatentSpec], torch.Tensor] = lambda name, stored, spec: stored
    mixing: Callable[[LatentMixer[Any]], None] = lambda mixer: None
    routing: Callable[[torch.Tensor, RouterPart], Routes] = routed


def mistaken(case: Case, mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> Rig:
    config = read_model(case.folder)
    config = dataclasses.replace(config, layers=tuple(_changed(layer, mistake) for layer in config.layers))
    spec = config.layers[0].attention
    assert isinstance(spec, LatentSpec)

    class Changed(FolderWeights):
        def _load(self, name: str, shape: Shape, part: Part, dtype: torch.dtype) -> torch.Tensor:
            return mistake.tensor(name, super()._load(name, shape, part, dtype), spec)

    monkeypatch.setattr(model_rig, "FolderWeights", Changed)
    rig = case.rig(config)
    for layer in rig.model.layers:
        ((mixer, _),) = layer._mixers
        assert isinstance(mixer, LatentMixer)
        mistake.mixing(mixer)
    monkeypatch.setattr(torch_ops, "routed", mistake.routing)
    return rig


def _changed(layer: LayerSpec, mistake: Mistake) -> LayerSpec:
    attention, part = layer.attention, layer.feed_forward
    assert isinstance(attention, LatentSpec)
    return dataclasses.replace(
        layer,
        attention=mistake.attention(attention),
        feed_forward=mistake.experts(part) if isinstance(part, ExpertsSpec) else part,
    )


WIDENED = 0.1 * math.log(40.0) + 1.0


def attention(**fields: Any) -> Mistake:
    return Mistake(attention=lambda spec: dataclasses.replace(spec, **fields))


def scaled(by: float) -> Mistake:
    return Mistake(attention=lambda spec: dataclasses.replace(spec, scale=spec.scale * by))


def experts(**fields: Any) -> Mistake:
    return Mistake(experts=lambda spec: dataclasses.replace(spec, **fields))


def _wide_angles(spec: LatentSpec) -> LatentSpec:
    return dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, attention_factor=WIDENED))


def _cached_width(spec: LatentSpec) -> LatentSpec:
    own = spec.plain_dim + spec.rotated_dim
    return dataclasses.replace(spec, scale=spec.scale * (own / spec.head_dim) ** 0.5)


def _keys_before_values(name: str, stored: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    if "kv_b_proj" not in name:
        return stored
    keys, values = stored.split((spec.num_heads * spec.plain_dim, spec.num_heads * spec.value_dim))
    halves = (half.view(spec.num_heads, -1, spec.kv_rank) for half in (keys, values))
    return torch.cat(tuple(halves), 1).reshape(stored.shape)


def _value_first(name: str, stored: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    if "kv_b_proj" not in name:
        return stored
    return stored.view(spec.num_heads, -1, spec.kv_rank).roll(spec.plain_dim, 1).reshape(stored.shape)


def _shared_scaled(name: str, stored: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    return stored * 2.5 if "shared_experts.down_proj" in name else stored


def _short_bias(name: str, stored: torch.Tensor, spec: LatentSpec) -> torch.Tensor:
    return stored.bfloat16().float() if "correction_bias" in name else stored


class _NormOfAll(TorchOps):
    """What is stored of a latent is scaled by the root mean square of its whole row."""

    def store_latents(self, made: torch.Tensor, part: LatentPart, layer: int) -> torch.Tensor:
        queries, latent = super().store_latents(made, part, layer), part.spec.kv_rank
        row = made[: self.step.count, -latent - part.spec.rotated_dim :]
        squares = (each.pow(2).mean(-1, keepdim=True) + 1e-6 for each in (row[:, :latent], row))
        stored = self.step.pool._field_rows[layer]
        stored[self.step.slots(layer), :latent] *= torch.div(*squares).sqrt()
        return queries


def _norm_of_all(mixer: LatentMixer[Any]) -> None:
    attend = mixer.attend
    mixer.attend = lambda read, layer, ops: attend(read, layer, _NormOfAll(ops.step, ops.eps))  # type: ignore[method-assign]


def _no_query_norm(mixer: LatentMixer[Any]) -> None:
    mixer._part = dataclasses.replace(mixer._part, norms=dataclasses.replace(mixer._part.norms, query=None))


def _bias_in_weights(x: torch.Tensor, part: RouterPart, _adapters: object = None) -> Routes:
    chosen = routed(x, part).experts
    assert part.correction is not None
    weights = (part.weight(x.float()).sigmoid() + part.correction).gather(1, chosen)
    return Routes(chosen, weights / weights.sum(-1, keepdim=True) * 2.5)


def _closed_are_zero(x: torch.Tensor, part: RouterPart, _adapters: object = None) -> Routes:
    scores = sigmoid(part.weight(x.float()))
    wanted = allowed(scores + part.correction, part.spec).nan_to_num(neginf=0.0)
    chosen = wanted.sort(stable=True, dim=-1, descending=True).indices[:, : part.spec.per_row]
    return Routes(chosen, weights_of(scores, chosen, part.spec))


def _short_router(x: torch.Tensor, part: RouterPart) -> Routes:
    def short(rows: torch.Tensor, _: None) -> torch.Tensor:
        made: torch.Tensor = part.weight(rows.bfloat16().float())
        return made.bfloat16().float()

    return routed(x, dataclasses.replace(part, weight=short))


MISTAKES = {
    "halves are rotated, not neighbours": attention(adjacent=False),
    "rope without yarn": attention(rope=RopeConfig(10000.0)),
    "cos and sin are widened": Mistake(attention=_wide_angles),
    "scores are not widened": scaled(WIDENED**-2),
    "scores are widened once": scaled(WIDENED**-1),
    "scores are widened four times": scaled(WIDENED**2),
    "scores by the width of a cached row": Mistake(attention=_cached_width),
    "keys of all heads, then values": Mistake(tensor=_keys_before_values),
    "a head's value, then its key": Mistake(tensor=_value_first),
    "the norm counts the rotated key": Mistake(mixing=_norm_of_all),
    "queries without their norm": Mistake(mixing=_no_query_norm),
    "the bias counts in the weights": Mistake(routing=_bias_in_weights),
    "groups do not limit": experts(topk_groups=SMALL["n_group"], groups=SMALL["n_group"]),
    "a group is its best expert": experts(group_best=1),
    "weights are not normalised": experts(normalised=False),
    "weights are not scaled": experts(scale=1.0),
    "the shared expert is scaled": Mistake(tensor=_shared_scaled),
    "scores are a softmax": experts(scores="softmax"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(case: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = case.error(mistaken(case, MISTAKES[name], monkeypatch))
    print(f"{name}: {error:.2g}")
    assert error > SEEN


@pytest.fixture(scope="module")
def negative(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return case_of(tmp_path_factory.mktemp("negative"), RAGGED, -2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [Mistake(routing=_closed_are_zero), Mistake(tensor=_short_bias)],
    ids=["closed is 0", "bf16 bias"],
)
def test_a_mistake_with_the_correction_is_noticed_where_it_is_negative(
    negative: Case, mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert negative.agreement(negative.rig()) == 1.0
    assert negative.agreement(mistaken(negative, mistake, monkeypatch)) < 0.97


# --- the router, on near ties ------------------------------------------------------------------------------


def router_of(tensors: dict[str, torch.Tensor], **fields: Any) -> RouterPart:
    plain = {"width": 16, "experts": 8, "per_row": 3, "scores": "sigmoid", "normalised": True}
    spec = ExpertsSpec(**(plain | fields))

    class Given:
        placement = CPU

        def take(self, name: str, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
            assert dtype == torch.float32 and tensors[name].shape == shape
            return tensors[name]

    config = SimpleNamespace(hidden_size=16, layers=(), context_length=0)
    machine = TorchMachine(config, SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
    blocks = Blocks(config, Given(), machine)  # type: ignore[arg-type]
    return feed_forward._router(blocks, spec, ("g",), False)


def stated(logits: list[float], bias: list[float], groups: int, kept: int, per_row: int) -> dict[int, float]:
    """The rule, for one row, in Python's own numbers: expert -> weight."""
    scores = [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    wanted = [score + correction for score, correction in zip(scores, bias, strict=True)]
    size = len(wanted) // groups
    worth = [sum(sorted(wanted[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    open_groups = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept]
    allowed = [e for e in range(len(wanted)) if e // size in open_groups]
    chosen = sorted(allowed, key=lambda e: (-wanted[e], e))[:per_row]
    total = sum(scores[e] for e in chosen)
    return {e: scores[e] / total * 2.5 for e in chosen}


@pytest.mark.parametrize("shift", [0.0, -2.0])
@pytest.mark.parametrize("short", [False, True], ids=["float32", "bf16 logits"])
def test_near_ties_are_decided_in_float32(shift: float, short: bool) -> None:
    """Logits of a row differ by 1e-3 of themselves, which bf16 rounds away."""
    generator = torch.Generator().manual_seed(1)
    x = 0.25 * torch.randn(64, 16, generator=generator)
    gate = torch.randn(1, 16, generator=generator) + 1e-3 * torch.randn(8, 16, generator=generator)
    bias = torch.full((8,), shift)
    tensors = {"g.weight": gate, "g.e_score_correction_bias": bias}
    router = router_of(tensors, corrected=True, groups=4, topk_groups=2, group_best=2, scale=2.5)
    routes = (_short_router if short else routed)(x, router)
    found = [dict(zip(*row, strict=True)) for row in zip(*(part.tolist() for part in routes), strict=True)]
    exact = (x.double() @ gate.double().T).tolist()
    wanted = [stated(logits, bias.tolist(), 4, 2, 3) for logits in exact]
    same = [set(mine) == set(theirs) for mine, theirs in zip(found, wanted, strict=True)]
    if short:
        assert sum(same) < 0.7 * len(same)
        return
    assert sum(same) >= 0.97 * len(same)
    for mine, theirs, agree in zip(found, wanted, same, strict=True):
        assert not agree or mine == pytest.approx(theirs, abs=1e-6)


def test_of_equal_experts_the_first_are_taken() -> None:
    routes = routed(torch.ones(2, 16), router_of({"g.weight": torch.zeros(8, 16)}))
    assert routes.experts.tolist() == [[0, 1, 2]] * 2
    assert routes.weights.tolist() == [pytest.approx([1 / 3] * 3)] * 2


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("deepseek_v3", {}, "kv_lora_rank 24"),
        ("qwen3_moe", {"moe_intermediate_size": 40}, "intermediate_size"),
        ("mixtral", {"intermediate_size": 104}, "intermediate_size"),
    ],
)
def test_a_gpu_refuses_by_name_before_weights_are_read(
    tmp_path: Path, name: str, changes: dict[str, int], why: str
) -> None:
    write_family(tmp_path, name, vocab_size=128, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"not to be read")
    config = EngineConfig(model=str(tmp_path), draft=None, num_pages=4, attention_backend="triton")
    for ranks in (1, 2):
        asked = dataclasses.replace(config, tensor_parallel_size=ranks)
        with pytest.raises(ConfigError, match=f"has no implementation for a GPU: {why} "):
            EngineSpec.of(asked)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ({"topk_method": "best"}, "topk_method best with scoring_func None is not supported"),
        ({"scoring_func": "softmax"}, "topk_method noaux_tc with scoring_func softmax is not supported"),
        (
            {"quantization_config": {"quant_method": "quip"}},
            "quant_method 'quip' is not supported",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    write_family(tmp_path, "deepseek_v3")
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | change))
    with pytest.raises(ConfigError, match=why):
        read_model(tmp_path)
