"""`eyas train` of heads from the command line: what it writes, how it goes on, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from eyas import cli
from eyas.bench.parts import ChildPart, Tell
from eyas.common.config import NANO
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from tests.unit.tiny import write_tiny_llama

VOCAB = 4096  # of the embedded model's tokenizer
FLAGS = ["--steps", "4", "--batch-size", "2", "--max-length", "48", "--max-answer", "12", "--held-out", "2"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    sizes = {"layers": 3, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 48}
    write_tiny_llama(folder, vocab=VOCAB, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"Count to {i}"}]} for i in range(20)]
    lines += [{"text": "one, two, three, four, five"}, {"prompt": "Long " * 60}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts without processes: they are tested elsewhere, and take seconds each."""

    def run_here(parts: Iterable[ChildPart], tell: Tell) -> int:
        for part in parts:
            part.work(tell)
        return 0

    monkeypatch.setattr("eyas.train.answers.run_parts", run_here)
    monkeypatch.setattr("eyas.train.acceptance.run_parts", run_here)
    torch.set_num_threads(1)


def train(kind: str, target: Path, data: Path, out: Path, *more: str) -> int:
    words = [kind, "--target", str(target), "--data", str(data), "--out", str(out), *FLAGS, *more]
    return cli.main(["train", *words])


@pytest.mark.parametrize(
    "kind", ["eagle", *(pytest.param(k, marks=pytest.mark.slow) for k in ("eagle3", "mtp"))]
)
def test_a_head_is_trained_and_served(
    kind: str, target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    plot = out / "training.svg"  # as docs/training-heads.md shows it
    more = ["--draft-vocab", "1024"] if kind == "eagle3" else []
    assert train(kind, target, data, out, "--measure-every", "2", "--plot", str(plot), *more) == 0
    config = read_head(out, read_model(target))
    assert (config.algorithm, config.draft_vocab_size) == (kind, 1024 if more else VOCAB)
    log = [json.loads(line) for line in (out / "training" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [2, 4]
    assert all(len(line["acceptance_by_depth"]) == 5 for line in log)
    first, *answers = (out / "training" / "answers.jsonl").read_text().splitlines()
    assert json.loads(first)["longest"] == 12 and len(answers) == 20
    said = capsys.readouterr()
    assert "1 questions are longer than 40 tokens and are left out" in said.err
    assert "held-out questions: acceptance length" in said.out
    assert "Acceptance by depth" in plot.read_text()


@pytest.mark.slow
def test_a_run_goes_on(target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("eagle3", target, data, tmp_path) == 0
    before = (tmp_path / "model.safetensors").read_bytes()
    assert train("eagle3", target, data, tmp_path) == 2
    assert "has a checkpoint: --resume goes on with it" in capsys.readouterr().err
    assert train("eagle3", target, data, tmp_path, "--resume", "--seed", "1") == 2
    assert "--out: the answers in" in capsys.readouterr().err
    assert train("eagle3", target, data, tmp_path, "--resume", "--unroll", "2") == 2
    assert "--unroll: 2 here, and 7 in the run" in capsys.readouterr().err
    (tmp_path / "model.safetensors").unlink()
    assert train("eagle3", target, data, tmp_path, "--resume") == 0
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_what_cannot_work_is_told(
    target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "needs": ["--plot", str(tmp_path / "plot.gif")],
        "--draft-vocab: 100 is not a multiple of 16": ["--draft-vocab", "100"],
        "--max-length: 48 tokens are too few for --unroll 47": ["--unroll", "47", "--keep-answers"],
        "--device: cuda is not available": ["--device", "cuda", "--keep-answers"],
    }
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "one, two, three"}\n')
    for told, flags in wrong.items():
        assert train("eagle3", target, texts, tmp_path / "out", *flags) == 2
        said = capsys.readouterr().err
        assert told in said or "does not end in .png or .svg" in said
    assert train("eagle3", target, texts, texts / "head") == 2  # no folder, but a file
    assert "--out: " in (said := capsys.readouterr().err) and "cannot be written: Not a directory" in said
    with pytest.raises(SystemExit):  # a kind without a vocabulary of its own has no such flag
        train("eagle", target, data, tmp_path / "out", "--draft-vocab", "64")
    assert "unknown: --draft-vocab" in capsys.readouterr().err
