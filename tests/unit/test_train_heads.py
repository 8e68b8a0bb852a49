"""Heads in training: their tensors, losses and steps against plain statements, and the engine's."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.config import ExpertsSpec
from eyas.train import one_pass
from eyas.train.drafting import drafted, drafting_loss
from eyas.train.head_command import load_teacher
from eyas.train.head_run import begin_with
from eyas.train.heads.base import DISCOUNT, DraftHead, TrainingBatch
from eyas.train.heads.table import KINDS, OWN_VOCABULARY, head_kind
from eyas.train.packing import TrainingExample, batch_of
from eyas.train.saving import save_trained
from eyas.train.teacher import TeacherModel
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny_training import LENGTH, ROOM, VOCAB, course_of, new_head, texts, write_sure_target

LAYER = {
    "self_attn.q_proj.weight": (32, 1),
    "self_attn.k_proj.weight": (16, 1),
    "self_attn.v_proj.weight": (16, 1),
    "self_attn.o_proj.weight": (32, 1),
    "post_attention_layernorm.weight": (32,),
    "mlp.gate_proj.weight": (48, 1),
    "mlp.up_proj.weight": (48, 1),
    "mlp.down_proj.weight": (32, 1.5),
}  # columns in units of the hidden size; attention of an EAGLE-3 head reads twice as many


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sure_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def teacher(target: Path) -> TeacherModel:
    return load_teacher(target, "cpu", ROOM)


# --- the public formats ----------------------------------------------------------------------------------


def shapes(head: DraftHead) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def layer(prefix: str, *, attention: int = 1) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, (rows, *columns) in LAYER.items():
        width = attention if ".q_" in name or ".k_" in name or ".v_" in name else 1
        found[prefix + name] = (rows, *(int(32 * width * column) for column in columns))
    return found


def test_an_eagle3_head_has_the_official_tensors(teacher: TeacherModel) -> None:
    norms = {name: (32,) for name in ("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight")}
    own = {
        "fc.weight": (32, 96),
        "norm.weight": (32,),
        "lm_head.weight": (16, 32),
        "d2t": (16,),
        "t2d": (48,),
    }
    head = new_head("eagle3", teacher, torch.arange(5, 37, 2))
    assert shapes(head) == layer("midlayer.", attention=2) | norms | own | {"d2t": (16,), "t2d": (48,)}
    assert (head.state_dict()["d2t"] + torch.arange(16)).tolist() == list(range(5, 37, 2))
    assert head.state_dict()["t2d"].nonzero().flatten().tolist() == list(range(5, 37, 2))
    assert shapes(new_head("eagle3", teacher)).keys() == shapes(head).keys() - {"d2t", "t2d"}


def test_a_peagle_head_has_eagle3s_tensors_and_its_mask(teacher: TeacherModel) -> None:
    """Its further layers are Llama's."""
    deep = [layer(f"layers.{i}.") | {f"layers.{i}.input_layernorm.weight": (32,)} for i in (1,)]
    expected = shapes(new_head("eagle3", teacher)) | {"mask_hidden": (1, 96)}
    assert shapes(new_head("peagle", teacher)) == expected | deep[0]


def test_a_peagle_head_grows_out_of_an_eagle3_head(teacher: TeacherModel) -> None:
    """Its first drafts are then that head's; a folder of other tensors is refused."""
    small, head = new_head("eagle3", teacher), new_head("peagle", teacher)
    begin_with(head, small.state_dict())
    course = course_of("eagle3", teacher, batch_of([texts(2, 1)], LENGTH))
    with torch.no_grad():
        (first, _), (second, _) = (next(drafted(each, course, 3)) for each in (small, head))
    assert torch.equal(small.logits(first), head.logits(second))
    with pytest.raises(ConfigError, match="--begin-with: no tensor of it is one of this head"):
        begin_with(head, {"fc.weight": torch.zeros(2)})


def test_later_steps_of_peagle_are_fed_with_nothing_of_their_own(teacher: TeacherModel) -> None:
    """But for EAGLE-3's first step, tokens after the pair's are not read."""
    head, ids = new_head("peagle", teacher), torch.arange(12)
    made = []
    for last in (3, 40):
        ids[9:] = last
        text = TrainingExample(ids.numpy().astype(np.int32), np.ones(12, bool))
        with torch.no_grad():
            course = course_of("peagle", teacher, batch_of([[text]], 16))
            made.append([state[0, 7] for state, _ in drafted(head, course, 3)])
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))
    assert not torch.allclose(made[0][1], made[0][2])


def test_an_eagle_head_has_the_official_tensors(teacher: TeacherModel) -> None:
    assert shapes(new_head("eagle", teacher)) == layer("layers.0.") | {"fc.weight": (32, 64)}


