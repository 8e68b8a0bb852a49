"""A whole model as the drafter: the target itself is always right, another one changes no token."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loopback_runs import assert_idle, mixed_requests, patient, run_all, undrafted
from safetensors.torch import load_file

from eyas.common.config import NANO, EngineConfig, SpeculationConfig
from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.engine.loading.draft_build import draft_worker
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from eyas.engine.models.whole_model import TokenTap, WholeModelDraft, tokens_of
from eyas.engine.speculation.draft_worker import draft_runner
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput, DraftRunner
from tests.unit.device_engines import PROMPT, SIZES, answers, on_device, rounds, tokens
from tests.unit.families import write_family
from tests.unit.hybrid_rig import write_hybrid
from tests.unit.loopback import Loopback
from tests.unit.tiny import edit, write_tiny_eagle, write_tiny_eagle3, write_tiny_llama
from tests.unit.wandering import wander

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, ROUNDS = 3, 4
CHAIN = SpeculationConfig(steps=STEPS, draft_tokens=STEPS + 1)
TREE = SpeculationConfig(steps=STEPS, topk=2, draft_tokens=8)
LONG = tuple(range(1, 60))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target", tied=False, layers=3)


@pytest.fixture(scope="module")
def base(target: Path) -> EngineConfig:
    """The drafter is a copy of the target."""
    itself = shutil.copytree(target, target.parent / "itself")
    return EngineConfig(
        model=str(target),
        draft=str(itself),
        num_pages=256,
        chunk_tokens=48,
        pool_dir=str(target.parent),
        worker="unified",
        speculation=CHAIN,
    )


def accepted_of(config: EngineConfig, asked: list[GenerationRequest], *, split: bool) -> list[list[int]]:
    """Drafts that each round of each request accepted; the tokens are those of plain decoding."""
    cluster = patient(config) if split else Loopback(config)
    found = run_all(cluster, asked, split=split)
    assert_idle(cluster)
    results = list(cluster.results.values())
    cluster.close()
    assert found == undrafted(config, asked)
    return [[entry.accepted for entry in result.entries][1:] for result in results]


def of_whole_rounds() -> list[GenerationRequest]:
    """The drafter's own noise is the target's; prompts of several chunks and pages, and a cached one."""
    asked = {"temperature": 0.9, "seed": 5, "max_tokens": 1 + ROUNDS * (STEPS + 1), "ignore_eos": True}
    params = [SamplingParams(**{**asked, "temperature": each}) for each in (0.0, 0.9, 0.0)]
    prompts = (LONG, (7,), (*LONG[:40], 3, 4))
    return [
        GenerationRequest(str(i), prompt, each)
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
    ]


@pytest.mark.parametrize("split", [False, True], ids=["unified", "split"])
def test_the_target_itself_drafts_without_a_fault(base: EngineConfig, split: bool) -> None:
    accepted = accepted_of(base, of_whole_rounds(), split=split)
    assert accepted == [[STEPS] * ROUNDS] * 3


def lost_root(self: DraftRunner, requests: Any) -> Any:
    """The root is not run: the newest row drafts what is known already."""
    return draft_runner._stacked(requests)


def late_rows(model: WholeModelDraft, features: Any, tokens: Any, rows: Any, pool: Any) -> Any:
    positions = rows.positions + 1 if rows.depth else rows.positions
    return FORWARD(model, features, tokens, replace(rows, positions=positions), pool)


FORWARD = WholeModelDraft.forward


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [(DraftRunner, "_newest", lost_root), (WholeModelDraft, "forward", late_rows)],
    ids=["no root", "positions"],
)
def test_the_measure_notices_a_fault(
    base: EngineConfig, monkeypatch: pytest.MonkeyPatch, where: type, name: str, wrong: Any
) -> None:
    monkeypatch.setattr(where, name, wrong)
    accepted = accepted_of(base, of_whole_rounds(), split=False)
    assert sum(map(sum, accepted)) < STEPS * ROUNDS * 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gpt_oss", "gpt2", "deepseek_v3", "qwen3_moe"])
def test_models_of_all_kinds_draft_for_themselves(
    base: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With windows, sinks, learned positions, latents and experts."""
    write_family(tmp_path / "target", family, vocab_size=256)
    shutil.copytree(tmp_path / "target", tmp_path / "itself")
    config = replace(base, model=str(tmp_path / "target"), draft=str(tmp_path / "itself"))
    assert accepted_of(config, of_whole_rounds(), split=True) == [[STEPS] * ROUNDS] * 3


