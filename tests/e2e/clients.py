"""Other people's clients against `eyas serve`: a table of clients and features, each passed or failed.

`python -m tests.e2e.clients --python VENV/bin/python` runs the scripts of tests/clients with that Python,
which has the clients: openai, anthropic, litellm, langchain, langchain-openai, langchain-anthropic,
openai-agents, pydantic-ai-slim[openai,anthropic], llm, lm-eval[api], guidellm. It installs nothing. The model
is the embedded one with a chat template that has tools; loops of agents run over a scripted one too, which
thinks. The exit code is 1 if anything failed. `--only WORD` chooses scripts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from eyas.common.config import NANO, NANO_HEAD
from eyas.common.security import api_keys
from tests.chat_templates import TEMPLATES
from tests.e2e.reasoner import reasoning
from tests.e2e.served import Folders, serving

SCRIPTS = Path(__file__).resolve().parents[1] / "clients"
KEY, POOR = "a-key", "a-poor-key"
CLIENT_S = 600.0
FLAGS = ("--served-model=eyas-nano", "--reasoning-parser=none")  # answers too short to reason first


@dataclass(frozen=True)
class Told:
    """One feature of one client; `wrong` is empty if it passed."""

    client: str
    feature: str
    wrong: str


def make_model(parent: Path) -> Path:
    """The embedded model in a folder of its own, with a template that has tools."""
    folder = parent / "eyas-nano"
    shutil.copytree(NANO, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATES["hermes"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_limits(parent: Path) -> Path:
    """A file that lets the poor key ask once per minute."""
    name = hashlib.sha256(POOR.encode()).hexdigest()[:12]
    path = parent / "limits.toml"
    path.write_text(f'[keys."{name}"]\nrequests_per_minute = 1\n')
    return path


def run(python: str, script: Path, url: str, folder: Path | None, console: Console) -> list[Told]:
    """What a client's script tells; its other output goes to the console if anything failed."""
    command = [python, str(script), f"{url}/v1", KEY, POOR, "eyas-nano", str(folder or "")]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_S)
    except subprocess.TimeoutExpired:
        return [Told(script.stem, "all", f"no end within {CLIENT_S:g} s")]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"feature"')]
    client = script.stem.removeprefix("with_") if folder else f"{script.stem}, thinking"
    told = [Told(client, line["feature"], line["wrong"]) for line in lines]
    if not told or ended.returncode:
        told.append(Told(script.stem, "its script", ended.stderr.strip()[-300:] or "told nothing"))
    for one in told:
        if one.wrong:
            console.print(f"{one.client}, {one.feature}: {one.wrong}", markup=False, highlight=False)
    return told


def report(told: list[Told]) -> Table:
    clients = list(dict.fromkeys(one.client for one in told))
    features = list(dict.fromkeys(one.feature for one in told))
    found = {(one.feature, one.client): "failed" if one.wrong else "passed" for one in told}
    table = Table("feature", *clients)
    for feature in features:
        table.add_row(feature, *(found.get((feature, client), "") for client in clients))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.clients", description=__doc__)
    parser.add_argument("--python", required=True, help="that has the clients")
    parser.add_argument("--only", default="", metavar="WORD", help="clients whose names hold this word")
    given = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    os.environ[api_keys.VARIABLE] = f"{KEY}\n{POOR}"
    paths = sorted([*SCRIPTS.glob("with_*.py"), *SCRIPTS.glob("loop_*.py")])
    scripts = [path for path in paths if given.only in path.stem]
    told: list[Told] = []
    with tempfile.TemporaryDirectory() as parent:
        folder, limits = make_model(Path(parent)), make_limits(Path(parent))
        folders = Folders(str(folder), str(NANO_HEAD))
        with serving(folders, f"--key-limits={limits}", *FLAGS) as served:
            for script in scripts:
                told += run(given.python, script, served.url, folder, console)
        with reasoning(KEY) as url:
            for script in scripts:
                if script.stem.startswith("loop_"):
                    told += run(given.python, script, url, None, console)
    console.print(report(told))
    return int(any(one.wrong for one in told))


if __name__ == "__main__":
    sys.exit(main())