def test_an_mtp_head_has_mimos_tensors(teacher: TeacherModel) -> None:
    prefix = "model.mtp_layers.0."
    names = ("token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm")
    norms = {f"{prefix}{name}.weight": (32,) for name in names}
    join = {f"{prefix}input_proj.weight": (32, 64)}
    assert shapes(new_head("mtp", teacher)) == layer(prefix) | norms | join
    attention = dataclasses.replace(teacher.config.layers[-1].attention, qkv_bias=True)
    biased = dataclasses.replace(teacher.config.layers[-1], attention=attention)
    config = dataclasses.replace(teacher.config, layers=(biased,) * 3)
    found = shapes(head_kind("mtp").head_for(config, teacher.ends, None))
    assert len(found) == 16 and found[f"{prefix}self_attn.q_proj.bias"] == (32,)


def test_a_layer_that_no_equation_trains_is_refused_by_name(teacher: TeacherModel) -> None:
    attention = dataclasses.replace(teacher.config.layers[-1].attention, head_norms=True)
    strange = dataclasses.replace(teacher.config.layers[-1], attention=attention)
    config = dataclasses.replace(teacher.config, layers=(strange,) * 3)
    with pytest.raises(ConfigError, match="its last has norms on heads"):
        head_kind("mtp").head_for(config, teacher.ends, None)
    with pytest.raises(ConfigError, match="reads three of its layers, and it has 2"):
        head_kind("eagle3").taps(dataclasses.replace(config, layers=config.layers[:2]))
    experts = ExpertsSpec(width=16, experts=4, per_row=2, scores="softmax", normalised=True)
    sparse = dataclasses.replace(teacher.config.layers[-1], feed_forward=experts)
    config = dataclasses.replace(teacher.config, layers=(sparse,) * 3)
    for kind in ("mtp", "eagle", "eagle3"):
        with pytest.raises(ConfigError, match="a head is a dense layer, and the target's last is none"):
            head_kind(kind).head_for(config, teacher.ends, None)


# --- losses ----------------------------------------------------------------------------------------------


@pytest.fixture
def lesson() -> TrainingBatch:
    torch.manual_seed(5)
    rows = torch.randn(2, 3, 32)
    learnt = torch.ones(2, 3, dtype=torch.bool)
    return TrainingBatch(rows, torch.arange(3)[None], None, 2 * torch.randn(2, 3, VOCAB), rows, learnt)


def cross_entropy(logits: Tensor, wanted: Tensor) -> list[float]:
    """One pair at a time: minus the sum of p log q."""
    found = []
    for q, p in zip(logits.flatten(0, 1), wanted.flatten(0, 1), strict=True):
        found.append(-((p.exp() / p.exp().sum() * (q - q.exp().sum().log())).sum()).item())
    return found


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_distribution_is_learnt(kind: str, teacher: TeacherModel, lesson: TrainingBatch) -> None:
    head, state = new_head(kind, teacher), torch.randn(2, 3, 32)
    expected = cross_entropy(head.logits(state), lesson.target_logits)
    torch.testing.assert_close(head.loss(state, lesson), torch.tensor(expected))


def test_eagle_learns_the_feature_too(teacher: TeacherModel, lesson: TrainingBatch) -> None:
    head, state = new_head("eagle", teacher), 2 * torch.randn(2, 3, 32)
    expected = []
    tokens = cross_entropy(head.logits(state), lesson.target_logits)
    for got, due, token in zip(state.flatten(0, 1), lesson.hidden.flatten(0, 1), tokens, strict=True):
        apart = [abs(a - b) for a, b in zip(got.tolist(), due.tolist(), strict=True)]
        smooth = [0.5 * x * x if x < 1 else x - 0.5 for x in apart]
        expected.append(sum(smooth) / len(smooth) + 0.1 * token)
    torch.testing.assert_close(head.loss(state, lesson), torch.tensor(expected))


def test_eagle_has_noise_in_training_alone(teacher: TeacherModel) -> None:
    head, features = new_head("eagle", teacher), torch.randn(1, 512, 32)
    assert torch.equal(head.enter(features), features)
    noise = head.train().enter(features) - features
    assert 0.09 < float(noise.abs().max()) <= 0.1 + 1e-6
    assert abs(float(noise.mean())) < 0.01


def test_losses_of_later_steps_count_less(teacher: TeacherModel) -> None:
    """By EAGLE-3's discount; of a block of 8 by exp(-1/4)."""
    block = math.exp(-1 / 4)
    shares = {"eagle3": DISCOUNT, "mtp": DISCOUNT, "peagle": block, "dflash": block}
    for kind, share in shares.items():
        head = new_head(kind, teacher)
        course = course_of(kind, teacher, batch_of([texts(2, 1)], LENGTH))
        with torch.no_grad():
            losses = [float(loss) for _, loss in drafted(head, course, 7)]
            expected = sum(share**step * loss for step, loss in enumerate(losses))
            assert float(drafting_loss(head, course, 7)) == pytest.approx(expected), kind


