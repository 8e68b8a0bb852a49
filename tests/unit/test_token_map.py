"""The file of --speculative-token-map, the head of few rows that it makes, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.tree import DraftTree
from eyas.engine.checkpoint.token_map import read_token_map
from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.base import DraftModel
from eyas.engine.models.decoder import ModelEnds
from eyas.engine.models.heads import head_family, load_draft
from eyas.engine.models.ops.torch_ops import TorchMachine
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftRequest, DraftRunner
from tests.unit.fused_models import Twin, write_head
from tests.unit.loopback import Loopback, wait_all
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny import write_tiny_eagle3, write_tiny_llama
from tests.unit.tiny_mtp import write_tiny_mimo

VOCAB = 256
IDS = tuple(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:48].tolist())


def test_every_form_of_the_file(tmp_path: Path) -> None:
    forms = {name: tmp_path / name for name in ("list.pt", "tensor.pt", "ids.json", "ids.txt")}
    torch.save(list(IDS), forms["list.pt"])
    torch.save(torch.tensor(IDS, dtype=torch.int32), forms["tensor.pt"])
    forms["ids.json"].write_text(json.dumps(IDS))
    forms["ids.txt"].write_text("\n".join(map(str, IDS)) + "\n\n")
    assert [read_token_map(form, VOCAB) for form in forms.values()] == [IDS] * len(forms)


class Rude:
    """A pickle of it runs code where it is loaded."""

    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise SystemExit('the file was run')",))


@pytest.mark.parametrize(
    ("name", "held", "refusal"),
    [
        ("ids.txt", "5\n9\nx7\n", r"line 3 of .*ids.txt is 'x7', which is no token id"),
        ("ids.txt", "5\n\n256\n", r"line 3 of .*ids.txt is 256, and the target's ids are 0 to 255"),
        ("ids.txt", "5\n9\n5\n", r"line 3 of .*ids.txt is 5, as line 1 is"),
        ("ids.txt", "\n", r"ids.txt has no ids"),
        ("ids.json", "[5, -1]", r"entry 2 of .*ids.json is -1, and the target's ids are 0 to 255"),
        ("ids.json", "[5, 1.5]", r"entry 2 of .*ids.json is 1.5, which is no token id"),
        ("ids.json", "[5, 6", r"ids.json cannot be read: "),
        ("ids.pt", {"ids": [5]}, r"ids.pt cannot be read: it holds a dict, not a list of ids"),
        ("ids.pt", torch.zeros(2, 2, dtype=torch.int64), r"entry 1 of .*ids.pt is \[0, 0\], which is no"),
        ("ids.pt", Rude(), r"ids.pt cannot be read: it is damaged, or holds other objects than .* lists$"),
        ("none.txt", None, r"none.txt cannot be read: "),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, held: object, refusal: str) -> None:
    path = tmp_path / name
    if isinstance(held, str):
        path.write_text(held)
    elif held is not None:
        torch.save(held, path)
    with pytest.raises(ConfigError, match=f"^--speculative-token-map: .*{refusal}") as refused:
        read_token_map(path, VOCAB)
    assert refused.value.param == "speculative-token-map"


# --- the head ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and an EAGLE-3 head without outputs of its own."""
    folder = tmp_path_factory.mktemp("models")
    target = write_tiny_llama(folder / "target", tied=False)
    return target, write_tiny_eagle3(folder / "head", target)


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def sharing(
    request: pytest.FixtureRequest, folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A target, and a head of each kind that drafts with the target's outputs."""
    if request.param == "eagle3":
        return folders
    mimo = write_tiny_mimo(tmp_path_factory.mktemp("mimo") / "model")
    return mimo, mimo


class Forbidden:
    """A whole head to which all ids but IDS are forbidden."""

    token_map = block = None
    whole = False

    def __init__(self, head: DraftModel) -> None:
        self.forward, self._head = head.forward, head

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self._head.logits(rows)
        allowed = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(IDS), True)
        return logits.masked_fill(~allowed, -torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_few_rows_draft_what_the_whole_head_drafts_of_these_ids(
    sharing: tuple[Path, Path], temperature: float
) -> None:
    target, folder = sharing
    rig = HeadRig(folder, target_rig := Rig(target))
    narrow = narrowed(rig, target_rig, folder)
    assert narrow.token_map.tolist() == list(IDS)
    params = SamplingParams(temperature=temperature, seed=5)
    for spec in (SpeculationConfig(5), SpeculationConfig(4, 3, 14)):
        found = proposed(narrow, rig, params, spec)
        assert found == proposed(Forbidden(rig.head), rig, params, spec)
        assert set(found.tokens) <= set(IDS)
        assert found != proposed(rig.head, rig, params, spec)


def narrowed(rig: HeadRig, target: Rig, folder: Path) -> DraftModel:
    config = dataclasses.replace(rig.config, token_ids=IDS)
    with FolderWeights(folder, head_family(config.algorithm).spelling) as weights:
        return load_draft(config, weights, target.model.ends, TorchMachine(config.decoder, rig.backend))


def proposed(head: DraftModel, rig: HeadRig, params: SamplingParams, spec: SpeculationConfig) -> DraftTree:
    runner, generator = DraftRunner(head, rig.pool, rig.backend), torch.Generator().manual_seed(1)
    pages = list(range(6))
    features = torch.randn(20, 64, generator=generator)
    [last] = runner.extend([DraftExtension(pages, 0, list(range(20)), features)])
    [tree] = runner.propose([DraftRequest(pages, 20, last, params, choice=0, root=19)], spec)
    return tree


@pytest.mark.slow
def test_a_device_drafts_with_the_same_rows(folders: tuple[Path, Path]) -> None:
    target, _ = folders
    folder = write_head(target.parent / "shallow", target, None)
    rig = HeadRig(folder, target_rig := Rig(target))
    narrow = narrowed(rig, target_rig, folder)
    twin = Twin(rig.config.decoder, rig.pool, torch.zeros(4, 8, dtype=torch.int32))
    with FolderWeights(target) as weights:
        lm_head = weights.take("lm_head.weight", (VOCAB, 64))
        ends = ModelEnds(weights.take("model.embed_tokens.weight", (VOCAB, 64)), lm_head)
    config = dataclasses.replace(rig.config, token_ids=IDS)
    with FolderWeights(folder, head_family(config.algorithm).spelling) as weights:
        head = load_draft(config, weights, ends, twin.machine)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(head.logits(rows), narrow.logits(rows), atol=1e-4)
    assert torch.equal(head.token_map, narrow.token_map)


# --- engines -------------------------------------------------------------------------------------------


@pytest.fixture
def config(folders: tuple[Path, Path], tmp_path: Path) -> EngineConfig:
    """Of a worker whose head proposes IDS alone."""
    file, (target, head) = tmp_path / "hot.txt", folders
    file.write_text("\n".join(map(str, IDS)))
    return EngineConfig(
        model=str(target),
        draft=str(head),
        speculative_token_map=str(file),
        num_pages=64,
        worker="unified",
        pool_dir=str(tmp_path),
    )


def test_a_map_is_part_of_the_head(config: EngineConfig) -> None:
    whole = EngineSpec.of(dataclasses.replace(config, speculative_token_map=None)).head
    narrow = EngineSpec.of(config).head
    assert (whole.outputs, narrow.outputs) == (VOCAB, len(IDS))
    assert whole.fingerprint != narrow.fingerprint == EngineSpec.of(config).head.fingerprint
    Path(config.speculative_token_map).write_text("\n".join(map(str, reversed(IDS))))
    assert EngineSpec.of(config).head.fingerprint != narrow.fingerprint


@pytest.mark.usefixtures("one_thread")
def test_no_token_differs(config: EngineConfig) -> None:
    request = GenerationRequest("r", tuple(range(9)), SamplingParams(max_tokens=24, seed=3))
    found = []
    for one in (config, dataclasses.replace(config, draft=None, speculative_token_map=None)):
        cluster = Loopback(one)
        result = cluster.submit(request, split=False)
        wait_all([result], 60)
        assert any(entry.offered for entry in result.entries) == (one is config)
        found.append(result.tokens)
        cluster.close()
    assert found[0] == found[1]


def test_heads_that_take_no_map(config: EngineConfig, tmp_path: Path) -> None:
    target = Path(config.model)
    for draft_vocab in (100, VOCAB):
        own = write_tiny_eagle3(tmp_path / f"own-{draft_vocab}", target, draft_vocab=draft_vocab)
        refusal = "--speculative-token-map: an EAGLE-3 head with an output head of its own .* proposes what"
        with pytest.raises(ConfigError, match=refusal):
            EngineSpec.of(dataclasses.replace(config, draft=str(own)))
    with pytest.raises(ConfigError, match="--speculative-token-map: .* 48 ids, which 7 ranks cannot divide"):
        EngineSpec.of(dataclasses.replace(config, tensor_parallel_size=7))
    with pytest.raises(ConfigError, match="has 48 ids, fewer than --spec-topk"):
        EngineSpec.of(dataclasses.replace(config, speculation=SpeculationConfig(1, 49, 50)))