@pytest.mark.parametrize("drafts", [CHAIN, pytest.param(TREE, marks=pytest.mark.slow)], ids=["chain", "tree"])
def test_another_model_changes_no_token(
    base: EngineConfig, tmp_path: Path, drafts: SpeculationConfig
) -> None:
    """Penalties, forks and stops as well; a model of another family and other sizes."""
    write_family(tmp_path / "drafter", "qwen3", vocab_size=256)
    config = replace(base, draft=str(tmp_path / "drafter"), speculation=drafts)
    cluster, asked = patient(config), mixed_requests(6, seed=4)
    assert run_all(cluster, asked, split=True) == undrafted(config, asked)
    entries = [entry for result in cluster.results.values() for entry in result.entries]
    assert any(entry.accepted for entry in entries)
    assert_idle(cluster)
    cluster.close()


def padded(target: Path, folder: Path, vocab: int) -> Path:
    """The target with `vocab` rows of embedding and head; the tokenizer of both is the embedded model's."""
    shutil.copytree(target, folder, dirs_exist_ok=True)
    for each in (target, folder):
        shutil.copy(NANO / "tokenizer.json", each)
    weights = load_file(folder / "model.safetensors")
    ends = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights[name][:vocab]
        more = torch.full((vocab - len(rows), rows.shape[1]), 9.0)
        more[1::2] *= -1
        ends[name] = torch.cat((rows, more))
    return edit(folder, ends, vocab_size=vocab)


@pytest.mark.parametrize("vocab", [272, 256, 200])
def test_models_of_one_tokenizer_may_have_other_numbers_of_rows(
    base: EngineConfig, tmp_path: Path, vocab: int
) -> None:
    """Rows that the target lacks are never proposed, though theirs would be the greatest logits here.

    Ids that the drafter lacks harm nothing.
    """
    target = shutil.copytree(base.model, tmp_path / "target")
    config = replace(base, model=str(target), draft=str(padded(target, tmp_path / "drafter", vocab)))
    accepted = accepted_of(config, of_whole_rounds(), split=False)
    if vocab >= 256:
        assert accepted == [[STEPS] * ROUNDS] * 3
    assert sum(map(sum, accepted)) > 0


def test_ids_pass_as_digits_that_every_dtype_has() -> None:
    placed: Any = SimpleNamespace(placement=SimpleNamespace(device="cpu"))
    tap, nothing = TokenTap(*(placed,) * 4), torch.empty(5, 0)
    ids = torch.tensor([0, 15, 16, 128_255, 2**31 - 1])
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert torch.equal(tokens_of(tap.features(nothing.to(dtype), ids), tap._shifts), ids)


def test_a_model_is_told_from_heads_by_its_tensors(target: Path, tmp_path: Path) -> None:
    known = read_model(target)
    itself = shutil.copytree(target, tmp_path / "itself")
    assert read_head(itself, known).algorithm == "whole_model"
    assert read_head(write_tiny_eagle(tmp_path / "eagle", target), known).algorithm == "eagle"
    layers = {"capture_layers": (1, 2, 3)}
    head = write_tiny_eagle3(tmp_path / "eagle3", target)
    assert read_head(head, known, **layers).algorithm == "eagle3"
    assert read_head(head, known, "dummy", **layers).algorithm == "eagle3"
    assert read_head(itself, known, "dummy").algorithm == "whole_model"


