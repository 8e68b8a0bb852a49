"""Runs of training: that heads learn, that a killed run goes on, batches, and the target beside them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eyas.common.errors import ConfigError
from eyas.engine.adapters.peft import read_adapter
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.models.heads import head_spelling, read_head
from eyas.engine.models.table import read_model
from eyas.train.acceptance import ByDepth, count_chains
from eyas.train.device_teacher import DeviceTeacher
from eyas.train.head_command import load_teacher
from eyas.train.head_run import HeadRun, HeadSettings, RunIntervals, TrainingTexts, check_whole, frequent
from eyas.train.heads.table import head_kind
from eyas.train.packing import PackedBatches, TrainingExample, batch_of
from eyas.train.recipe import TrainingRecipe
from eyas.train.saving import TrainingCheckpoint, save_trained
from eyas.train.teacher import BatchLimit, PlainTeacher, TeacherModel
from eyas.train.updates import save_updates, updates_of
from tests.unit.model_rig import Rig
from tests.unit.tiny_training import LENGTH, ROOM, VOCAB, course_of, new_head, texts, write_sure_target


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sure_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def teacher(target: Path) -> TeacherModel:
    return load_teacher(target, "cpu", ROOM)


# --- runs ------------------------------------------------------------------------------------------------


def run_of(kind: str, teacher: TeacherModel, folder: Path, steps: int = 16) -> HeadRun:
    settings = HeadSettings(
        kind,
        TrainingRecipe(steps, rows=2, length=LENGTH, rate=0.01),
        unroll=3 if kind == "eagle3" else 1,
        seed=0,
        draft_vocab=40 if kind == "eagle3" else None,
    )
    checkpoint = TrainingCheckpoint(folder / "checkpoint.pt", {"kind": kind, "steps": steps})
    return HeadRun(settings, teacher, TrainingTexts(texts(60, 1), texts(12, 2)), checkpoint)


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        pytest.param("eagle3", 1.8, marks=pytest.mark.slow),
        pytest.param("eagle", 3.0, marks=pytest.mark.slow),
        ("mtp", 4.0),
    ],
)
def test_training_makes_drafts_right(kind: str, least: float, teacher: TeacherModel, tmp_path: Path) -> None:
    """On texts that were held out; of the 48 successors only 40 are in the EAGLE-3 head's vocabulary."""
    run, lines = run_of(kind, teacher, tmp_path), []
    assert run.measure().length < 1.3
    run.train(RunIntervals(measured=8, saved=100), lines.append)
    assert [line["step"] for line in lines] == [8, 16]
    assert lines[-1]["acceptance_length"] > least
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines == run.progress.history


def test_updates_of_a_head_alone_are_learnt_for_an_adapter(teacher: TeacherModel, tmp_path: Path) -> None:
    """An engine reads them as it reads adapters, by the names of the head's tensors."""
    base, kind = new_head("eagle", teacher), head_kind("eagle")
    save_trained(base, kind.described(base, 1), tmp_path / "head")
    settings = HeadSettings(
        "eagle", TrainingRecipe(8, rows=2, length=LENGTH, rate=0.01), unroll=1, seed=0,
        begin=tmp_path / "head", updates=4,
    )  # fmt: skip
    checkpoint, lines = TrainingCheckpoint(tmp_path / "checkpoint.pt", {}), []
    run = HeadRun(settings, teacher, TrainingTexts(texts(60, 1), texts(12, 2)), checkpoint)
    run.train(RunIntervals(measured=4, saved=100), lines.append)
    assert lines[-1]["loss"] < lines[0]["loss"]
    save_updates(run.head, 4, tmp_path / "draft")

    config, stored = (
        read_head(tmp_path / "head", teacher.config),
        load_file(tmp_path / "head" / "model.safetensors"),
    )
    read = read_adapter(tmp_path / "draft", config.decoder, 4, spelling=head_spelling(config))
    names = {name for name, _ in updates_of(run.head)}
    assert len(read.updates) == len(names) == 7
    for name in names:
        update = read.updates[head_spelling(config)(f"{name}.weight")]
        added = update.stored.float() * update.scaling @ update.down.float()
        learnt = run.head.get_submodule(name).weight.detach() - stored[f"{name}.weight"]
        torch.testing.assert_close(added, learnt, rtol=0.05, atol=0.02 * learnt.abs().max().item())
        assert learnt.abs().max() > 0
    assert torch.equal(run.head.get_submodule("fc").weight, stored["fc.weight"].float())
    with pytest.raises(ConfigError, match=r"--begin-with: its fc.weight is not there"):
        check_whole(base, {})
    with pytest.raises(ConfigError, match=r"its fc.weight is \[3\], and a head for this target has \["):
        check_whole(base, stored | {"fc.weight": torch.ones(3)})


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("kind", [pytest.param("eagle3", marks=pytest.mark.slow), "eagle"])
def test_a_killed_run_ends_as_if_it_had_not_been(kind: str, teacher: TeacherModel, tmp_path: Path) -> None:
    """Bit for bit; the eagle head also has noise. The kill comes two steps after the last checkpoint."""
    whole = run_of(kind, teacher, tmp_path / "whole", steps=6)
    whole.train(RunIntervals(measured=5, saved=3), lambda line: None)

    def kill(_: object) -> None:
        raise Killed

    broken = run_of(kind, teacher, tmp_path / "broken", steps=6)
    with pytest.raises(Killed):
        broken.train(RunIntervals(measured=5, saved=3), kill)
    again = run_of(kind, teacher, tmp_path / "broken", steps=6)
    again.resume()
    assert again.progress.step == 3
    again.train(RunIntervals(measured=5, saved=3), lambda line: None)
    ends = whole.head.state_dict(), again.head.state_dict()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    told = [[{**line, "seconds": 0} for line in run.progress.history] for run in (whole, again)]
    assert told[0] == told[1] and [line["step"] for line in told[0]] == [5, 6]


