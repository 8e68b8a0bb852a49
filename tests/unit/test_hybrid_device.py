"""A hybrid on the device path, kernels interpreted: tokens of the plain engine, from cached states too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from eyas.cluster.checks import check_room
from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice, Role
from eyas.engine.batch.sequence import Sequence
from eyas.engine.device import program
from eyas.engine.device.buckets import GraphBuckets
from eyas.engine.device.executor import StepExecutor
from eyas.engine.device.step import StepShape
from eyas.engine.loading import device_build, follower
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.parallel.ranks import RankChannel, RankInfo
from eyas.engine.scheduling.scheduler import Scheduler
from kv_transfer import puller
from tests.unit import interpreted
from tests.unit.hybrid_rig import add_mtp_layer, write_hybrid
from tests.unit.hybrid_sizes import RANKS, SIZES, VOCAB
from tests.unit.loopback import Loopback, wait_all
from tests.unit.wandering import wander

pytestmark = pytest.mark.usefixtures("one_thread")

WAIT_S = 250
PLAIN = EngineConfig(
    model="", draft=None, num_pages=64, chunk_tokens=32, max_running=3, state_slots=8, worker="unified"
)
CHAIN = SpeculationConfig(steps=3, ngram=True)
HEADS = {
    "chain": SpeculationConfig(steps=2),
    "tree": SpeculationConfig(steps=2, topk=8, draft_tokens=12),  # half of all ids: many are right
    "both": SpeculationConfig(steps=2, topk=2, draft_tokens=4, ngram=True),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("hybrid")
    write_hybrid(folder / "model", "qwen3_5", **SIZES)
    add_mtp_layer(folder / "model", "layers.1.", SIZES["hidden_size"])
    return replace(PLAIN, model=str(folder / "model"), pool_dir=str(folder))


def on_device(config: EngineConfig, **changes: Any) -> EngineConfig:
    triton = {"attention_backend": "triton", "prefill_attention_backend": "triton"}
    return replace(config, overlap_schedule=True, **triton, **changes)


def answers(*configs: EngineConfig, choices: int = 1) -> tuple[list[dict[int, list[int]]], int]:
    """Of two prompts that begin alike, together, then of one that goes on from there; and how many of them
    resumed from a state. Nothing is left behind.
    """
    draw = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCAB, (80,), generator=draw).tolist()
    params = SamplingParams(temperature=0.0 if choices == 1 else 0.8, seed=7, max_tokens=6)
    each = tuple(map(RequestChoice, range(choices)))
    cluster, tokens = Loopback(*configs), []
    for cuts in ((61, 75), (77,)):
        made = [GenerationRequest(str(cut), tuple(text[:cut]), params, each) for cut in cuts]
        results = [cluster.submit(one, split=len(configs) > 1) for one in made]
        wait_all(results, WAIT_S)
        tokens += [result.tokens for result in results]
    cluster.close()
    every = [worker.engine._scheduler.cache.states for worker in cluster.workers.values()]
    assert not any(states.pool.used for states in every)
    return tokens, sum(states.hits for states in every)


def split(config: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    drafts = () if config.draft is None else (Role.DRAFT,)
    return (
        replace(config, roles=(Role.PREFILL,), worker="prefill"),
        replace(config, roles=(Role.DECODE, *drafts), worker="decode"),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("speculation", [SpeculationConfig(), CHAIN], ids=["plain", "chain"])
def test_the_device_gives_the_plain_engines_tokens(
    plain: EngineConfig, speculation: SpeculationConfig
) -> None:
    expected, hits = answers(plain)
    assert hits == 1
    assert answers(on_device(plain, speculation=speculation)) == (expected, hits)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("speculation", [SpeculationConfig(), CHAIN], ids=["plain", "chain"])
def test_a_state_space_model_on_the_device(tmp_path: Path, speculation: SpeculationConfig) -> None:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "eos_token_id")}
    heads = {"mamba_n_heads": 16, "mamba_d_head": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_hybrid(tmp_path / "model", "bamba", **sizes, **heads, mamba_expand=8)
    plain = EngineConfig(
        model=str(tmp_path / "model"),
        draft=None,
        num_pages=64,
        chunk_tokens=32,
        max_running=3,
        state_slots=8,
        pool_dir=str(tmp_path),
        worker="unified",
    )
    assert answers(on_device(plain, speculation=speculation)) == answers(plain)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("batches", "rounds"), [((4,), 4), ((), 0)], ids=["beside rounds", "alone"])
def test_steps_with_prompts_may_be_as_large_as_a_graphs(
    plain: EngineConfig, batches: tuple[int, ...], rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds, prompt rows, spans and sequences of padding change nothing."""
    placed = []

    def noted(*args: Any) -> GraphBuckets:
        placed.append(GraphBuckets(1, 16, (4,), batches, 32, 32, lone_chunks=(32,)))
        return placed[0]

    monkeypatch.setattr(device_build, "buckets_of", noted)
    assert answers(on_device(plain)) == answers(plain)
    assert placed[0].shape(min(rounds, 1), 20, 2, 1) == StepShape(rounds, 1, 32, 10, 8, prompts=16)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafts", HEADS)
