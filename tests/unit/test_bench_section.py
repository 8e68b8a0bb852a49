"""A machine's section of the page: replaced where it stands, whole, and with a command for every table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from eyas.bench import section
from eyas.bench.section import (
    MachineSection,
    ResultPlot,
    ResultTable,
    RunEnvironment,
    grid,
    look_around,
    replaced,
    write_section,
)

HERE = RunEnvironment("A CPU (r), 2 cores", "24 GiB of memory", "abc1234", "2026-11-22", 0.4, 2)
ROW = {"case": "bs1", "drafts": True, "completed": 2, "failed": 0, "median_tpot_ms": 4.105}
TABLE = ResultTable("Plain", "eyas bench suite bs1", [ROW, {**ROW, "case": "bs8"}], ["Ready after 3 s."])
SECTION = MachineSection(HERE, "make bench", [TABLE], [ResultPlot("plots/a.svg", "chats")])


def test_a_section_says_where_when_and_how() -> None:
    text = replaced("# Benchmarks\n", SECTION)
    for words in ("A CPU (r), 2 cores", "abc1234", "2026-11-22", "`make bench`", "`eyas bench suite bs1`"):
        assert words in text
    assert "Load just before: 0.4" in text and "Ready after 3 s." in text
    assert "![chats](plots/a.svg)" in text
    assert "| bs8 | yes | 2 | 0 | 4.11 |" in text


def test_a_busy_machine_is_told() -> None:
    assert "Other work had the cores" not in replaced("", SECTION)
    busy = dataclasses.replace(SECTION, where=dataclasses.replace(HERE, load=1.1))
    assert "Other work had the cores" in replaced("", busy)


def test_writing_twice_is_writing_once(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n\nHow to.\n")
    write_section(page, SECTION)
    once = page.read_text()
    write_section(page, SECTION)
    assert page.read_text() == once
    assert once.startswith("# Benchmarks\n\nHow to.\n")


def test_a_later_section_replaces_its_own_and_no_other() -> None:
    other = dataclasses.replace(SECTION, where=dataclasses.replace(HERE, hardware="A GPU"))
    page = replaced(replaced(replaced("intro\n", SECTION), other) + "\nepilogue\n", SECTION)
    later = dataclasses.replace(SECTION, where=dataclasses.replace(HERE, commit=r"fedcba9 \1"))
    page = replaced(page, later)
    assert page.count("## A CPU") == 1 and page.count("## A GPU") == 1
    assert r"commit fedcba9 \1." in page and page.count("abc1234") == 1
    assert page.index("intro") < page.index("## A CPU") < page.index("## A GPU") < page.index("epilogue")


def test_a_missing_page_becomes_one(tmp_path: Path) -> None:
    write_section(tmp_path / "section.md", SECTION)
    assert (tmp_path / "section.md").read_text().startswith("# Benchmarks\n")


def test_columns_without_figures_are_left_out() -> None:
    head = grid([ROW]).splitlines()[0]
    assert head == "| case | drafts | requests | failed | TPOT p50, ms |"
    assert grid([{**ROW, "output_throughput": 5349.4}]).splitlines()[2].split(" | ")[4] == "5,349"


def test_here_has_a_name() -> None:
    here = look_around("cpu", 1, "1234567")
    assert here.commit == "1234567" and here.hardware.endswith("cores") and "Python 3" in here.details


def test_without_git_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(section, "_output", lambda *command: "")
    assert look_around("cpu", 1, None).commit == "unknown"


def test_gpus_are_counted_and_the_cpu_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"nvidia-smi": "NVIDIA H200, 143771\nNVIDIA H200, 143771"}
    monkeypatch.setattr(section, "_output", lambda *command: said.get(command[0], ""))
    here = look_around("cuda", 2, None)
    assert here.hardware == "NVIDIA H200, 140 GiB x 2" and "cores" in here.details
    assert look_around("cuda", 1, None).hardware == "NVIDIA H200, 140 GiB"