def test_a_run_of_other_settings_is_not_continued(teacher: TeacherModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume: there is no"):
        run_of("eagle", teacher, tmp_path).resume()
    run_of("eagle", teacher, tmp_path, steps=6).save()
    with pytest.raises(ConfigError, match="--steps: 16 here, and 6 in the run"):
        run_of("eagle", teacher, tmp_path).resume()
    (tmp_path / "checkpoint.pt").write_bytes(b"PK broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        run_of("eagle", teacher, tmp_path).resume()


def test_chains_are_counted_by_hand(teacher: TeacherModel) -> None:
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
    assert frequent([TrainingExample(ids, answer)], 3, 12).tolist() == [
        3,
        5,
        7,
    ]  # 9 stands in questions alone
    assert frequent([TrainingExample(ids, answer)], 5, 12).tolist() == [0, 1, 3, 5, 7]
    assert frequent([TrainingExample(ids, answer)], 1, 12).tolist() == [3]
    assert frequent([], None, 12) is None and frequent([], 12, 12) is None
    with pytest.raises(ConfigError, match="--draft-vocab: 13 is more than the target's 12 ids"):
        frequent([], 13, 12)


def test_every_text_comes_once_before_any_comes_again() -> None:
    examples = [TrainingExample(np.full(n, n, np.int32), np.arange(n) > 1) for n in (3, 9, 4, 7, 5, 12, 6)]
    batches = PackedBatches(examples, rows=2, length=10, seed=1)
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
    examples = [TrainingExample(np.full(n, n, np.int32), np.ones(n, bool)) for n in range(2, 14)]
    batches = PackedBatches(examples, rows=2, length=16, seed=1)
    stream, later = batches.start(0), batches.start(7)
    first = [next(stream) for _ in range(10)]
    for known in first[7:]:
        assert torch.equal(known.ids, next(later).ids)
    other = next(dataclasses.replace(batches, seed=2).start(0))
    assert first[0].ids.shape == (2, 16) and not torch.equal(other.ids, first[0].ids)


# --- the target ------------------------------------------------------------------------------------------


def test_a_teacher_says_what_the_target_does(target: Path, teacher: TeacherModel) -> None:
    assert isinstance(teacher, PlainTeacher)
    rig, batch = Rig(target), batch_of([texts(2, 8, length=9), texts(1, 9, length=30)], 40)
    seen = teacher.observe(batch, (1, 3))
    for row, first, count in ((0, 0, 9), (0, 9, 9), (1, 0, 30)):
        ids = batch.ids[row, first : first + count].tolist()
        residual, tapped = rig.forward([QuerySpan(rig.table(len(ids)), 0, len(ids))], ids, (1, 3))
        here = slice(first, first + len(ids))
        assert torch.equal(seen.tapped[row, here], tapped)
        torch.testing.assert_close(teacher.logits(seen.hidden[row, here]), rig.model.logits(residual))
    assert not seen.tapped[0, 18:].any() and not seen.hidden[1, 30:].any()


def test_a_gpu_teacher_is_the_plain_one(target: Path, teacher: TeacherModel) -> None:
    """Under Triton's interpreter, on the CPU."""
    fast = DeviceTeacher(read_model(target), WeightPlacement(), ROOM)
    batch = batch_of([texts(2, 8, length=9), texts(1, 9, length=21)], 24)
    found, expected = fast.observe(batch, (0, 1)), teacher.observe(batch, (0, 1))
    torch.testing.assert_close(found.tapped, expected.tapped, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.hidden, expected.hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fast.ends.lm_head, teacher.ends.lm_head)
    assert torch.equal(fast.ends.gain, teacher.ends.gain)


def test_a_teacher_is_refused_by_name(target: Path) -> None:
    with pytest.raises(ConfigError, match="--max-length: 4096 is more than the 2048 tokens"):
        load_teacher(target, "cpu", BatchLimit(4096, 1, 4096))
