"""The console's scripts run by Node, over a toy document where they draw."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(str(files("gateway") / "static" / "console"))
needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="needs Node to run the console's scripts"
)


def run(program: str, given: Any = None) -> Any:
    """What `program`, the body of an async function of `given`, returns; `use("chart.js")` imports."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        Path(folder, "package.json").write_text('{"type": "module"}')
        main = Path(folder, "program.js")
        main.write_text(
            f"const use = (name) => import(`./${{name}}`);\nconst given = {json.dumps(given)};\n"
            f"const program = async () => {{ {program} }};\n"
            "program().then((found) => console.log(JSON.stringify(found)));"
        )
        done = subprocess.run(["node", str(main)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
