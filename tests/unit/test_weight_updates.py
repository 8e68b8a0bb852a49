"""New weights in engines that serve: the same tokens as of a fresh start, and nothing of the old ones."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from loopback import Result, split_configs, wait_all
from safetensors.torch import load_file, save, save_file
from tiny import write_tiny_llama, write_tiny_pair

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.common.weights import (
    BytesSource,
    CloseForWeights,
    CommitWeights,
    DropWeights,
    FolderSource,
    PrepareWeights,
    ReadWeight,
    Running,
    SharedSource,
    Source,
)
from tests.unit.updated_cluster import ANSWER_S, Cluster

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [tuple(range(3 + i, 40 + 7 * i)) for i in range(4)]


@dataclass
class Models:
    folder: Path
    old: EngineConfig
    new: EngineConfig
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count())

    def requests(self, weights: str = "") -> list[GenerationRequest]:
        params = SamplingParams(temperature=0.8, seed=5, max_tokens=12)
        return [GenerationRequest(f"r{next(self.numbers)}", p, params, weights=weights) for p in PROMPTS]

    def tokens(self, cluster: Cluster, weights: str = "", *, split: bool = False) -> list[Any]:
        results = [cluster.submit(request, split=split) for request in self.requests(weights)]
        wait_all(results, 60)
        return [result.tokens for result in results]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_pair(folder)
    shutil.copytree(folder / "target", folder / "new")
    write_tiny_llama(folder / "other", seed=9)
    stored = load_file(folder / "new" / "model.safetensors")
    chance = torch.Generator().manual_seed(3)
    for name, tensor in stored.items():
        stored[name] = tensor + 0.2 * tensor.std() * torch.randn(tensor.shape, generator=chance)
    save_file(stored, folder / "new" / "model.safetensors")
    pools = str(tmp_path_factory.mktemp("pools"))
    old = EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "head"),
        num_pages=256,
        chunk_tokens=48,
        pool_dir=pools,
        worker="unified",
    )
    return Models(folder, old, replace(old, model=str(folder / "new")))


@pytest.fixture(scope="module")
def expected(models: Models) -> dict[str, list[Any]]:
    """The tokens of both versions, each computed by engines that were started on it."""
    tokens = {}
    for name, config in (("old", models.old), ("new", models.new)):
        cluster = Cluster(replace(config, draft=None))
        tokens[name] = models.tokens(cluster)
        cluster.close()
    assert tokens["old"] != tokens["new"]
    return tokens


@pytest.fixture
def cluster(models: Models) -> Iterator[Cluster]:
    cluster = Cluster(models.old)
    yield cluster
    cluster.close()


def test_an_updated_engine_is_one_that_was_started_on_the_new_weights(
    models: Models, expected: dict[str, list[Any]], cluster: Cluster
) -> None:
    """By every way, and back again; with a draft head that stays as it was."""
    assert models.tokens(cluster) == expected["old"]
    digest = cluster.update(FolderSource(str(models.folder / "new")))
    assert models.tokens(cluster, digest) == expected["new"]
    old = models.folder / "target" / "model.safetensors"
    digest = cluster.update(BytesSource((old.read_bytes(),)), 2)
    assert models.tokens(cluster, digest) == expected["old"]
    load = cluster.workers["unified"].load
    assert load is not None
    assert (load.weights.version, load.weights.generation, load.weights.digest) == ("v2", 2, digest)
    new = load_file(models.folder / "new" / "model.safetensors")
    name = "model.layers.3.mlp.up_proj.weight"
    cluster.update(BytesSource((save({name: new[name]}),)), 3, whole=False)
    read = cluster.tell("unified", ReadWeight(name, 5)).numbers
    assert read == tuple(new[name].flatten()[:5].tolist())
    others = {key: tensor for key, tensor in new.items() if key != name}
    digest = cluster.update(BytesSource((save(others),)), 4, whole=False)
    assert models.tokens(cluster, digest) == expected["new"], "two halves are the whole"


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_head_comes_with_its_embedding_or_not(
    models: Models, expected: dict[str, list[Any]], tmp_path: Path, stored: bool
) -> None:
    """Trainers send both names or one; folders hold both (`stored`) or one."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    folder = Path(shutil.copytree(models.folder / "target", tmp_path / "target"))
    old, new = (load_file(models.folder / name / "model.safetensors") for name in ("target", "new"))
    if stored:
        save_file(old | {head: old[embedding].clone()}, folder / "model.safetensors")
    layers = {name: tensor for name, tensor in new.items() if name != embedding}
    cluster = Cluster(replace(models.old, model=str(folder), draft=None))
    try:
        both = {embedding: new[embedding], head: new[embedding].clone()}
        for number, part in enumerate((both, {embedding: old[embedding]}, both, layers), 1):
            digest = cluster.update(BytesSource((save(part),)), number, whole=False)
        assert models.tokens(cluster, digest) == expected["new"]
        other = {head: old[embedding]}
        reply = cluster.tell("unified", PrepareWeights("bad", 5, BytesSource((save(other),)), False))
        assert reply.failure is not None and "tie_word_embeddings" in reply.failure.message
    finally:
        cluster.close()


def test_a_split_cluster_changes_at_once(models: Models, expected: dict[str, list[Any]]) -> None:
    """Prompts are computed by one worker and continued by another; requests of a version that neither has any
    more are refused.
    """
    cluster = Cluster(*split_configs(models.old))
    try:
        assert models.tokens(cluster, split=True) == expected["old"]
        digest = cluster.update(FolderSource(str(models.folder / "new")))
        assert models.tokens(cluster, digest, split=True) == expected["new"]
        result = cluster.submit(models.requests()[0], split=False)
        assert result.done.wait(ANSWER_S)
        assert "other weights" in (result.failure or "")
    finally:
        cluster.close()


