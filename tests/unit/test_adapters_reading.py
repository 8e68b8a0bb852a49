"""Adapters that a process beside the engine reads: they are what the engine itself would have read, to the
bit, and what is wrong with one is named as there.
"""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from adapter_rig import write_adapter
from tiny import write_tiny_llama

from eyas.common.errors import ConfigError, EyasError, InvalidRequest, NotFound, Overloaded
from eyas.engine.adapters import reading_process
from eyas.engine.adapters.reader import AdapterReader
from eyas.engine.adapters.reading_process import ReadingProcess
from eyas.engine.adapters.sites import AdapterSite, AdapterSites, PackedAdapter, SitePart
from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.models.table import read_model

STEM = "model.layers.{}.self_attn.{}_proj.weight"


def _same(one: PackedAdapter, other: PackedAdapter) -> bool:
    pairs = [(one.numbers, other.numbers), (one.places, other.places)]
    pairs += [(one.lower[name], other.lower[name]) for name in one.lower]
    return one.id == other.id and all(torch.equal(*pair) for pair in pairs)


def test_a_process_reads_what_the_engine_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_llama(tmp_path / "model", tied=False, layers=2, hidden=64)
    config = read_model(model)
    placement, gain = WeightPlacement(dtype=torch.float32), torch.rand(64, generator=torch.manual_seed(3))
    sites = []
    for layer in range(2):
        query = SitePart(STEM.format(layer, "q"), (64, 64), 0)
        order = torch.arange(64).flip(0)
        sites.append(AdapterSite((query,), placement, order=order, gain=gain + layer))
        sites.append(AdapterSite((SitePart(STEM.format(layer, "o"), (64, 64), 1),), placement))
    reader, here = AdapterReader(config, 16), AdapterSites(sites)
    adapters = [
        write_adapter(tmp_path / f"a{seed}", model, seed=seed, rank=8, modules=("q_proj", "o_proj"))
        for seed in range(2)
    ]
    process = ReadingProcess(reader, here)
    read = [process.read(folder) for folder in adapters]
    own = [here.packed(reader.read(folder, here.check), folder) for folder in adapters]
    assert all(map(_same, read, own)) and not _same(read[0], own[1])
    here.sites[0].gain.mul_(2.0)  # type: ignore[union-attr]
    assert not _same(process.read(adapters[0]), own[0])
    assert _same(process.read(adapters[0]), here.packed(reader.read(adapters[0], here.check), adapters[0]))
    here.renew(read[0])
    assert _same(read[0], process.read(adapters[0]))

    with pytest.raises(NotFound, match="has no adapter_config.json"):
        process.read(tmp_path)
    other = write_adapter(tmp_path / "other", model, modules=("v_proj",))
    with pytest.raises(InvalidRequest, match="v_proj is no linear module") as refused:
        process.read(other)
    assert refused.value.param == "lora_path"

    for error, kind, said in (
        (ConfigError("no room for it"), ConfigError, "no room for it"),
        (OSError(12, "none"), Overloaded, "no memory"),
        (ValueError("no size"), EyasError, "ValueError: no size"),
    ):
        with pytest.raises(kind, match=said):
            process.read(adapters[0], Mock(side_effect=error))
    as_before = here.packed(reader.read(adapters[0], here.check), adapters[0])
    assert _same(process.read(adapters[0]), as_before)
    mapped = Path(f"/proc/{process._process.pid}/maps").read_text().count("memfd:eyas-weights")
    assert mapped == 1  # of the file, into which the next one is read: the engine has what was packed

    for number in (signal.SIGKILL, signal.SIGSTOP):
        os.kill(process._process.pid, number)
        monkeypatch.setattr(reading_process, "READ_S", 0.3)
        with pytest.raises(EyasError, match="the process that reads adapters was lost"):
            process.read(adapters[1])
        monkeypatch.undo()
        assert _same(process.read(adapters[0]), as_before)


def test_a_process_is_sent_each_gain_once() -> None:
    """Parts of one tensor would each be sent with all of it: 67 MB of an 8B, at the first load."""
    parts = [SitePart(STEM.format(layer, "q"), (4, 1024), 0) for layer in range(32)]
    sites = AdapterSites([AdapterSite((part,), WeightPlacement(), gain=torch.ones(1024)) for part in parts])
    assert len(pickle.dumps(sites.on_host())) < 2 * 32 * 1024 * torch.float32.itemsize
