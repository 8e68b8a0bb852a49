"""Heads in training: their tensors, losses and steps against plain statements, and that they learn."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eyas.common.errors import ConfigError
from eyas.engine.batch.spans import Span
from eyas.engine.checkpoint.weights import Placement
from eyas.engine.models.table import read_model
from eyas.train.acceptance import ByDepth, count_chains
from eyas.train.checkpoint import Checkpoint
from eyas.train.export import save_trained
from eyas.train.head_run import HeadRun, Pace, Settings, Texts, frequent
from eyas.train.heads.base import DraftHead, Lesson
from eyas.train.heads.table import KINDS, head_kind
from eyas.train.packing import Batch, Batches, Example, batch_of
from eyas.train.target import Recipe
from eyas.train.teacher import PlainTeacher, Room, Teacher, load_teacher
from eyas.train.unroll import DISCOUNT, Course, unrolled, unrolled_loss
from tests.unit.model_rig import HeadRig, Rig
from tests.unit.tiny_training import VOCAB, texts, write_sure_target

LENGTH = 64
ROOM = Room(tokens=4 * LENGTH, texts=4 * LENGTH, length=LENGTH)
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
def teacher(target: Path) -> Teacher:
    return load_teacher(target, "cpu", ROOM)


def new_head(kind: str, teacher: Teacher, token_map: Tensor | None = None) -> DraftHead:
    """With gains and matrices that all matter."""
    torch.manual_seed(3)
    head = head_kind(kind).head_for(teacher.config, teacher.ends, token_map)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(6.0)
    return head.eval()


def course_of(kind: str, teacher: Teacher, batch: Batch, token_map: Tensor | None = None) -> Course:
    taps = head_kind(kind).taps(teacher.config)
    seen = teacher.observe(batch, taps)
    wanted = teacher.logits(seen.hidden)
    return Course(
        features=seen.tapped if taps else seen.hidden,
        hidden=seen.hidden,
        embeds=teacher.ends.embedding[batch.ids],
        wanted=wanted if token_map is None else wanted[..., token_map],
        learnt=batch.answer,
        positions=batch.positions,
        segments=batch.segments,
    )


# --- the public formats ----------------------------------------------------------------------------------


def shapes(head: DraftHead) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def layer(prefix: str, *, attention: int = 1) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, (rows, *columns) in LAYER.items():
        width = attention if ".q_" in name or ".k_" in name or ".v_" in name else 1
        found[prefix + name] = (rows, *(int(32 * width * column) for column in columns))
    return found


def test_an_eagle3_head_has_the_official_tensors(teacher: Teacher) -> None:
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


def test_an_eagle_head_has_the_official_tensors(teacher: Teacher) -> None:
    assert shapes(new_head("eagle", teacher)) == layer("layers.0.") | {"fc.weight": (32, 64)}


def test_an_mtp_head_has_mimos_tensors(teacher: Teacher) -> None:
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


def test_a_layer_that_no_equation_trains_is_refused_by_name(teacher: Teacher) -> None:
    attention = dataclasses.replace(teacher.config.layers[-1].attention, head_norms=True)
    strange = dataclasses.replace(teacher.config.layers[-1], attention=attention)
    config = dataclasses.replace(teacher.config, layers=(strange,) * 3)
    with pytest.raises(ConfigError, match="its last has norms on heads"):
        head_kind("mtp").head_for(config, teacher.ends, None)
    with pytest.raises(ConfigError, match="reads three of its layers, and it has 2"):
        head_kind("eagle3").taps(dataclasses.replace(config, layers=config.layers[:2]))


# --- losses ----------------------------------------------------------------------------------------------


@pytest.fixture
def lesson() -> Lesson:
    torch.manual_seed(5)
    rows = torch.randn(2, 3, 32)
    learnt = torch.ones(2, 3, dtype=torch.bool)
    return Lesson(rows, torch.arange(3)[None], None, 2 * torch.randn(2, 3, VOCAB), rows, learnt)


def cross_entropy(logits: Tensor, wanted: Tensor) -> list[float]:
    """One pair at a time: minus the sum of p log q."""
    found = []
    for q, p in zip(logits.flatten(0, 1), wanted.flatten(0, 1), strict=True):
        found.append(-((p.exp() / p.exp().sum() * (q - q.exp().sum().log())).sum()).item())
    return found


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_the_distribution_is_learnt(kind: str, teacher: Teacher, lesson: Lesson) -> None:
    head, state = new_head(kind, teacher), torch.randn(2, 3, 32)
    expected = cross_entropy(head.logits(state), lesson.wanted)
    torch.testing.assert_close(head.loss(state, lesson), torch.tensor(expected))


def test_eagle_learns_the_feature_too(teacher: Teacher, lesson: Lesson) -> None:
    head, state = new_head("eagle", teacher), 2 * torch.randn(2, 3, 32)
    expected = []
    tokens = cross_entropy(head.logits(state), lesson.wanted)
    for got, due, token in zip(state.flatten(0, 1), lesson.hidden.flatten(0, 1), tokens, strict=True):
        apart = [abs(a - b) for a, b in zip(got.tolist(), due.tolist(), strict=True)]
        smooth = [0.5 * x * x if x < 1 else x - 0.5 for x in apart]
        expected.append(sum(smooth) / len(smooth) + 0.1 * token)
    torch.testing.assert_close(head.loss(state, lesson), torch.tensor(expected))


def test_eagle_has_noise_in_training_alone(teacher: Teacher) -> None:
    head, features = new_head("eagle", teacher), torch.randn(1, 512, 32)
    assert torch.equal(head.enter(features), features)
    noise = head.train().enter(features) - features
    assert 0.09 < float(noise.abs().max()) <= 0.1 + 1e-6
    assert abs(float(noise.mean())) < 0.01


def test_losses_of_later_steps_count_less(teacher: Teacher) -> None:
    head = new_head("eagle3", teacher)
    course = course_of("eagle3", teacher, batch_of([texts(2, 1)], LENGTH))
    losses = [float(loss) for _, loss in unrolled(head, course, 3)]
    expected = losses[0] + DISCOUNT * losses[1] + DISCOUNT**2 * losses[2]
    assert float(unrolled_loss(head, course, 3)) == pytest.approx(expected)


# --- steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_row_do_not_see_each_other(kind: str, teacher: Teacher) -> None:
    """Every step of two packed texts is that of each alone, and so is what counts."""
    head, (first, second) = new_head(kind, teacher), texts(2, 4, length=12)
    with torch.no_grad():
        packed = course_of(kind, teacher, batch_of([[first, second]], 40))
        alone = [course_of(kind, teacher, batch_of([[text]], 40)) for text in (first, second)]
        steps = [list(unrolled(head, course, 3)) for course in (packed, *alone)]
        for step, (both, one, other) in enumerate(zip(*steps, strict=True)):
            rows = 12 - 1 - step  # pairs whose token of this step is in the text
            torch.testing.assert_close(both[0][:, :rows], one[0][:, :rows])
            torch.testing.assert_close(both[0][:, 12 : 12 + rows], other[0][:, :rows])
            counted = packed.counted(step, 36)[0].nonzero().flatten().tolist()
            assert counted == [*range(10 - step), *range(12, 22 - step)]
        blind = dataclasses.replace(packed, segments=torch.ones_like(packed.segments))
        (state, _), *_ = unrolled(head, blind, 3)
        assert not torch.allclose(state[:, 12:22], steps[2][0][0][:, :10], atol=1e-3)


def served(engine: HeadRig, rig: Rig, features: Tensor, tokens: list[int], depth: int) -> list[Tensor]:
    """The logits after the last pair, and after each of its greedy drafts, as the engine computes them."""
    count = len(tokens)
    pages = rig.table(count + depth)
    rows = engine.forward(features, [Span(pages, 0, count)], tokens)[-1:]
    found = [engine.head.logits(rows)[0]]
    for step in range(depth):
        draft = int(found[-1].argmax())
        if engine.head.token_map is not None:
            draft = int(engine.head.token_map[draft])
        rows = engine.forward(rows, [Span(pages, count + step, 1)], [draft])
        found.append(engine.head.logits(rows)[0])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_trained_is_what_is_served(kind: str, teacher: Teacher, target: Path, tmp_path: Path) -> None:
    """A head's folder through the engine's own equations: the same logits along a chain of drafts."""
    token_map = torch.arange(1, 33) if kind == "eagle3" else None
    head = new_head(kind, teacher, token_map)
    for parameter in head.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as it is stored
    save_trained(head, head_kind(kind).described(head), tmp_path)
    rig = Rig(target)
    engine = HeadRig(tmp_path, rig)
    assert engine.config.algorithm == kind
    (text,) = texts(1, 6, length=10)
    ids = text.ids.tolist()
    _, tapped = rig.forward([Span(rig.table(10), 0, 10)], ids, engine.capture.layers)
    features = engine.capture.features(tapped)[:9]
    for step, logits in enumerate(served(engine, rig, features, ids[1:], depth=3)):
        batch = batch_of([[Example(np.array(ids, np.int32), np.ones(len(ids), bool))]], 24)
        with torch.no_grad():
            *_, (state, _) = unrolled(head, course_of(kind, teacher, batch, token_map), step + 1)
        torch.testing.assert_close(head.logits(state)[0, 8], logits, atol=2e-4, rtol=1e-3)
        draft = int(logits.argmax())
        ids.append(draft if token_map is None else int(token_map[draft]))


# --- runs ------------------------------------------------------------------------------------------------


def run_of(kind: str, teacher: Teacher, folder: Path, steps: int = 16) -> HeadRun:
    settings = Settings(
        kind,
        Recipe(steps, rows=2, length=LENGTH, rate=0.01),
        unroll=3 if kind == "eagle3" else 1,
        seed=0,
        draft_vocab=40 if kind == "eagle3" else None,
    )
    checkpoint = Checkpoint(folder / "checkpoint.pt", {"kind": kind, "steps": steps})
    return HeadRun(settings, teacher, Texts(texts(60, 1), texts(12, 2)), checkpoint)


@pytest.mark.parametrize(("kind", "least"), [("eagle3", 1.8), ("eagle", 3.0), ("mtp", 4.0)])
def test_training_makes_drafts_right(kind: str, least: float, teacher: Teacher, tmp_path: Path) -> None:
    """On texts that were held out; of the 48 successors only 40 are in the EAGLE-3 head's vocabulary."""
    run, lines = run_of(kind, teacher, tmp_path), []
    assert run.measure().length < 1.3
    run.train(Pace(measured=8, saved=100), lines.append)
    assert [line["step"] for line in lines] == [8, 16]
    assert lines[-1]["acceptance_length"] > least
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines == run.progress.history


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_killed_run_ends_as_if_it_had_not_been(kind: str, teacher: Teacher, tmp_path: Path) -> None:
    """Bit for bit; the eagle head also has noise. The kill comes two steps after the last checkpoint."""
    whole = run_of(kind, teacher, tmp_path / "whole", steps=6)
    whole.train(Pace(measured=5, saved=3), lambda line: None)

    def kill(_: object) -> None:
        raise Killed

    broken = run_of(kind, teacher, tmp_path / "broken", steps=6)
    with pytest.raises(Killed):
        broken.train(Pace(measured=5, saved=3), kill)
    again = run_of(kind, teacher, tmp_path / "broken", steps=6)
    again.resume()
    assert again.progress.step == 3
    again.train(Pace(measured=5, saved=3), lambda line: None)
    ends = whole.head.state_dict(), again.head.state_dict()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    told = [[{**line, "seconds": 0} for line in run.progress.history] for run in (whole, again)]
    assert told[0] == told[1] and [line["step"] for line in told[0]] == [5, 6]


