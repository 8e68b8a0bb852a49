"""The committed stubs are what the committed .proto files generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_stubs_are_fresh(tmp_path: Path) -> None:
    protos = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto"))
    assert protos
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *protos]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    generated = {path.name: path.read_text() for path in (tmp_path / "protos").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "protos").glob("*_pb2*")}
    assert committed.keys() == generated.keys()
    stale = [name for name in generated if generated[name] != committed[name]]
    assert not stale, f"run `make protos`: {stale}"
