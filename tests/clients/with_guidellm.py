"""guidellm: a small load over chats and over completions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from told import Server, tell


def load(server: Server, route: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        target = f"target={server.url.removesuffix('/v1')},model={server.model},api_key={server.key}"
        command = [str(Path(sys.executable).parent / "guidellm"), "run", "--profile", "kind=synchronous"]
        command += ["--backend", f"kind=openai_http,{target},request_format={route}"]
        command += ["--constraint", "kind=max_requests,count=3"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={server.folder}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=24,output_tokens=8"]
        command += ["--output", f"kind=json,path={out}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0 and out.exists(), (ended.stdout + ended.stderr)[-250:]
        totals = json.loads(out.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] >= 3 and not totals["errored"], totals


if __name__ == "__main__":
    tell(
        {
            "chat": lambda server: load(server, "/v1/chat/completions"),
            "completions": lambda server: load(server, "/v1/completions"),
        }
    )