def test_a_run_of_other_settings_is_not_continued(teacher: Teacher, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume: there is no"):
        run_of("eagle", teacher, tmp_path).resume()
    run_of("eagle", teacher, tmp_path, steps=6).save()
    with pytest.raises(ConfigError, match="--steps: 16 here, and 6 in the run"):
        run_of("eagle", teacher, tmp_path).resume()
    (tmp_path / "checkpoint.pt").write_bytes(b"PK broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        run_of("eagle", teacher, tmp_path).resume()


def test_chains_are_counted_by_hand(teacher: Teacher) -> None:
    """A head that drafts the successor of what it is fed, except of one id."""
    head, text = new_head("mtp", teacher), texts(1, 7, length=8)[0]
    course = course_of("mtp", teacher, batch_of([[text]], 20))
    wrong = int(text.ids[5])

    def logits(state: Tensor) -> Tensor:
        fed = course.embeds[:, 1 + calls[0] : 1 + calls[0] + state.shape[1]]
        calls[0] += 1
        found = teacher.logits(fed)
        found[:, 5 - calls[0]] = torch.nn.functional.one_hot(torch.tensor(wrong), VOCAB).float()
        return found

    calls = [0]
    head.logits = logits  # type: ignore[method-assign]
    head.loss = lambda state, lesson: lesson.learnt.flatten().float()  # type: ignore[method-assign]
    counts = ByDepth()
    count_chains(head, course, teacher.logits(course.embeds).argmax(-1), 3, counts)
    # Pairs 0 .. 5 predict tokens 2 .. 7; what follows id 5 is wrong: pair 4 at once, pair 3 at depth 2 and
    # pair 2 at depth 3.
    assert counts.offered == [6, 5, 4] and counts.accepted == [5, 3, 2]
    assert counts.shares == [5 / 6, 3 / 5, 2 / 4]
    assert counts.length == pytest.approx(1 + 5 / 6 + 3 / 5 + 2 / 4)


# --- texts and batches -----------------------------------------------------------------------------------


def test_the_vocabulary_is_what_answers_use() -> None:
    ids, answer = np.array([9, 9, 9, 3, 3, 5, 7], np.int32), np.array([0, 0, 0, 1, 1, 1, 1], bool)
    assert frequent([Example(ids, answer)], 3, 12).tolist() == [3, 5, 7]  # 9 stands in questions alone
    assert frequent([Example(ids, answer)], 5, 12).tolist() == [0, 1, 3, 5, 7]
    assert frequent([Example(ids, answer)], 1, 12).tolist() == [3]
    assert frequent([], None, 12) is None and frequent([], 12, 12) is None
    with pytest.raises(ConfigError, match="--draft-vocab: 13 is more than the target's 12 ids"):
        frequent([], 13, 12)


def test_every_text_comes_once_before_any_comes_again() -> None:
    examples = [Example(np.full(n, n, np.int32), np.arange(n) > 1) for n in (3, 9, 4, 7, 5, 12, 6)]
    batches = Batches(examples, rows=2, length=10, seed=1)
    once = list(batches.once())
    assert sorted(length for batch in once for length in batch.lengths) == [3, 4, 5, 6, 7, 9, 10]
    for batch in once:
        for row in range(batch.ids.shape[0]):
            for number in batch.segments[row].unique().tolist():
                own = batch.segments[row] == number
                if number:
                    count = int(own.sum())
                    assert batch.positions[row][own].tolist() == list(range(count))
                    assert batch.answer[row][own].tolist() == [i > 1 for i in range(count)]
                else:
                    assert not batch.answer[row][own].any()


def test_batches_go_on_where_they_ended() -> None:
    examples = [Example(np.full(n, n, np.int32), np.ones(n, bool)) for n in range(2, 14)]
    batches = Batches(examples, rows=2, length=16, seed=1)
    stream, later = batches.start(0), batches.start(7)
    first = [next(stream) for _ in range(10)]
    for known in first[7:]:
        assert torch.equal(known.ids, next(later).ids)
    other = next(dataclasses.replace(batches, seed=2).start(0))
    assert first[0].ids.shape == (2, 16) and not torch.equal(other.ids, first[0].ids)


# --- the target ------------------------------------------------------------------------------------------


def test_a_teacher_says_what_the_target_does(target: Path, teacher: Teacher) -> None:
    assert isinstance(teacher, PlainTeacher)
    rig, batch = Rig(target), batch_of([texts(2, 8, length=9), texts(1, 9, length=30)], 40)
    seen = teacher.observe(batch, (1, 3))
    for row, first, count in ((0, 0, 9), (0, 9, 9), (1, 0, 30)):
        ids = batch.ids[row, first : first + count].tolist()
        residual, tapped = rig.forward([Span(rig.table(len(ids)), 0, len(ids))], ids, (1, 3))
        here = slice(first, first + len(ids))
        assert torch.equal(seen.tapped[row, here], tapped)
        torch.testing.assert_close(teacher.logits(seen.hidden[row, here]), rig.model.logits(residual))
    assert not seen.tapped[0, 18:].any() and not seen.hidden[1, 30:].any()


def test_a_gpu_teacher_is_the_plain_one(target: Path, teacher: Teacher) -> None:
    """Under Triton's interpreter, on the CPU."""
    from eyas.train.device_teacher import DeviceTeacher

    fast = DeviceTeacher(read_model(target), Placement(), ROOM)
    batch = batch_of([texts(2, 8, length=9), texts(1, 9, length=21)], 24)
    found, expected = fast.observe(batch, (0, 1)), teacher.observe(batch, (0, 1))
    torch.testing.assert_close(found.tapped, expected.tapped, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fast.ends.lm_head, teacher.ends.lm_head)
    assert torch.equal(fast.ends.gain, teacher.ends.gain)


def test_a_teacher_is_refused_by_name(target: Path) -> None:
    with pytest.raises(ConfigError, match="--max-length: 4096 is more than the 2048 tokens"):
        load_teacher(target, "cpu", Room(4096, 1, 4096))
