"""The table of servers that were measured one after the other: a column for each, whatever they answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.bench.section import RunEnvironment
from tools.bench import peers
from tools.bench.peers import PEERS, PeerRun, table

WHERE = RunEnvironment("a card", "details", "abc123", "2026-11-30", 0.0, 2)
ROW = {
    "case": "bs1",
    "failed": 0,
    "median_tpot_ms": 4.1,
    "p99_tpot_ms": 4.5,
    "median_ttft_ms": 14.0,
    "p99_ttft_ms": 15.0,
    "output_throughput": 1234.5,
}


def test_each_server_has_a_column_with_its_version() -> None:
    other = ROW | {"failed": 2, "median_tpot_ms": None, "p99_tpot_ms": None}
    lines = table([PeerRun("eyas", "0.1", 12.3, [ROW]), PeerRun("vllm", "0.33.0", 180.0, [other])], WHERE)
    assert lines[0] == "a card, 2026-11-30, Eyas at commit abc123: eyas 0.1, vllm 0.33.0."
    assert "| bs1 | TPOT p50, p99 | 4.10, 4.50 ms | -, - ms (2 failed) |" in lines
    assert "| bs1 | output tokens per second | 1,234.50 | 1,234.50 (2 failed) |" in lines
    assert lines[-1] == "| start | with the caches that were there | 12.3 s | 180.0 s |"


def test_model_and_port_are_put_into_each_command() -> None:
    for name, peer in PEERS.items():
        command = peer.command(name, Path("/m"), 8123, ("--more",))
        assert "/m" in command and "8123" in command and command[-1] == "--more"
        assert not {"MODEL", "PORT"} & set(command)


def test_a_server_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    assert peers.main(["--servers", "vllm", "sglang", "--shape", "tiny", "bs1"]) == 1
    said = capsys.readouterr().err
    assert all(f"{name}: {tmp_path / name}/bin/python is not there" in said for name in ("vllm", "sglang"))