@pytest.mark.parametrize("kind", ["dflash", "peagle"])
def test_blocks_that_are_learnt_are_some_that_count(
    kind: str, teacher: TeacherModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all are drawn, the losses are those of all pairs; of fewer, those of pairs that count come first.

    First drafts of P-EAGLE are learnt below every pair.
    """
    head, course = new_head(kind, teacher), course_of(kind, teacher, batch_of([texts(2, 1)], LENGTH))
    expected = float(drafting_loss(head, course, 3).detach())
    head.train()
    monkeypatch.setattr(one_pass, "ROWS_PER_BLOCK", 1)
    assert float(drafting_loss(head, course, 3).detach()) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(one_pass, "ROWS_PER_BLOCK", 8)
    (first, _), (second, _), _ = drafted(head, course, 3)
    assert first.shape == (1, course.rows(3) if kind == "peagle" else 8, 32) and second.shape == (1, 8, 32)
    drafting_loss(head, course, 3).backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


# --- steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_row_do_not_see_each_other(kind: str, teacher: TeacherModel) -> None:
    """Every step of two packed texts is that of each alone, and so is what counts."""
    head, (first, second) = new_head(kind, teacher), texts(2, 4, length=12)
    with torch.no_grad():
        packed = course_of(kind, teacher, batch_of([[first, second]], 40))
        alone = [course_of(kind, teacher, batch_of([[text]], 40)) for text in (first, second)]
        steps = [list(drafted(head, course, 3)) for course in (packed, *alone)]
        for step, (both, one, other) in enumerate(zip(*steps, strict=True)):
            rows = 12 - 1 - step  # pairs whose token of this step is in the text
            torch.testing.assert_close(both[0][:, :rows], one[0][:, :rows])
            torch.testing.assert_close(both[0][:, 12 : 12 + rows], other[0][:, :rows])
            counted = packed.counted(step, 36)[0].nonzero().flatten().tolist()
            assert counted == [*range(10 - step), *range(12, 22 - step)]
        blind = dataclasses.replace(packed, segments=torch.ones_like(packed.segments))
        (state, _), *_ = drafted(head, blind, 3)
        assert not torch.allclose(state[:, 12:22], steps[2][0][0][:, :10], atol=1e-3)


def served(engine: HeadRig, rig: Rig, features: Tensor, tokens: list[int], depth: int) -> list[Tensor]:
    """The logits after the last pair, and after each of its greedy drafts, as the engine computes them."""
    count = len(tokens)
    pages = rig.table(count + depth)
    rows = engine.forward(features, [QuerySpan(pages, 0, count)], tokens)[-1:]
    if (block := engine.head.block) is not None:
        span = QuerySpan(pages, count, block.width(depth + 1), together=not block.causal)
        below = engine.drafted(features[:1], [span], block.tokens(tokens[-1], span.count), depth=1).rows
        rows = torch.cat((rows, below)) if block.first < 0 else below[block.first :]
        return list(engine.head.logits(rows))
    found = [engine.head.logits(rows)[0]]
    for step in range(depth):
        draft = int(found[-1].argmax())
        if engine.head.token_map is not None:
            draft = int(engine.head.token_map[draft])
        rows = engine.forward(rows, [QuerySpan(pages, count + step, 1)], [draft])
        found.append(engine.head.logits(rows)[0])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_is_served(
    kind: str, teacher: TeacherModel, target: Path, tmp_path: Path
) -> None:
    """A head's folder through the engine's own equations: the same logits along a chain of drafts."""
    token_map = torch.arange(1, 33) if kind in OWN_VOCABULARY else None
    head = new_head(kind, teacher, token_map)
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as it is stored
    save_trained(head, head_kind(kind).described(head, 4), tmp_path)
    rig = Rig(target)
    engine = HeadRig(tmp_path, rig)
    assert engine.config.algorithm == kind
    block = 4 if kind == "dflash" else 0  # whose rows see the block's end
    (text,) = texts(1, 6, length=10)
    ids = text.ids.tolist()
    _, tapped = rig.forward([QuerySpan(rig.table(10), 0, 10)], ids, engine.capture.layers)
    features = engine.capture.features(tapped, torch.tensor(ids))[:9]
    for step, logits in enumerate(served(engine, rig, features, ids[1:], depth=3)):
        batch = batch_of([[TrainingExample(np.array(ids, np.int32), np.ones(len(ids), bool))]], 24)
        with torch.no_grad():
            steps = drafted(head, course_of(kind, teacher, batch, token_map), block or step + 1)
            state, _ = next(itertools.islice(steps, step, None))
        torch.testing.assert_close(head.logits(state)[0, 8], logits, atol=2e-4, rtol=1e-3)
        draft = int(logits.argmax())
        ids.append(draft if token_map is None else int(token_map[draft]))
