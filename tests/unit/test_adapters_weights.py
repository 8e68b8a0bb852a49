"""Adapters in engines whose weights change, or sleep: answers are those of a fresh start on what is there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from adapter_rig import write_adapter
from loopback import Loopback, wait_all
from safetensors.torch import load_file, save_file
from tiny import write_tiny_llama

from eyas.common.config import EngineConfig
from eyas.common.page_names import salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.common.weights import (
    BytesSource,
    CloseForWeights,
    CommitWeights,
    FolderSource,
    PrepareWeights,
    Running,
    Source,
)
from eyas.common.wire.control import (
    ContinueGeneration,
    ControlCommand,
    PauseGeneration,
    PauseMode,
    ReleaseMemory,
    ResumeMemory,
)
from eyas.engine.checkpoint.host_tensors import read_files
from eyas.engine.ipc.adapter_messages import AdapterLoaded, LoadAdapter
from eyas.engine.loading import follower
from eyas.engine.loading.device_build import _adapters
from eyas.engine.loading.replacement import WeightReplacement
from tests.unit.adapter_rig import PATIENCE_S, PROMPT
from tests.unit.device_engines import SIZES
from tests.unit.device_ranks_rig import BACKENDS, interpreted_follower
from tests.unit.weight_models import model_of

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("a0", "a1")
WAYS = ["cpu", pytest.param("device", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """The second model's norms have other gains as well."""
    folder, chance = tmp_path_factory.mktemp("models"), torch.Generator().manual_seed(3)
    target = write_tiny_llama(folder / "target", tied=False, **SIZES | {"kv_heads": 2, "vocab": 32})
    shutil.copytree(target, folder / "new")
    stored = load_file(target / "model.safetensors")
    noise = {name: torch.randn(each.shape, generator=chance) for name, each in stored.items()}
    size = {name: 0.4 if "norm" in name else 0.2 * each.std() for name, each in stored.items()}
    changed = {name: each + size[name] * noise[name] for name, each in stored.items()}
    save_file(changed, folder / "new" / "model.safetensors", {"format": "pt"})
    for seed, name in enumerate(NAMES):
        modules = ("q_proj", "v_proj", "down_proj") if seed else ()
        write_adapter(folder / name, target, rank=12 * (1 + seed), seed=seed, modules=modules)
    names = {"model": str(target), "draft": None, "pool_dir": str(folder), "worker": "unified"}
    sizes = {"num_pages": 48, "chunk_tokens": 16, "max_running": 4, "context_length": 256}
    return EngineConfig(**names, **sizes, max_loras=2, max_lora_rank=32)  # type: ignore[arg-type]


class Served(Loopback):
    """An engine with both adapters."""

    def __init__(self, base: EngineConfig, way: str, model: str = "target") -> None:
        config = replace(base, model=str(Path(base.pool_dir) / model))
        if way != "cpu":
            config = replace(config, **BACKENDS, overlap_schedule=True)
        if way == "ranks":
            config = replace(config, tensor_parallel_size=2, transfer="none")
        super().__init__(config)
        self.folder, self._count, self._digest = Path(base.pool_dir), 0, ""
        self.ids = ["", *(self.load_adapter(self.folder / name).id for name in NAMES)]

    def answers(self) -> tuple[list[list[int]], list[int]]:
        """Of a prompt by the plain model and by both adapters: tokens, and the prompt's that were cached."""
        results = []
        for number, adapter in enumerate(self.ids):
            params = SamplingParams(temperature=0.8 * (number % 2), seed=5, max_tokens=4, ignore_eos=True)
            request = GenerationRequest(f"r{self._count}", PROMPT, params, adapter=adapter)
            self._count += 1
            request = msgspec.structs.replace(request, salt=salt_of("", adapter), weights=self._digest)
            results.append(self.submit(request, split=False))
        wait_all(results, PATIENCE_S)
        timings = [entry.timings for result in results for entry in result.entries if entry.timings]
        return [result.tokens[0] for result in results], [each.cached_tokens for each in timings]

    def update(self, source: Source, generation: int) -> None:
        engine = self.workers["unified"]
        prepared = engine.change(PrepareWeights(f"v{generation}", generation, source, True), PATIENCE_S)
        close = CloseForWeights(prepared.digest, Running.DRAIN, 20.0, 20.0)
        replies = [
            prepared,
            *(engine.change(each, PATIENCE_S) for each in (close, CommitWeights(prepared.digest))),
        ]
        assert [reply.failure for reply in replies] == [None] * 3
        self._digest = prepared.digest


@pytest.fixture
def served(base: EngineConfig, way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(follower, "main", interpreted_follower)
    made = Served(base, way)
    yield made
    made.close()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", [*WAYS, pytest.param("ranks", marks=pytest.mark.slow)])
def test_an_update_is_a_fresh_start_with_the_same_adapters(
    base: EngineConfig, served: Served, way: str
) -> None:
    fresh = Served(base, "cpu" if way == "cpu" else "device", "new")  # which two ranks equal
    expected = fresh.answers()[0]
    fresh.close()
    before = served.answers()[0]
    assert all(old != new for old, new in zip(before, expected, strict=True))
    assert min(served.answers()[1]) > 0
    served.update(FolderSource(str(served.folder / "new")), 1)
    assert served.answers() == (expected, [0, 0, 0]), "no page of the old version was read"
    old = (served.folder / "target" / "model.safetensors").read_bytes()
    served.update(BytesSource((old,)), 2)
    assert served.answers()[0] == before


@pytest.mark.parametrize("way", WAYS)
def test_adapters_are_there_after_a_sleep(served: Served, way: str) -> None:
    engine, before = served.workers["unified"], served.answers()[0]
    asleep: tuple[ControlCommand, ...] = (PauseGeneration(PauseMode.RETRACT), ReleaseMemory())
    for command in asleep:
        assert engine.control(command, PATIENCE_S).failure is None
    engine.send(LoadAdapter(9, str(served.folder / "a0"), "late"))
    refused = served.adapters.get(timeout=20)
    assert isinstance(refused, AdapterLoaded) and refused.failure is not None
    assert "resume_memory_occupation" in refused.failure.message
    for command in (ResumeMemory(), ContinueGeneration()):
        assert engine.control(command, PATIENCE_S).failure is None
    assert served.answers()[0] == before


def test_renewed_adapters_are_what_would_be_read(base: EngineConfig) -> None:
    """Of the matrices of a device, to the bit; and they differ from those of the old weights."""
    folder = Path(base.pool_dir)
    given = replace(base, attention_backend="triton", prefill_attention_backend="triton")
    loaded, model = model_of(given)
    adapters = _adapters(loaded, model, None)
    assert adapters is not None
    renewed = [adapters.read(folder / name) for name in NAMES]
    before = [each.numbers.clone() for each in renewed]
    WeightReplacement(loaded, model).write(read_files([folder / "new" / "model.safetensors"]))
    for name, one, old in zip(NAMES, renewed, before, strict=True):
        adapters.renew(one)
        assert not torch.equal(one.numbers, old)
        assert torch.equal(one.numbers, adapters.read(folder / name).numbers)
