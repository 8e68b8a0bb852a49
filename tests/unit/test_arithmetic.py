"""Which arithmetic an engine has, who is told, what is refused; and whether cuBLAS folds as we do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from eyas.common.config import EngineConfig, GatewayConfig, resolve_engine
from eyas.common.errors import ConfigError
from eyas.common.types import KvKind, Role, WorkerInfo
from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.engine.kernels.products import exact_wide, skinny
from eyas.engine.loading import bit_checks
from eyas.engine.loading.arithmetic import inexact
from eyas.engine.loading.bit_checks import FoldedWeight, products_of, unequal, weights_of
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.table import read_model
from gateway.backends.admission import served_model
from tests.unit import tensor_core
from tests.unit.families import write_family
from tests.unit.fp8_formats import FORMATS, write_format
from tests.unit.hybrid_rig import write_hybrid

# --- configuration ---------------------------------------------------------------------------------------


def test_a_cpus_is_exact_with_the_flag_and_without() -> None:
    assert {resolve_engine(deterministic=asked).arithmetic for asked in (False, True)} == {"exact"}


def test_a_gpus_is_exact_where_it_is_asked_for() -> None:
    assert resolve_engine("cuda").arithmetic == "fast"
    exact = resolve_engine("cuda", deterministic=True)
    assert (exact.arithmetic, exact.prefill_attention_backend) == ("exact", "triton")
    shared = resolve_engine("cuda", deterministic=True, tensor_parallel_size=2)
    assert shared.arithmetic == "exact_tp2", "sums over another number of GPUs have other bits"


@pytest.mark.parametrize(
    ("asked", "flag"),
    [
        ({"attention_backend": "torch"}, "attention-backend"),
        ({"prefill_attention_backend": "flashinfer"}, "prefill-attention-backend"),
        ({"dtype": "float32"}, "dtype"),
    ],
)
def test_what_no_gpu_computes_exactly_is_refused_by_its_flag(asked: dict[str, object], flag: str) -> None:
    resolve_engine("cuda", **asked)
    with pytest.raises(ConfigError, match=f"--{flag}: .* --deterministic") as refused:
        resolve_engine("cuda", deterministic=True, **asked)
    assert refused.value.param == flag


# --- who is told -----------------------------------------------------------------------------------------


def test_target_pages_of_another_arithmetic_mean_something_else(tmp_path: Path) -> None:
    write_family(tmp_path, "llama", vocab_size=128)
    plain = EngineConfig(model=str(tmp_path), draft=None, num_pages=4, dtype="float16")
    on_device = replace(plain, attention_backend="triton", prefill_attention_backend="triton")
    configs = (plain, replace(plain, deterministic=True), replace(on_device, deterministic=True), on_device)
    hashes = [EngineSpec.of(config).layout_hash(KvKind.TARGET) for config in configs]
    assert hashes[0] == hashes[1] == hashes[2] != hashes[3]
    assert len({EngineSpec.of(config).page_arithmetic(KvKind.DRAFT) for config in configs}) == 1, "advice"
    shared = replace(configs[2], tensor_parallel_size=2)
    assert EngineSpec.of(shared).layout_hash(KvKind.TARGET) != hashes[2], "sums of two ranks"


FP = "fp_0123456789ab"


def worker(arithmetic: str, *roles: Role) -> WorkerInfo:
    return WorkerInfo(
        worker="w:1",
        roles=roles or tuple(Role),
        epoch=1,
        model="m",
        fingerprint="0123456789abcdef",
        draft_fingerprint="",
        context_length=64,
        vocab_size=16,
        pages_total=4,
        arithmetic=arithmetic,
    )


def test_answers_are_exact_if_all_that_compute_them_are() -> None:
    exact, fast, draft = worker("exact"), worker("fast"), worker("fast", Role.DRAFT)
    names = [served_model(GatewayConfig(), who) for who in ([exact, draft], [exact, fast], [fast])]
    assert [model.arithmetic for model in names] == ["exact", "fast", "fast"]
    assert [model.system_fingerprint for model in names] == [
        "fp_0123456789ab_exact",
        *["fp_0123456789ab"] * 2,
    ]
    shared = served_model(GatewayConfig(), [worker("exact_tp2"), draft])
    assert shared.system_fingerprint == f"{FP}_exact_tp2"
    assert served_model(GatewayConfig(), [exact, worker("exact_tp2")]).arithmetic == "fast"
    marked = msgspec.structs.replace(exact, synthetic=True)
    assert served_model(GatewayConfig(), [marked]).system_fingerprint == f"{FP}_exact_synthetic"


# --- whether cuBLAS folds --------------------------------------------------------------------------------


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[skinny.ProductLaunch]:
    """On a CPU, whose interpreter needs few rows; its dots have the order of a GPU's, not numpy's."""
    monkeypatch.setattr(bit_checks, "COUNTS", (20, 33))
    with tensor_core.hopper():
        yield skinny.ProductLaunch.on("cpu", pdl=False, exact=True)


def test_every_weight_of_a_model_is_judged_once(tmp_path: Path) -> None:
    write_family(tmp_path, "qwen3", vocab_size=128)
    model = read_model(tmp_path)
    found = weights_of(model)
    assert {weight.kind for weight in found} == {"heads", "linear", "gated"}
    assert (model.vocab_size, model.hidden_size) in {(weight.n, weight.k) for weight in found}
    assert len(set(found)) == len(found) <= 5


def test_of_experts_it_is_their_router_alone(tmp_path: Path) -> None:
    """Theirs are grouped products: each is asked for with the tiles that it takes."""
    write_family(tmp_path, "mixtral", vocab_size=128, num_hidden_layers=1)
    model = read_model(tmp_path)
    routers = [weight for weight in weights_of(model) if weight.router]
    assert [(weight.n, weight.k) for weight in routers] == [(16, model.hidden_size)]
    gate_up, down = products_of(model)
    assert (gate_up.shape.experts, gate_up.shape.k, down.shape.n) == (4, model.hidden_size, model.hidden_size)
    pairs = [{tile.rows for tile in asked.tiles({})} for asked in (gate_up, down)]
    assert pairs[0] == pairs[1] and len(pairs[0]) > 1
    half = products_of(model, 2)[1].shape
    assert half.k * 2 == down.shape.k


def test_a_shared_expert_like_the_others_is_judged_with_them(tmp_path: Path) -> None:
    """As it is computed: tiles follow the number of experts."""
    write_family(tmp_path, "mixtral", vocab_size=128, num_hidden_layers=1)
    model = read_model(tmp_path)
    (layer,) = model.layers
    assert isinstance(layer.feed_forward, ExpertsSpec)
    alike = replace(layer.feed_forward, shared_width=layer.feed_forward.width)
    gate_up, down, *_ = products_of(replace(model, layers=(replace(layer, feed_forward=alike),)))
    assert (gate_up.shape.experts, down.shape.experts) == alike.with_shared[:1] * 2 == (5, 5)


def test_of_weights_in_fp8_all_products_are_asked_for(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    write_family(tmp_path / "plain", "llama", vocab_size=128, num_hidden_layers=1, **sizes)
    write_format(tmp_path / "fp8", tmp_path / "plain", FORMATS["fp8 in blocks"])
    assert products_of(read_model(tmp_path / "plain")) == []
    found = products_of(read_model(tmp_path / "fp8"))
    assert {(asked.shape.n, asked.shape.k, asked.shape.itemsize) for asked in found} == {
        (512, 256, 1),
        (256, 256, 1),
    }
    assert {asked.rounding.rows for asked in found if asked.rounding} == {"block"}


def by_cublas(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Its products are ours, but for one number."""

    def matmul(
        x: torch.Tensor,
        weight: torch.Tensor,
        way: skinny.ProductLaunch,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        found = exact_wide.fold_matmul(x, weight, dtype, out=out)
        if way.cublas:
            found[-1, -1] += error
        return found

    monkeypatch.setattr(exact_wide, "matmul", matmul)


WEIGHTS = [FoldedWeight("linear", 32, 64, 32), FoldedWeight("gated", 64, 32, 64)]


def test_a_product_that_folds_is_left_to_cublas(
    launch: skinny.ProductLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_cublas(monkeypatch, 0.0)
    assert unequal(WEIGHTS, launch, torch.float16) == []


def test_one_number_that_differs_is_noticed(
    launch: skinny.ProductLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_cublas(monkeypatch, 1.0)
    assert unequal(WEIGHTS, launch, torch.float16) == WEIGHTS
    assert str(WEIGHTS[0]) == "32 x 64"


def test_a_gpu_whose_own_kernels_differ_is_refused(
    launch: skinny.ProductLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = exact_wide.fold_matmul
    monkeypatch.setattr(exact_wide, "fold_matmul", lambda x, *rest: fold(x, *rest).add_(1))
    with pytest.raises(ConfigError, match="--deterministic: this GPU's sums for a weight of 32 x 64"):
        unequal(WEIGHTS, launch, torch.float16)


# --- what has no exact kernels ---------------------------------------------------------------------------


def test_of_latents_all_products_are_asked_for(tmp_path: Path) -> None:
    write_family(tmp_path, "deepseek_v3")
    model = read_model(tmp_path)
    config = resolve_engine("cuda", deterministic=True)
    assert inexact(model, config) == ""
    asked = {(asked.shape.n, asked.shape.k) for asked in products_of(model) if asked.shape.experts == 1}
    assert {(40 + 24 + 8, 48), (4 * 20, 40), (48, 4 * 20)} <= asked
    assert all(weight.kind in ("linear", "gated") for weight in weights_of(model))


def test_of_a_hybrid_too_states_and_gates_are_judged(tmp_path: Path) -> None:
    """q, k and v of 2 and 6 heads of 16 and 8, the gate, and two numbers of a head; 4 gated queries of 16."""
    write_hybrid(tmp_path, "qwen3_5")
    model = read_model(tmp_path)
    hidden, config = model.hidden_size, resolve_engine("cuda", deterministic=True)
    assert inexact(model, config) == ""
    judged = {(weight.kind, weight.n, weight.k) for weight in weights_of(model)}
    heads = model.layers[2].attention
    rows = 2 * heads.head_dim * (heads.num_heads + heads.num_kv_heads)
    assert {("linear", 2 * 32 + 2 * 48 + 2 * 6, hidden), ("linear", hidden, 48)} <= judged
    assert ("linear", rows, hidden) in judged


def test_other_states_are_refused_by_name(tmp_path: Path) -> None:
    write_hybrid(tmp_path, "lfm2")
    assert "short convolutions" in inexact(read_model(tmp_path), resolve_engine("cuda", deterministic=True))


def test_ranks_are_judged_by_their_shares(tmp_path: Path) -> None:
    write_family(tmp_path, "llama", vocab_size=128)
    model = read_model(tmp_path)
    whole, halves = weights_of(model), weights_of(model, 2)
    assert [(weight.n, weight.k) for weight in halves][-1] == (64, model.hidden_size)
    assert {weight.n * weight.k * 2 for weight in halves} == {weight.n * weight.k for weight in whole}


def test_float32_is_named(tmp_path: Path) -> None:
    write_family(tmp_path, "llama")
    model, config = read_model(tmp_path), resolve_engine("cuda", deterministic=True)
    assert inexact(model, config) == ""
    assert inexact(model, replace(config, tensor_parallel_size=2)) == ""
    assert "float32" in inexact(model, replace(config, dtype="float32"))
    assert "--uniform-experts" in inexact(model, replace(config, uniform_experts=True))
