"""The engine's own recipe: the kernels of every kind of round are found, and compile, without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.families import SAMPLES, write_family
from tests.unit.foreign_families import FOREIGN
from tests.unit.fp4_formats import FP4
from tests.unit.fp8_block_weights import write_fp8
from tests.unit.fp8_formats import FORMATS, KEPT, write_format
from tests.unit.hybrid_rig import write_hybrid
from tests.unit.packed_formats import PACKINGS, write_packed
from tests.unit.tiny import write_tiny_eagle, write_tiny_eagle3, write_tiny_llama
from tests.unit.tiny_deepseek import SMALL, write_tiny_nextn_deepseek
from tests.unit.tiny_mtp import write_tiny_mimo

pytest.importorskip("triton")

pytestmark = pytest.mark.slow

RECORD = """
import json, sys
from dataclasses import replace
from functools import partial
from triton.runtime import driver
from eyas.common.config import SpeculationConfig, resolve_engine
from eyas.engine.loading.recipe import launches
from eyas.engine.kernels.launch.compile_ahead import NoDevice, record
from tests.unit.warm_kernels import compile_all

model, head, compiled, asked = json.loads(sys.argv[1])
driver.set_active(NoDevice(90))
asked |= {"max_running": 24, "chunk_tokens": 300, "prefill_attention_backend": "triton"}
config = resolve_engine("cuda", model=model, draft=head, **asked)
found = record(partial(launches, replace(config, speculation=SpeculationConfig(*SPEC))))
names = [variant.args[0].__name__ for variant in found]
compile_all(variant for name, variant in zip(names, found) if name in compiled)
print(json.dumps({name: names.count(name) for name in names}))
"""
SUMS = """
import json, sys
from functools import partial
import torch
from triton.runtime import driver
from eyas.common.config import resolve_engine
from eyas.engine.loading.recipe import launches
from eyas.engine.kernels.launch.compile_ahead import NoDevice, record
from tests.unit.warm_kernels import compile_all
from eyas.engine.parallel.one_shot import SUMS_ROWS, OneShot

model, dtype = json.loads(sys.argv[1])

def launched():
    one_shot = OneShot(1, torch.zeros(2, dtype=torch.int64), pdl=True)
    for rows in (1, 5, 64):
        x, residual = (torch.empty(rows, 512, dtype=getattr(torch, dtype)) for _ in range(2))
        if one_shot.takes(x):
            one_shot(x)
            one_shot(x, residual, torch.empty(OneShot.parts(512), SUMS_ROWS))

def keys(variants):
    return sorted(variant.args[1] for variant in variants if name(variant) == "_sum_over_ranks")

def name(variant):
    return variant.args[0].__name__

driver.set_active(NoDevice(90))
asked = {"max_running": 24, "chunk_tokens": 300, "prefill_attention_backend": "triton"}
asked |= {"draft": None, "tensor_parallel_size": 2}
found = record(partial(launches, resolve_engine("cuda", model=model, dtype=dtype, **asked)))
sums = [variant for variant in found if name(variant) == "_sum_over_ranks"]
if sums:
    compile_all(sums)
kernels = sorted({name(variant) for variant in found})
print(json.dumps({"kernels": kernels, "found": keys(found), "launched": keys(record(launched))}))
"""
LAYERS = """
import json, sys
from functools import partial
from triton.runtime import driver
from eyas.common.config import resolve_engine
from eyas.engine.loading import recipe
from eyas.engine.models.decoder import Decoder
from eyas.engine.kernels.launch.compile_ahead import NoDevice, record
from tests.unit.warm_kernels import compile_all

model, compiled = json.loads(sys.argv[1])
driver.set_active(NoDevice(90))
asked = {"max_running": 24, "chunk_tokens": 300, "prefill_attention_backend": "triton", "draft": None}
launches = partial(recipe.launches, resolve_engine("cuda", model=model, **asked))

def told(variants):
    return sorted((variant.args[0].__name__, variant.args[1]) for variant in variants)

