"""Draft heads and MTP layers in four bits, for a target in four bits: read, and no token is another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from loopback import Loopback, split_configs
from loopback_runs import assert_idle, mixed_requests, run_all, undrafted

from eyas import cli
from eyas.common.config import NANO, NANO_HEAD
from eyas.engine.models.heads import read_head
from eyas.engine.models.table import read_model
from eyas.train.doctor import check_tensors
from tests.unit.mtp_engines import TREE, config_of
from tests.unit.tiny_mtp import write_tiny_nextn

pytestmark = pytest.mark.usefixtures("one_thread")


def in_four_bits(folder: Path, out: Path, form: str, group: int) -> Path:
    """`group`: weights per scale, of formats in which that is free."""
    sized = [] if form == "mxfp4" else ["--group-size", str(group)]
    assert cli.main(["quantize", str(folder), "--out", str(out), "--format", form, *sized]) == 0
    return out


@pytest.mark.parametrize("measured", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_head_in_four_bits_fits_a_target_in_four_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: bool
) -> None:
    target = in_four_bits(NANO, tmp_path / "target", "int4", 16)
    head = in_four_bits(NANO_HEAD, tmp_path / "head", "gptq", 16)
    aim = read_model(target)
    known = read_head(head, aim)
    assert known.decoder.quantized is not None and known.decoder.quantized != aim.quantized
    if not measured:
        assert check_tensors(known, aim) == []
        assert "nothing reads" not in capsys.readouterr().out
        return
    flags = ["--target", str(target), "--num-prompts", "1", "--max-answer", "16"]
    assert cli.main(["doctor", "head", str(head), *flags]) == 0
    said = capsys.readouterr().out
    assert f"it fits {target}" in said and said.endswith("all is well\n")


@pytest.mark.parametrize(
    ("form", "split"),
    [
        pytest.param("int4", False, id="int4"),
        pytest.param("gptq", True, id="gptq, split", marks=pytest.mark.slow),
        pytest.param("mxfp4", False, id="mxfp4", marks=pytest.mark.slow),
    ],
)
def test_mtp_layers_in_four_bits_change_no_token(tmp_path: Path, form: str, split: bool) -> None:
    model = in_four_bits(write_tiny_nextn(tmp_path / "plain", layers=4), tmp_path / "model", form, 32)
    config, asked = config_of(model, tmp_path), mixed_requests(3)
    expected = undrafted(config, asked)
    drafting = replace(config, speculation=TREE)
    cluster = Loopback(*(split_configs(drafting) if split else (drafting,)))
    assert run_all(cluster, asked, split=split) == expected
    entries = [entry for result in cluster.results.values() for entry in result.entries]
    assert any(entry.accepted for entry in entries), "nothing was ever accepted: drafting was not exercised"
    assert_idle(cluster)
    cluster.close()
