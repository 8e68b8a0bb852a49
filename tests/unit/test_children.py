"""Processes that Eyas starts take no module from the folder that they are started in."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from planted import plant

import eyas
from eyas.common.config import NANO
from eyas.common.grammars.notations import Grammar
from eyas.common.machine.processes import importing_safely, python_module
from gateway.grammars.checks import GrammarChecks
from gateway.text.rendering import QUICK_STEPS, TemplateRenderer
from gateway.text.templates import ChatTemplate

ROOT = Path(eyas.__file__).parents[1]
PACKAGES = ("eyas", "gateway", "prefill_svc", "decode_svc", "draft_svc", "kv_transfer")


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return plant(tmp_path)


def test_the_planted_modules_would_be_imported(mark: Path) -> None:
    subprocess.run([sys.executable, "-m", "gateway.grammars.child"], capture_output=True, timeout=100)
    assert mark.exists()


def test_modules_are_run_safely(mark: Path) -> None:
    done = subprocess.run(python_module("eyas.cli", "--version"), capture_output=True, timeout=100)
    assert (done.returncode, mark.exists()) == (0, False)


async def test_grammars_are_checked_safely(mark: Path) -> None:
    checks = GrammarChecks(NANO)
    try:
        await checks.check(Grammar.regex("a+"))
    finally:
        await checks.aclose()
    assert not mark.exists()


async def test_chats_are_rendered_safely(mark: Path) -> None:
    template = ChatTemplate(
        {"default": "{% for i in range(" + str(2 * QUICK_STEPS) + ") %}{% endfor %}x"}, {}
    )
    assert await TemplateRenderer(template, 100.0).render(messages=[{"role": "user", "content": "x"}]) == "x"
    assert not mark.exists()


@pytest.mark.parametrize("safely", [True, False])
def test_multiprocessing_imports_safely(mark: Path, safely: bool) -> None:
    process = multiprocessing.get_context("spawn").Process(target=abs, args=(1,))
    with importing_safely() if safely else contextlib.nullcontext():
        process.start()
    process.join(100)
    assert mark.exists() is not safely
    assert "PYTHONSAFEPATH" not in os.environ


def test_the_command_starts_everything_safely(mark: Path, tmp_path: Path) -> None:
    """What libraries start too: the command's environment says so."""
    script = tmp_path / "bin" / "eyas"
    script.parent.mkdir()
    code = "import os, sys\nfrom eyas.cli import main\nmain()\nprint(os.environ['PYTHONSAFEPATH'])\n"
    script.write_text(code)
    command = [sys.executable, str(script), "keys", "list", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["1"], done.stderr


def test_all_processes_are_started_so() -> None:
    """Python's name stands in one file, beside the one that isolates its child altogether."""
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    named = {path for path, code in sources.items() if "sys.executable" in code}
    assert named == {"eyas/common/machine/processes.py", "eyas/evals/humaneval.py"}
    assert '"-I"' in sources["eyas/evals/humaneval.py"]
    spawning = [code for code in sources.values() if 'get_context("spawn")' in code]
    assert len(spawning) >= 3
    assert all("with importing_safely():" in code for code in spawning)