def test_its_mtp_layer_drafts_in_the_step(plain: EngineConfig, drafts: str) -> None:
    """Chains and trees, whose accepted rows move in the rings, across a position of a state."""
    expected, _ = answers(plain)
    assert answers(on_device(plain, draft=plain.model, speculation=HEADS[drafts]))[0] == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_rounds_of_every_depth_follow_each_other(
    plain: EngineConfig, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain ones too, whose rows wait for the head."""
    expected, _ = answers(plain)
    wander(monkeypatch)
    spec = replace(HEADS[drafts], adaptive=True)
    assert answers(on_device(plain, draft=plain.model, speculation=spec))[0] == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whoever_is_preempted_resumes_from_a_state(plain: EngineConfig) -> None:
    """Two sequences that grow over pages' ends while trees are verified, and pages for one and a half."""
    expected, _ = answers(plain)
    few = on_device(plain, draft=plain.model, speculation=HEADS["tree"], num_pages=10, state_slots=3)
    preempted: list[Sequence] = []
    with mock.patch.object(Scheduler, "_preempt", autospec=True) as preempt:
        preempt.side_effect = lambda self, seq: preempted.append(seq) or PREEMPT(self, seq)
        assert answers(few)[0] == expected
    assert preempted


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_of_a_path_that_stay_where_they_were_drafted_are_misread(
    plain: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "keep_path", lambda *_: None)
    device = on_device(plain, draft=plain.model, speculation=HEADS["tree"])
    assert answers(device)[0] != answers(plain)[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("choices", "drafts"), [(1, "lookup"), (2, "lookup"), (1, "tree")])
def test_a_state_that_came_from_elsewhere_is_read(
    plain: EngineConfig, choices: int, drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulled behind a prompt whose last rows are in no state yet, alone, for two choices, with a head."""
    monkeypatch.setattr(puller, "RELEASE_S", WAIT_S)
    expected, _ = answers(plain, choices=choices)
    ways = {"lookup": {"speculation": CHAIN}, "tree": {"draft": plain.model, "speculation": HEADS["tree"]}}
    found, _ = answers(*split(on_device(plain, **ways[drafts])), choices=choices)
    assert found == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_what_follows_from_its_rows_a_state_is_misread(
    plain: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "RELEASE_S", WAIT_S)
    monkeypatch.setattr(StepExecutor, "_remake", lambda *_: None)
    assert answers(*split(on_device(plain)))[0] != answers(plain)[0]


PREEMPT = Scheduler._preempt


def _interpreted(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    """A follower whose kernels are interpreted as this process's are."""
    interpreted.install()
    follower.main(loaded, rank_info, channel)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_divide_the_heads_of_states(
    plain: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copies its share of a slot, and folds it."""
    write_hybrid(tmp_path / "model", "qwen3_5", **SIZES | RANKS)
    own = replace(plain, model=str(tmp_path / "model"))
    expected = answers(own)
    monkeypatch.setattr(follower, "main", _interpreted)
    shared = on_device(own, tensor_parallel_size=2, transfer="none", speculation=CHAIN)
    assert answers(shared) == expected


def test_workers_whose_ranks_cannot_exchange_states_are_refused_by_name(
    plain: EngineConfig, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
    write_hybrid(tmp_path / "model", "qwen3_5", **SIZES | RANKS | heads)
    one = on_device(plain, model=str(tmp_path / "model"), device="cuda:0", num_pages=None)
    two, three = (replace(one, tensor_parallel_size=ranks) for ranks in (2, 3))
    for pair in ((one, one), (one, two), (three, one)):
        check_room(dict(zip(("prefill", "decode"), pair, strict=True)), [], None)
    with pytest.raises(ConfigError, match="--decode-tp: .* whose heads 3 ranks cannot exchange with 2"):
        check_room({"prefill": three, "decode": two}, [], None)


def test_heads_that_ranks_cannot_divide_are_refused_by_name(plain: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size: .* 1 query heads cannot be divided"):
        EngineSpec.of(on_device(plain, tensor_parallel_size=2))


SPACES: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 16, "mamba_d_ssm": 256, "mamba_d_state": 16}
OTHERS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "falcon_h1": SPACES | {"mamba_n_groups": 1},
    "mamba2": {"hidden_size": 32, "expand": 8, "num_heads": 16, "head_dim": 16, "state_size": 16},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 16,
        "num_key_value_heads": 16,
        "num_attention_heads": 16,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["chain", "split"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_kinds_of_states_give_the_plain_engines_tokens(
    tmp_path: Path, family: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short convolutions; a state beside attention, with multipliers; and layers with states alone."""
    monkeypatch.setattr(puller, "RELEASE_S", WAIT_S)
    sizes = {name: size for name, size in SIZES.items() if name != "layer_types"}
    write_hybrid(tmp_path / "model", family, **sizes | OTHERS[family])
    plain = replace(PLAIN, model=str(tmp_path / "model"), pool_dir=str(tmp_path))
    expected, hits = answers(plain)
    device = on_device(plain, speculation=CHAIN)
    found = answers(*split(device)) if way == "split" else answers(device)
    assert found == (expected, hits) if way != "split" else found[0] == expected