def test_what_cannot_draft_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    known = read_model(target)
    with pytest.raises(ConfigError, match="its vocab_size is not the target's"):
        read_head(write_tiny_llama(tmp_path / "other", vocab=128), known)
    write_hybrid(tmp_path / "states", "qwen3_next", vocab_size=256)
    with pytest.raises(ConfigError, match="layers with a recurrent state do not draft"):
        read_head(tmp_path / "states", known)
    write_family(tmp_path / "positions", "gpt2", vocab_size=256)
    with pytest.raises(ConfigError, match="its table of positions is shorter than the context"):
        read_head(tmp_path / "positions", known)
    with pytest.raises(ConfigError, match="the model's own folder"):
        read_head(target, known)
    itself = shutil.copytree(target, tmp_path / "itself")
    with pytest.raises(ConfigError, match="draft-capture-layers: .* is fed with no layer"):
        read_head(itself, known, capture_layers=(1,))
    named = EngineConfig(model=str(target), draft=str(itself), speculative_token_map="ids.txt")
    with pytest.raises(ConfigError, match="a whole model with an output head of its own"):
        EngineSpec.of(named)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_device_drafts_as_the_plain_engine_does(tmp_path: Path, drafts: SpeculationConfig) -> None:
    """Tokens, and where the rounds end: of a model that is right now and then. One begins beside rounds."""
    small = write_tiny_llama(tmp_path / "target", tied=False, **SIZES)
    other = write_tiny_llama(tmp_path / "drafter", seed=3, **{**SIZES, "hidden": 32, "layers": 2})
    sizes: dict[str, Any] = {"num_pages": 32, "chunk_tokens": 16, "max_running": 4, "context_length": 128}
    plain = EngineConfig(
        model=str(small),
        draft=str(other),
        pool_dir=str(tmp_path),
        worker="unified",
        speculation=drafts,
        **sizes,
    )
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=8, max_tokens=6, ignore_eos=True)
    prompts = {"short": PROMPT[:3], "three chunks": PROMPT}
    asked = [GenerationRequest(name, prompt, params) for name, prompt in prompts.items()]
    expected, _ = answers(plain, asked)
    found, _ = answers(on_device(plain), asked)
    assert tokens(found) == tokens(expected)
    assert [rounds(result) for result in found] == [rounds(result) for result in expected]
    assert any(entry.accepted for result in found for entry in result.entries)


@pytest.mark.slow
def test_plain_rounds_leave_a_device_what_it_drafts_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the target is right whenever it is asked again, and rounds of other depths lie between."""
    small = write_tiny_llama(tmp_path / "target", tied=False, **SIZES)
    sizes: dict[str, Any] = {"num_pages": 32, "chunk_tokens": 16, "max_running": 4, "context_length": 128}
    plain = EngineConfig(
        model=str(small),
        draft=str(shutil.copytree(small, tmp_path / "itself")),
        pool_dir=str(tmp_path),
        worker="unified",
        speculation=replace(CHAIN, adaptive=True),
        **sizes,
    )
    params = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
    asked = [GenerationRequest("one", PROMPT[:20], params)]
    expected, _ = answers(replace(plain, draft=None), asked)
    wander(monkeypatch, [0, 0, 0, 3, 0, 3, 3])
    found, _ = answers(on_device(plain), asked)
    assert tokens(found) == tokens(expected)
    lengths = [len(each) for each in rounds(found[0])]
    assert lengths.count(1) > 3 and lengths.count(STEPS + 1) > 1, lengths


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_draft_workers_device_proposes_what_the_plain_one_does(
    tmp_path: Path, drafts: SpeculationConfig
) -> None:
    """A prompt in pieces, and a sequence that begins in the middle of a page."""
    small = write_tiny_llama(tmp_path / "target", **SIZES)
    other = write_tiny_llama(tmp_path / "drafter", seed=3, **{**SIZES, "hidden": 32})
    plain = EngineConfig(
        model=str(small),
        draft=str(other),
        pool_dir=str(tmp_path),
        worker="draft",
        roles=(Role.DRAFT,),
        num_pages=64,
        max_running=3,
        context_length=256,
        speculation=drafts,
    )
    device = replace(plain, attention_backend="triton", prefill_attention_backend="triton")
    runners = [draft_worker(EngineSpec.of(config)).runner for config in (plain, device)]
    found: list[list[Any]] = []
    for runner in runners:
        shifts = torch.arange(0, 32, 4)
        found.append([])
        for first, count in ((0, 6), (6, 1), (7, 4)):
            ids = torch.tensor(PROMPT)
            features = ((ids[:, None] >> shifts) & 15).float()
            inputs = []
            for name, low in (("whole", 0), ("window", 19)):
                offset, rows = low - low % runner.alignment, slice(low + first, low + first + count)
                new = DraftExtension(
                    list(range(20, 25)) if low else list(range(5)),
                    low + first - offset,
                    PROMPT[rows.start + 1 : rows.stop + 1],
                    features[rows],
                    offset,
                )
                inputs.append(DraftInput(name, new, SamplingParams(temperature=0.0), 0, low))
            trees = [proposed.tree for proposed in runner.draft(inputs, drafts)]
            found[-1].append([(list(tree.tokens), list(tree.parents)) for tree in trees])
    assert found[0] == found[1]
    for runner in runners:
        runner.pool.close()