found = record(launches)
Decoder.brief = lambda model: model
every = record(launches)
compile_all(variant for variant in found if variant.args[0].__name__ in compiled)
print(json.dumps({"found": told(found), "every": told(every)}))
"""
SHARERS = """
import json, sys
from functools import partial
from triton.runtime import driver
from eyas.common.config import resolve_engine
from eyas.engine.kernels.launch.compile_ahead import NoDevice, record
from tests.unit.warm_kernels import compile_all
from eyas.engine.loading.recipe import launches

driver.set_active(NoDevice(90))
asked = {"max_running": 24, "chunk_tokens": 300, "prefill_attention_backend": "triton"}
model, draft = json.loads(sys.argv[1])
asked |= {"draft": draft, "dp_attention": 2, "expert_replicas": 2, "transfer": "none"}
found = record(partial(launches, resolve_engine("cuda", model=model, **asked)))
own = [variant for variant in found if variant.args[0].__name__ in ("_join_ranks", "_sum_over_ranks")]
compile_all(own)
print(json.dumps(sorted({variant.args[0].__name__ for variant in (found if draft else own)})))
"""
NARROW = """
import json, sys
from functools import partial
from triton.runtime import driver
from eyas.common.config import resolve_engine
from eyas.engine.device.step import StepShape
from eyas.engine.kernels.launch.compile_ahead import NoDevice, record
from eyas.engine.loading import recipe

driver.set_active(NoDevice(90))
asked = {"max_running": 4, "chunk_tokens": 1100, "cuda_graph_bs": (1,), "mixed_tokens": 0, "max_loras": 2}
asked |= {"model": sys.argv[1], "draft": None, "prefill_attention_backend": "triton"}
launches = partial(recipe.launches, resolve_engine("cuda", **asked))
usual = recipe._shapes

def launched(shapes):
    recipe._shapes = shapes
    return {(variant.args[0].__name__, variant.args[1]) for variant in record(launches)}

