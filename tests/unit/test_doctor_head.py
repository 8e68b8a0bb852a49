"""`eyas doctor head`: what a head is, every reason why it does not fit, and what it is worth."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import cli
from eyas.bench.parts import ChildPart, Tell
from eyas.common.config import NANO, NANO_HEAD
from tests.unit.tiny import edit, write_tiny_eagle3, write_tiny_llama
from tests.unit.tiny_dflash import write_tiny_dflash


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "target", layers=8)


@pytest.fixture
def head(tmp_path: Path, target: Path) -> Path:
    return write_tiny_eagle3(tmp_path / "head", target, draft_vocab=48)


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_here(parts: Iterable[ChildPart], tell: Tell) -> int:
        for part in parts:
            part.work(tell)
        return 0

    monkeypatch.setattr("eyas.train.acceptance.run_parts", run_here)
    torch.set_num_threads(1)


def change(folder: Path, **keys: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def test_a_head_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--target", str(NANO), "--num-prompts", "1", "--max-answer", "16"]
    assert cli.main(["doctor", "head", str(NANO_HEAD), *flags]) == 0
    said = capsys.readouterr().out
    assert "an EAGLE-3 head, 1 layer of 256, 4 query and 2 key heads, 4096 of 4096 ids" in said
    assert "what enters the target's layers 2, 4, 5" in said
    assert f"it fits {NANO}" in said and "chains of 5 on 1 prompts: acceptance length" in said
    assert said.endswith("all is well\n")


def test_without_a_target(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "head", str(head)]) == 0
    said = capsys.readouterr().out
    assert "an EAGLE-3 head, 1 layer of 64, 4 query and 2 key heads, 48 of 256 ids" in said
    assert "--target DIR says" in said


def test_a_whole_model_is_one_from_within_its_folder_too(
    target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(target)
    for named in (".", str(target)):
        assert cli.main(["doctor", "head", named]) == 0
    assert capsys.readouterr().out.count("a whole model") == 2


def test_a_head_that_drafts_blocks(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = write_tiny_dflash(tmp_path / "block", target)
    assert cli.main(["doctor", "head", str(head)]) == 0
    said = capsys.readouterr().out
    assert "a DFlash head, 2 layers of 64, 4 query and 2 key heads, 256 of 256 ids, up to 7 drafts" in said
    edit(head, {"hidden_norm.weight": torch.ones(32), "layers.1.self_attn.v_proj.weight": None})
    assert cli.main(["doctor", "head", str(head), "--target", str(target)]) == 1
    said = capsys.readouterr().out
    assert (
        "hidden_norm.weight is 32, not 64" in said and "layers.1.self_attn.v_proj.weight is missing" in said
    )


def test_a_block_is_judged_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And by the layers before and behind those that its config.json names."""
    head = write_tiny_dflash(tmp_path / "block", NANO, layers=1, reads=(2, 4))
    flags = ["--target", str(NANO), "--num-prompts", "1", "--max-answer", "8"]
    assert cli.main(["doctor", "head", str(head), *flags]) == 1
    said = capsys.readouterr().out
    assert "chains of 7 on 1 prompts: acceptance length 1.00" in said
    assert "with --draft-capture-layers 1,3" in said and "with --draft-capture-layers 3,5" in said
    assert "was it trained for another target?" in said


def test_every_mismatch_is_told_at_once(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_llama(tmp_path / "other", layers=2, hidden=32, vocab=128)
    assert cli.main(["doctor", "head", str(head), "--target", str(other)]) == 1
    said = capsys.readouterr().out
    assert "its hidden_size is not the target's" in said and "its vocab_size is not the target's" in said
    assert said.splitlines()[-1] == "1 found"


def test_every_tensor_that_does_not_fit_is_told(
    head: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(head / "model.safetensors")
    del weights["midlayer.hidden_norm.weight"]
    weights["norm.weight"] = torch.ones(32)
    weights["midlayer.mlp.up_proj.weight"][3, 4] = torch.nan
    weights["d2t"] = weights["d2t"] + 300
    weights["extra.weight"] = torch.ones(2)
    save_file(weights, head / "model.safetensors")
    assert cli.main(["doctor", "head", str(head), "--target", str(target)]) == 1
    said = capsys.readouterr().out
    problems = [line for line in said.splitlines() if line.startswith("problem: ")]
    assert any("hidden_norm.weight is missing" in problem for problem in problems)
    assert "problem: tensor norm.weight is 32, not 64" in problems
    assert any("up_proj.weight holds NaN or infinity" in problem for problem in problems)
    assert any("maps outside the target's 256 ids" in problem for problem in problems)
    assert len(problems) == 4 and "extra.weight" in said and "it fits" not in said


def test_what_is_no_head_is_said(tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "head", str(target), "--target", str(target)]) == 1
    assert "problem: draft head" in capsys.readouterr().out
    assert cli.main(["doctor", "head", str(tmp_path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().out


def test_a_head_of_another_target_is_suspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It fits in size, and has learnt nothing."""
    stranger = write_tiny_eagle3(tmp_path / "stranger", NANO)
    flags = ["--target", str(NANO), "--num-prompts", "1", "--max-answer", "16"]
    assert cli.main(["doctor", "head", str(stranger), *flags]) == 1
    assert "fewer than 5% of first drafts are right" in capsys.readouterr().out


def test_the_cluster_is_still_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--url", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().out


@pytest.mark.slow
def test_named_layers_are_read_in_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded head, whose config.json names its layers as those whose output is captured."""
    head = tmp_path / "head"
    shutil.copytree(NANO_HEAD, head)
    change(head, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    flags = ["--target", str(NANO), "--num-prompts", "3", "--max-answer", "32"]
    assert cli.main(["doctor", "head", str(head), *flags]) == 0
    said = capsys.readouterr().out
    lengths = [float(found) for found in re.findall(r"acceptance length ([\d.]+)", said)]
    assert "the target's layers 2, 4, 5" in said and "with --draft-capture-layers 1,3,4: " in said
    assert len(lengths) == 3 and lengths[0] > max(lengths[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("told", "other"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, ["1,3,7"]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": False}, []),
    ],
)
def test_layers_that_the_target_lacks_are_not_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: dict[str, object], other: list[str]
) -> None:
    head = write_tiny_eagle3(tmp_path / "head", NANO)
    if not told.get("use_aux_hidden_state", True):
        weights = load_file(head / "model.safetensors")
        del weights["fc.weight"]
        save_file(weights, head / "model.safetensors")
    change(head, eagle_config=told)
    flags = ["--target", str(NANO), "--num-prompts", "1", "--max-answer", "8"]
    assert cli.main(["doctor", "head", str(head), *flags]) == 1  # it has learnt nothing
    said = capsys.readouterr().out
    assert re.findall(r"with --draft-capture-layers ([\d,]+)", said) == other
    assert "fewer than 5% of first drafts are right" in said
