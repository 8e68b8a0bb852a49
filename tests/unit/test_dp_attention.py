"""What --dp-attention refuses, and how a cluster is planned with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eyas import configuration
from eyas.cluster.plan import HostResources, plan, worker_argv
from eyas.common.config import EngineConfig, SpeculationConfig, resolve_engine
from eyas.common.errors import ConfigError
from eyas.common.types import KvKind, Role
from eyas.engine.loading.build import build_engine
from eyas.engine.loading.spec import EngineSpec
from tests.unit.command_line import parse
from tests.unit.families import write_family
from tests.unit.tiny import write_tiny_llama
from tests.unit.tiny_deepseek import SMALL, write_tiny_nextn_deepseek

ADAPTIVE = SpeculationConfig(adaptive=True)
RANKS = EngineConfig(draft=None, num_pages=8, dp_attention=3)


def test_a_dense_model_has_nothing_to_share(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path / "dense")
    with pytest.raises(ConfigError, match="--dp-attention: dense has no experts for ranks to share") as told:
        EngineSpec.of(replace(RANKS, model=str(tmp_path / "dense")))
    assert told.value.param == "dp-attention"


def test_every_rank_has_as_many_experts(tmp_path: Path) -> None:
    write_family(tmp_path / "odd", "mixtral", num_hidden_layers=1)
    config = replace(RANKS, model=str(tmp_path / "odd"))
    message = "--dp-attention: odd: 4 experts per layer cannot be divided among 3 ranks"
    with pytest.raises(ConfigError, match=message):
        EngineSpec.of(config)
    EngineSpec.of(replace(config, dp_attention=2))


@pytest.mark.parametrize("experts", [8, 9])
def test_a_heads_experts_are_divided_too(tmp_path: Path, experts: int) -> None:
    """On GPUs. On a CPU rank 0 has the head whole."""
    few = {"n_routed_experts": 9, "n_group": 1, "topk_group": 1, "num_hidden_layers": 2}
    write_tiny_nextn_deepseek(tmp_path, SMALL | few | {"n_routed_experts": experts})
    plain = replace(RANKS, model=str(tmp_path), draft=str(tmp_path), dp_attention=4)
    ranks = replace(plain, attention_backend="triton", prefill_attention_backend="triton")
    if experts == 8:
        assert len(EngineSpec.of(ranks).decoder(KvKind.DRAFT).experts) == 1
        return
    with pytest.raises(ConfigError, match="--dp-attention"):
        EngineSpec.of(ranks)


def test_a_draft_worker_is_one_process() -> None:
    with pytest.raises(ConfigError, match="--dp-attention: a draft worker is one process"):
        build_engine(replace(RANKS, roles=(Role.DRAFT,)), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"draft": "x", "speculation": ADAPTIVE}, "attention ranks on GPUs have one depth of drafts"),
        ({"speculation": replace(ADAPTIVE, ngram=True)}, "attention ranks on GPUs have one depth of drafts"),
        ({"attention_backend": "torch"}, "attention ranks on GPUs need --attention-backend triton"),
        ({"deterministic": True}, "attention ranks have no exact arithmetic on GPUs"),
        ({"tensor_parallel_size": 2}, "attention ranks on GPUs share no layers"),
        ({"host_cache_gb": 1.0}, "attention ranks have no pages in --host-cache-gb"),
    ],
)
def test_what_attention_ranks_cannot_do_on_gpus(asked: dict[str, Any], reason: str) -> None:
    resolve_engine("cuda", draft=None, dp_attention=2)
    resolve_engine("cuda", draft="x", dp_attention=2)
    with pytest.raises(ConfigError, match=f"--dp-attention: {reason}") as told:
        resolve_engine("cuda", **({"draft": None, "dp_attention": 2} | asked))
    assert told.value.param == "dp-attention"


def test_pages_of_attention_ranks_on_gpus_do_not_travel() -> None:
    config = replace(RANKS, attention_backend="triton", prefill_attention_backend="triton")
    with pytest.raises(ConfigError, match="--dp-attention: pages of attention ranks on GPUs do not travel"):
        build_engine(config, None)  # type: ignore[arg-type]
    words = ("serve", "--device", "cuda", "--draft", "none", "--dp-attention", "2", "--layout", "split")
    with pytest.raises(ConfigError, match="--dp-attention: pages of attention ranks on GPUs do not travel"):
        configuration.own_config(parse(*words))


@pytest.mark.parametrize("asked", [("--workers", "2"), ("--gpus", "0,1,2,3")])
def test_a_worker_of_attention_ranks_has_a_gpu_for_each(asked: tuple[str, str]) -> None:
    words = ("serve", "--device", "cuda", "--draft", "none", "--dp-attention", "2", *asked)
    config = configuration.own_config(parse(*words))
    assert config.layout == "unified"
    workers = plan(config, iter(range(9000, 9100)), HostResources(cores=16, gpus=(None,) * 4)).workers
    assert [worker.engine.device for worker in workers.values()] == ["cuda:0", "cuda:2"]
    assert all(worker.engine.transfer == "none" for worker in workers.values())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_pool_of_a_gpu_has_its_own_ranks_pages_alone(tmp_path: Path, backend: str) -> None:
    write_family(tmp_path, "mixtral", num_hidden_layers=1, vocab_size=128)
    config = replace(RANKS, model=str(tmp_path), dp_attention=2, attention_backend=backend)
    assert EngineSpec.of(config).shape(KvKind.TARGET).pages == (16 if backend == "torch" else 8)


def test_a_split_cluster_has_ranks_where_there_are_experts_and_cores_are_divided_among_all() -> None:
    config = configuration.own_config(parse("serve", "--dp-attention", "2"))
    workers = plan(config, iter(range(9000, 9100)), HostResources(cores=16, gpus=())).workers
    ranks = {name: worker.engine.dp_attention for name, worker in workers.items()}
    assert ranks == {"prefill-0": 2, "decode-0": 2, "draft-0": 1}
    assert {worker.engine.threads for worker in workers.values()} == {3}, "fifteen cores, five processes"
    for worker in workers.values():
        assert configuration.worker_config(parse(*worker_argv(worker))) == worker