sizes = [(batch, rows) for batch in (0, 3) for rows in (2, 7, 13, 20, 40, 90, 120, 200)]
sizes += [(0, 300), (0, 700)]
steps = [StepShape(batch, 1, rows, 4, 1, adapted=own) for batch, rows in sizes for own in (False, True)]
needed, warm = launched(lambda _: steps), launched(usual)
recipe.NARROW_ROWS = ()
late = (needed - warm, needed - launched(usual))
print(json.dumps([sorted({name for name, _ in each}) for each in late]))
"""
PLAIN = {"_gather", "_prepare", "_attend", "_attend_chunks", "_peaks", "_settle", "_draw", "_verdict"}
PLAIN |= {"_land", "_mask", "_process", "_report"}
PLAIN |= {"_norm", "_rope_write", "_act_mul", "qkv_rope_kernel", "_qkv_rope", "linear_kernel", "gated_kernel"}
DRAFTED = PLAIN | {"_put", "_join", "_gather_path", "_look_up", "_draft_forced"}
SPECULATION = {
    "plain": ((3, 1, 4), PLAIN),
    "ngram": ((3, 1, 4, (), True), PLAIN | {"_look_up", "_draft_forced"}),
    "chain": ((3, 1, 4), DRAFTED | {"_propose"}),
    "tree": ((3, 2, 6), DRAFTED | {"_compact", "_couple", "_grow", "_select"}),
    "wide tree": ((4, 30, 100), DRAFTED | {"_compact", "_couple", "_grow", "_select"}),
}
OWN = {
    "plain": ["_verdict"],
    "ngram": ["_look_up", "_draft_forced"],
    "chain": ["_propose", "_put", "_look_up"],
    "tree": ["_couple", "_select"],
    "wide tree": ["_attend", "_prepare", "_grow", "_select"],  # whose masks have several words
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty: of compiled kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path / "cache"


@pytest.mark.parametrize("rounds", SPECULATION)
def test_all_kernels_are_found_and_compile(tmp_path: Path, cache: Path, rounds: str) -> None:
    """Some of them are compiled: one of the plain step, those that only this kind of round has."""
    spec, kernels = SPECULATION[rounds]
    compiled = ["_norm", *OWN[rounds]]
    found = _recorded(tmp_path, spec, compiled, drafted=rounds not in ("plain", "ngram"))
    assert set(found) == kernels | {"_add_parts"}  # few tiles of a long prompt
    assert len(list(cache.rglob("*.cubin"))) == sum(found[name] for name in compiled)


def test_a_head_without_norms_has_its_kernels(tmp_path: Path, cache: Path) -> None:
    """EAGLE-2's: what joins compiles."""
    model = write_tiny_llama(tmp_path / "model", tied=False)
    head = write_tiny_eagle(tmp_path / "head", model, layers=2)
    spec, kernels = SPECULATION["chain"]
    found = _told(RECORD.replace("SPEC", str(spec)), json.dumps([str(model), str(head), ["_join"], {}]))
    assert set(found) == kernels | {"_add_parts"}  # few tiles of a long prompt
    assert len(list(cache.rglob("_join.cubin"))) == found["_join"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_sum_over_ranks_is_found_as_it_is_launched(tmp_path: Path, cache: Path, dtype: str) -> None:
    """With a residual and sums in narrow steps, without in wide ones: the keys are those of real tensors."""
    model = write_tiny_llama(tmp_path / "model", tied=False, hidden=512)
    told = _told(SUMS, json.dumps([str(model), dtype]))
    assert told["kernels"] == sorted(PLAIN | {"_add_parts", "_sum_over_ranks"})  # few tiles of a long prompt
    assert len(told["found"]) == 2
    assert told["found"] == told["launched"]
    assert len(list(cache.rglob("_sum_over_ranks.cubin"))) == 2


def test_attention_ranks_exchange_rows_by_kernels_that_are_found(tmp_path: Path, cache: Path) -> None:
    write_family(tmp_path / "model", "mixtral", vocab_size=128, hidden_size=64, head_dim=32)
    assert _told(SHARERS, json.dumps([str(tmp_path / "model"), None])) == ["_join_ranks", "_sum_over_ranks"]
    assert len(list(cache.rglob("_join_ranks.cubin"))) == 1
    assert len(list(cache.rglob("_sum_over_ranks.cubin"))) == 1


def test_so_are_those_of_attention_ranks_that_draft(tmp_path: Path, cache: Path) -> None:
    """A NextN layer's experts, too, are asked by all ranks."""
    write_tiny_nextn_deepseek(tmp_path / "model", SMALL | {"num_hidden_layers": 2})
    found = _told(SHARERS, json.dumps([str(tmp_path / "model")] * 2))
    assert {"_propose", "_gather_path", "_look_up", "_choose", "_join_ranks", "_sum_over_ranks"} <= set(found)


def test_float32_is_summed_by_no_kernel_of_ours(tmp_path: Path, cache: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", tied=False, hidden=512)
    assert _told(SUMS, json.dumps([str(model), "float32"]))["found"] == []


def test_an_mtp_heads_kernels_are_found_and_compile(tmp_path: Path, cache: Path) -> None:
    """The join that looks at positions among them."""
    spec, kernels = SPECULATION["chain"]
    model = str(write_tiny_mimo(tmp_path / "model"))
    found = _told(RECORD.replace("SPEC", str(spec)), json.dumps([model, model, ["_join"], {}]))
    assert set(found) == kernels | {"_add_parts"}  # few tiles of a long prompt
    assert len(list(cache.rglob("_join.cubin"))) == found["_join"]


def test_so_are_those_of_several_mtp_layers(tmp_path: Path, cache: Path) -> None:
    """Those that look for the row before among them, and attention that leaves rows out."""
    spec, kernels = SPECULATION["chain"]
    model, own = str(write_tiny_mimo(tmp_path / "model", stages=3)), {"_before", "_keep"}
    wanted = [*own, "_attend", "_attend_chunks"]
    found = _told(RECORD.replace("SPEC", str(spec)), json.dumps([model, model, wanted, {}]))
    assert set(found) == kernels | own | {"_add_parts"}  # few tiles of a long prompt
    for name in wanted:
        assert len(list(cache.rglob(f"{name}.cubin"))) == found[name]


def test_a_batch_without_a_graph_has_its_kernels(tmp_path: Path, cache: Path) -> None:
    spec, kernels = SPECULATION["plain"]
    every = _recorded(tmp_path, spec)
    assert _recorded(tmp_path, spec, cuda_graph_bs=[1]) == every
    assert set(every) == kernels | {"_add_parts"}  # few tiles of a long prompt


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "qwen3_moe"])
def test_layers_left_out_launch_nothing_else(tmp_path: Path, cache: Path, family: str) -> None:
    """And what only this family launches compiles for a GPU. Of Gemma's layers only the third sees all."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "head_dim": 32}
    local, everywhere = "sliding_attention", "full_attention"
    kinds = {"layer_types": [local, local, everywhere, local]} if family == "gemma3" else {}
    write_family(tmp_path / "model", family, **sizes, **kinds)
    compiled = {"llama": [], "qwen3": ["qkv_rope_kernel"], "gemma3": ["_norm", "_gather", "_attend_chunks"]}
    compiled["qwen3_moe"] = ["_choose", "_place", "_route_rows"]
    told = _told(LAYERS, json.dumps([str(tmp_path / "model"), compiled[family]]))
    assert told["found"] == told["every"]
    routed = {"_choose", "_count", "_place", "product_kernel", "_combine", "_products", "_back"}
    routed |= {"_by_depth", "_sweep"}  # of prompts with many rows per expert, and of a short k
    routed |= {"_route_rows", "_judge", "_linear"}  # of few rows, and of one
    expected = PLAIN | routed if family == "qwen3_moe" else PLAIN
    if family != "llama":  # heads have norms
        expected = expected - {"_qkv_rope"}
    if family == "gemma3":  # windows have pools of their own
        expected = expected | {"_place_rounds", "_place_chunks"}
    assert {name for name, _ in told["found"]} == expected
    windows = {"window=40" in key for name, key in told["found"] if name in ("_attend", "_attend_chunks")}
    assert windows == ({True, False} if family == "gemma3" else {False})


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "gptq"),
        ("mixtral", "nvfp4"),
        ("mixtral", "w8a16"),
        ("llama", "w4a16, zero points"),
        ("llama", "w4a16, by activations"),
    ],
)
def test_packed_weights_have_kernels_of_their_own(
    tmp_path: Path, cache: Path, family: str, name: str
) -> None:
    """For many rows too: no request waits for one to be compiled. Those of experts compile for a GPU."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64}
    write_family(tmp_path / "plain", family, **sizes)
    write_packed(tmp_path / "packed", tmp_path / "plain", (PACKINGS | FP4)[name])
    told = _told(LAYERS, json.dumps([str(tmp_path / "packed"), ["_packed", "_back_add"]]))
    assert told["found"] == told["every"]
    found = {each for each, _ in told["found"]}
    assert "_widen" in found and ("_packed" in found) == (family == "mixtral")
    assert not found & {"product_kernel", "_by_depth"}