def bad(models: Models, kind: str) -> tuple[bytes, str]:
    stored = load_file(models.folder / "new" / "model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    if kind == "shape":
        stored[name] = stored[name][:, :-1].contiguous()
    elif kind == "missing":
        del stored[name]
    elif kind == "nan":
        stored[name][3, 4] = float("nan")
    elif kind == "unread":
        name = "model.layers.3.mlp.down_proj.bias"
        stored[name] = torch.zeros(64)
    elif kind == "dtype":
        stored[name] = stored[name].to(torch.int32)
    return save(stored), name


@pytest.mark.parametrize("kind", ["shape", "missing", "nan", "unread", "dtype"])
def test_what_is_wrong_is_named_and_the_old_weights_serve_on(
    models: Models, expected: dict[str, list[Any]], kind: str, broken: Cluster
) -> None:
    data, name = bad(models, kind)
    reply = broken.tell("unified", PrepareWeights("bad", 1, BytesSource((data,)), whole=True))
    assert reply.failure is not None
    assert reply.failure.code == "invalid_request"
    assert name in reply.failure.message
    if kind != "unread":  # a tensor that the served folder's config.json does not know
        assert str(models.folder) not in reply.failure.message, "the served folder is not what is wrong"
    closed = broken.tell("unified", CloseForWeights("", Running.ABORT, 1.0, 1.0))
    assert closed.failure is not None
    assert models.tokens(broken) == expected["old"]


@pytest.fixture(scope="module")
def broken(models: Models) -> Iterator[Cluster]:
    cluster = Cluster(models.old)
    yield cluster
    cluster.close()


def test_other_models_and_files_are_refused(models: Models, broken: Cluster, tmp_path: Path) -> None:
    def refusal(source: Source, *, whole: bool = True) -> str:
        reply = broken.tell("unified", PrepareWeights("bad", 1, source, whole))
        assert reply.failure is not None
        assert reply.failure.code == "invalid_request"
        return reply.failure.message

    config = msgspec.json.decode((models.folder / "target" / "config.json").read_bytes())
    other = tmp_path / "other"
    shutil.copytree(models.folder / "new", other)
    worded = config | {"attention_dropout": 0.0, "pretraining_tp": 1}  # as libraries store what is a default
    (other / "config.json").write_bytes(msgspec.json.encode(worded))
    assert broken.tell("unified", PrepareWeights("good", 1, FolderSource(str(other)), True)).failure is None
    (other / "config.json").write_bytes(msgspec.json.encode(worded | {"rms_norm_eps": 0.1}))
    assert "rms_norm_eps is 0.1" in refusal(FolderSource(str(other)))
    assert "no folder" in refusal(FolderSource(str(tmp_path / "none")))
    cut = (models.folder / "new" / "model.safetensors").read_bytes()[:-100]
    assert "not a readable safetensors file" in refusal(BytesSource((cut,)))
    assert "/dev/shm" in refusal(SharedSource((str(models.folder / "new" / "model.safetensors"),)))
    assert "no tensor model.nothing" in refusal(
        BytesSource((save({"model.nothing": torch.zeros(2)}),)), whole=False
    )


def test_what_runs_is_waited_for_or_ends(
    models: Models, expected: dict[str, list[Any]], cluster: Cluster
) -> None:
    """A closed worker takes nothing new; it opens again by itself if nothing follows."""
    source = FolderSource(str(models.folder / "new"))
    digest = cluster.tell("unified", PrepareWeights("v1", 1, source, whole=True)).digest
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    running = cluster.submit(GenerationRequest("long", PROMPTS[0], long), split=False)
    busy = cluster.tell("unified", CloseForWeights(digest, Running.DRAIN, 0.05, 9.0))
    assert busy.failure is not None
    assert "1 request" in busy.failure.message
    closing = cluster.begin("unified", CloseForWeights(digest, Running.DRAIN, 30.0, 0.2))
    refused = cluster.submit(models.requests()[0], split=False)
    assert refused.done.wait(ANSWER_S)
    assert "about to get new weights" in (refused.failure or "")
    assert cluster.workers["unified"].change_ended(closing).failure is None
    wait_all([running], 1.0)
    deadline: Result = _until_open(models, cluster)
    assert deadline.failure is None, "it opened again"
    assert models.tokens(cluster) == expected["old"]
    late = cluster.tell("unified", CommitWeights(digest))
    assert late.failure is not None
    assert "not closed" in late.failure.message
    again = cluster.tell("unified", PrepareWeights("v1", 1, source, whole=True))
    assert again.digest == digest, "the first were let go"
    running = cluster.submit(GenerationRequest("again", PROMPTS[0], long), split=False)
    closed = cluster.tell("unified", CloseForWeights(digest, Running.ABORT, 5.0, 9.0))
    assert (closed.failure, closed.requests) == (None, 1)
    assert running.done.wait(ANSWER_S)
    assert "aborted" in (running.failure or "")
    assert cluster.tell("unified", DropWeights(digest)).failure is None
    assert models.tokens(cluster) == expected["old"]


def _until_open(models: Models, cluster: Cluster) -> Result:
    for _ in range(100):
        result = cluster.submit(models.requests()[0], split=False)
        assert result.done.wait(ANSWER_S)
        if result.failure is None:
            return result
        time.sleep(0.02)
    raise AssertionError(f"it stays closed: {result.failure}")
