"""Adapters that update the draft head beside their model: for their rows the head proposes what one proposes
that has the updates in its weights, for others what it did; and no answer changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapter_rig import write_adapter, write_merged
from loopback import Loopback, wait_all
from tiny import write_tiny_llama

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import InvalidRequest
from eyas.common.page_names import salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.adapters.reader import AdapterReader
from eyas.engine.ipc.adapter_messages import LoadAdapter
from eyas.engine.models.table import read_model
from tests.unit.device_engines import SIZES, on_device, write_head

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT = tuple(i * i % 13 + i % 4 for i in range(12))
CHAIN = SpeculationConfig(steps=2, draft_tokens=3)
TREE = SpeculationConfig(steps=2, topk=2, draft_tokens=5)
Proposals = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a head, an adapter of the model alone, the same that updates the head, and that head with
    the updates in its weights.
    """
    made = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = SIZES | {"kv_heads": 2, "vocab": 32}
    target = write_tiny_llama(made / "target", tied=False, **sizes)
    head = write_head(made / "head", target)
    for name in ("alone", "with"):
        write_adapter(made / name, target, rank=12, seed=3)
    write_adapter(made / "with" / "draft", head, rank=8, seed=5, size=1.0)
    write_merged(made / "merged", head, made / "with" / "draft")
    return made


def _config(folder: Path, **changes: Any) -> EngineConfig:
    made = EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "head"),
        num_pages=48,
        chunk_tokens=16,
        max_running=4,
        context_length=256,
        pool_dir=str(folder),
        worker="unified",
        max_loras=2,
        max_lora_rank=16,
        speculation=CHAIN,
    )
    return replace(made, **changes)


def _proposed(config: EngineConfig, adapter: Path, watch: Callable[..., None]) -> tuple[Proposals, Any]:
    """What was proposed, and the answers: of a request with the adapter, and of a plain one, together."""
    cluster, proposals = Loopback(config), Proposals()
    try:
        ids = [cluster.load_adapter(adapter).id, ""]
        watch(cluster, proposals)
        requests = [
            GenerationRequest(f"r{bool(id)}", PROMPT, GREEDY, adapter=id, salt=salt_of("", id)) for id in ids
        ]
        results = [cluster.submit(request, split=False) for request in requests]
        wait_all(results, 200)
        return proposals, [result.tokens[0] for result in results]
    finally:
        cluster.close()


def _watch_plain(cluster: Loopback, proposals: Proposals) -> None:
    engine: Any = cluster.workers["unified"].engine
    drafter = engine._drafting.drafter
    take = drafter.take

    def taken() -> Any:
        drafts = take()
        for one in drafts:
            proposals.setdefault(one.seq.generation.request.id, []).append(list(one.tree.tokens))
        return drafts

    drafter.take = taken


def _watch_device(cluster: Loopback, proposals: Proposals) -> None:
    """What the tables have behind each step, of the slots of its sequences."""
    engine: Any = cluster.workers["unified"].engine
    runner = engine._loop.runner
    launch = runner.launch

    def launched(works: Sequence[Any]) -> Any:
        flight = launch(works)
        for work in works:
            drafts = runner._executor.tables.drafts[work.seq.slot].tolist()
            proposals.setdefault(work.seq.generation.request.id, []).append(drafts)
        return flight

    runner.launch = launched


def _check(folder: Path, config: EngineConfig, watch: Callable[..., None]) -> None:
    updated, answers = _proposed(config, folder / "with", watch)
    merged, same = _proposed(replace(config, draft=str(folder / "merged")), folder / "alone", watch)
    base, also = _proposed(config, folder / "alone", watch)
    assert answers == same == also
    assert updated["rTrue"] == merged["rTrue"] != base["rTrue"]
    assert updated["rFalse"] == base["rFalse"] != merged["rFalse"]


@pytest.mark.parametrize("drafts", [CHAIN, TREE])
def test_the_head_proposes_with_the_updates_of_each_adapter(folder: Path, drafts: SpeculationConfig) -> None:
    _check(folder, _config(folder, speculation=drafts), _watch_plain)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("drafts", [CHAIN, TREE])
def test_so_does_a_head_in_the_steps_of_a_device(folder: Path, drafts: SpeculationConfig) -> None:
    _check(folder, on_device(_config(folder, speculation=drafts)), _watch_device)


def test_the_id_is_of_both(folder: Path) -> None:
    cluster = Loopback(_config(folder))
    try:
        alone, both = (cluster.load_adapter(folder / name) for name in ("alone", "with"))
    finally:
        cluster.close()
    assert alone.id != both.id and alone.host_bytes < both.host_bytes


def test_where_no_head_takes_updates_they_are_refused(folder: Path) -> None:
    reader = AdapterReader(read_model(folder / "target"), 16)
    with pytest.raises(InvalidRequest, match="draft updates a draft head, and this worker runs none"):
        reader.read(folder / "with", lambda _, shape: None)


def test_modules_that_the_head_has_not_are_refused(folder: Path, tmp_path: Path) -> None:
    for part in ("", "draft"):
        write_adapter(tmp_path / "odd" / part, folder / "target", rank=12, modules=("q_proj",))
    cluster = Loopback(_config(folder))
    try:
        cluster.workers["unified"].send(LoadAdapter(0, str(tmp_path / "odd"), "odd"))
        refused: Any = cluster.adapters.get(timeout=20)
        assert "draft.layers.0.self_attn.q_proj" in refused.failure.message
    finally:
        cluster.close()