def test_rows_of_prompts_have_their_kernels_where_steps_have_no_graph(tmp_path: Path, cache: Path) -> None:
    """With adapters and without. If the recipe has no such rows, products are compiled in mid-service."""
    model = write_tiny_llama(tmp_path / "model", hidden=128, heads=2, tied=False)
    late, without = _told(NARROW, str(model))
    assert late == []
    assert {"_group", "linear_kernel", "qkv_rope_kernel"} <= set(without)


def test_layers_with_states_keep_their_numbers(tmp_path: Path, cache: Path) -> None:
    """Those that are left out have their place in the pools all the same."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "linear_num_value_heads": 8}
    sizes |= {"linear_value_head_dim": 16, "layer_types": kinds * 2, "num_hidden_layers": 8}
    write_hybrid(tmp_path / "model", "qwen3_5", **sizes)
    told = _told(LAYERS, json.dumps([str(tmp_path / "model"), []]))
    assert told["found"] == told["every"]
    assert {"_decoded", "_gates", "_gated_norm"} <= {name for name, _ in told["found"]}


def test_a_model_that_transformers_computes_has_the_kernels_of_its_attention(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 24 elements, filled up to 32; none of a product."""
    monkeypatch.setitem(SAMPLES, "olmo", FOREIGN["olmo"])
    write_family(tmp_path / "model", "olmo", vocab_size=131, hidden_size=96)
    spec, kernels = SPECULATION["ngram"]
    told = json.dumps([str(tmp_path / "model"), None, ["_rope_write"], {}])
    found = _told(RECORD.replace("SPEC", str(spec)), told)
    assert set(found) == kernels - {
        "_gather",
        "_norm",
        "_act_mul",
        "qkv_rope_kernel",
        "_qkv_rope",
        "linear_kernel",
        "gated_kernel",
    }
    assert len(list(cache.rglob("_rope_write.cubin"))) == found["_rope_write"]


def test_rows_that_a_layer_rounds_for_the_next_have_their_kernels(tmp_path: Path, cache: Path) -> None:
    """Of any number: their norm is left to the product that reads them. Two layers have no experts."""
    sizes = {"hidden_size": 256, "head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 256}
    layers = {"num_hidden_layers": 5, "mlp_only_layers": [0, 1], "moe_intermediate_size": 128}
    write_family(tmp_path / "plain", "qwen3_moe", vocab_size=128, **sizes, **layers)
    write_fp8(tmp_path / "model", tmp_path / "plain")
    told = _told(LAYERS, json.dumps([str(tmp_path / "model"), []]))
    found, every = ({tuple(each) for each in told[name]} for name in ("found", "every"))
    assert every <= found and {"_combine_row", "_combine_rounded", "_few"} <= {name for name, _ in every}


def test_a_layer_that_is_partly_in_fp8_has_its_kernels(tmp_path: Path, cache: Path) -> None:
    """Of four layers the third is another one only by what is not in FP8."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "head_dim": 32}
    write_family(tmp_path / "plain", "llama", **sizes)
    kept = (*KEPT, "layers.2.mlp.gate_proj")
    write_format(tmp_path / "model", tmp_path / "plain", FORMATS["fp8, static"], kept=kept)
    told = _told(LAYERS, json.dumps([str(tmp_path / "model"), ["_quantise_rows"]]))
    assert told["found"] == told["every"]
    assert {"_quantise_rows", "product_kernel"} <= {name for name, _ in told["found"]}
    write_format(tmp_path / "whole", tmp_path / "plain", FORMATS["fp8, static"])
    whole = _told(LAYERS, json.dumps([str(tmp_path / "whole"), []]))
    assert len(whole["found"]) < len(told["found"])


def _recorded(
    folder: Path,
    spec: tuple[object, ...],
    compiled: list[str] | None = None,
    *,
    drafted: bool = False,
    recipe: str = "launches",
    **asked: object,
) -> Mapping[str, int]:
    """How many variants of each kernel an engine with 256 tokens has; those `compiled` are compiled."""
    model = write_tiny_llama(folder / "model", tied=False)
    head = write_tiny_eagle3(folder / "head", model, draft_vocab=128) if drafted else None
    told = json.dumps([str(model), head and str(head), compiled or [], asked])
    code = RECORD.replace("SPEC", str(spec)).replace(
        "recipe import launches", f"recipe import {recipe} as launches"
    )
    return _told(code, told)  # type: ignore[no-any-return]


def _told(code: str, argument: str) -> Any:
    """What a program prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("rounds", ["chain", "tree"])
def test_a_draft_workers_kernels_are_found_and_compile(tmp_path: Path, cache: Path, rounds: str) -> None:
    """Nothing of a target's step."""
    spec, _ = SPECULATION[rounds]
    own = {"chain": ["_propose", "_hear", "_answer"], "tree": ["_couple", "_grow", "_select"]}
    found = _recorded(
        tmp_path, spec, own[rounds], drafted=True, recipe="draft_launches", roles=["draft"], dtype="bfloat16"
    )
    shared = {"_take", "_join", "_attend", "_gather", "_norm"}
    shared |= {"qkv_rope_kernel", "linear_kernel", "gated_kernel"}
    assert set(found) == shared | {*own[rounds]} | ({"_peaks", "_qkv_rope"} if rounds == "chain" else set())
    assert len(list(cache.rglob("*.cubin"))) == sum(found[name] for name in own[rounds])


def test_rounds_whose_drafts_come_from_another_gpu_keep_their_features(tmp_path: Path, cache: Path) -> None:
    """In two variants: after rounds, and after rows without drafts; beside that of the taps."""
    found = _recorded(
        tmp_path, (3, 1, 4), ["_put"], drafted=True, roles=["decode"], transfer="cuda_ipc", dtype="bfloat16"
    )
    here = _recorded(tmp_path / "here", (3, 1, 4), drafted=True, dtype="bfloat16")
    assert found["_put"] == here["_put"] + 2
    assert not {"_propose", "_join", "_gather_path"} & set(found)
    assert len(list(cache.rglob("*.cubin"))) == found["_put"]


EVERY_STEP = """
import json, random, sys
from functools import partial
from triton.runtime import driver
from eyas.common.config import resolve_engine
from eyas.engine.device.step import StepShape
from eyas.engine.kernels.attention import exact_attend
from eyas.engine.kernels.launch.compile_ahead import NoDevice, record
from eyas.engine.loading import recipe
from eyas.engine.models.decoder import Decoder
from eyas.engine.loading.step_shapes import buckets_of

model, head, exact, cut = json.loads(sys.argv[1])
driver.set_active(NoDevice(90))
asked = {"max_running": 72, "chunk_tokens": 300, "prefill_attention_backend": "triton"}
asked |= {"deterministic": exact}
if cut:  # as a graph cuts no batch
    exact_attend.padded_batch = lambda batch: batch
launches = partial(recipe.launches, resolve_engine("cuda", model=model, draft=head, **asked))
shapes = recipe._shapes

def every(loaded):
    buckets, dice = buckets_of(loaded), random.Random(0)
    width, most = buckets.width, loaded.config.max_running
    for batch in range(1, most + 1):
        yield StepShape(batch, width)
        if width > 1:
            yield StepShape(0, width, singles=batch)
        prompts = dice.choice((1, 2, 12, 32))
        rows = max(prompts, dice.choice((16, 127, 128, 129, 256, dice.randint(1, 300))))
        singles = dice.choice((0, 0, 3)) if width > 1 else 0
        sizes = rows, -(-rows // buckets.tile_rows) + prompts - 1, dice.randint(0, prompts)
        yield buckets.shape(dice.choice((0, batch)), *sizes, singles, prompts)
    yield from shapes(loaded)

def names():
    return {(variant.args[0].__name__, variant.args[1]) for variant in record(launches)}

compiled = names()
recipe._shapes = every
print(json.dumps(sorted(name for name, _ in names() - compiled)))
"""


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("family", ["drafted", "experts", "latents"])
def test_no_step_needs_a_kernel_that_a_start_has_not_compiled(
    tmp_path: Path, cache: Path, family: str, exact: bool
) -> None:
    """Neither rounds of any number nor prompts beside them, of any number and length. A kernel that is
    compiled while requests run stops them all for seconds.
    """
    model, head = tmp_path / "model", None
    if family == "drafted":
        write_tiny_llama(model, tied=False)
        head = str(write_tiny_eagle(tmp_path / "head", model, layers=2))
    elif family == "experts":
        write_family(model, "mixtral", vocab_size=128, hidden_size=64, head_dim=32)
    else:
        write_tiny_nextn_deepseek(model, SMALL | {"num_hidden_layers": 2})
    assert _told(EVERY_STEP, json.dumps([str(model), head, exact, False])) == []


def test_power_attention_that_is_cut_as_no_graph_is_needs_others(tmp_path: Path, cache: Path) -> None:
    write_tiny_llama(tmp_path / "model", tied=False)
    found = _told(EVERY_STEP, json.dumps([str(tmp_path / "model"), None, True, True]))
    assert set(found) == {"_attend_shared"}
