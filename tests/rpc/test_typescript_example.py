"""The TypeScript example of the public gRPC API, built and run against a gateway's gRPC front.

It needs `node` and the modules of examples/typescript: `npm install` there, or EYAS_NODE_MODULES names the
folder that has them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from scripted_backend import ScriptedBackend, nano_tokenizer
from tool_models import speaker

from tests.rpc.sdk_front import served
from tests.rpc.tool_requests import SAYS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "typescript"
MODULES = Path(os.environ.get("EYAS_NODE_MODULES") or EXAMPLE / "node_modules")
NODE = shutil.which("node")
BUILD_S, RUN_S = 60.0, 30.0

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="there is no node"),
    pytest.mark.skipif(
        not (MODULES / "@grpc" / "grpc-js").is_dir(),
        reason="the modules of examples/typescript are not installed",
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example as JavaScript. Its sources are copied: modules are looked for beside them."""
    folder = tmp_path_factory.mktemp("typescript")
    for name in ("chat.ts", "tsconfig.json"):
        shutil.copy(EXAMPLE / name, folder)
    (folder / "node_modules").symlink_to(MODULES)
    compiler = [NODE or "", str(MODULES / "typescript" / "bin" / "tsc"), "--project", str(folder)]
    done = subprocess.run(compiler, capture_output=True, text=True, timeout=BUILD_S)
    assert done.returncode == 0, done.stdout
    return folder / "dist" / "chat.js"


async def run(script: Path, *args: str) -> tuple[int, str, str]:
    """The example's exit code, and what it printed on both streams."""
    process = await asyncio.create_subprocess_exec(
        *(NODE or "", str(script), *args),
        cwd=EXAMPLE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(RUN_S):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_it_streams_a_chat(built: Path) -> None:
    async with served(ScriptedBackend(nano_tokenizer())) as address:
        code, out, err = await run(built, address, "Hi")
    assert code == 0 and "models: eyas-nano\n" in out and "Hello, world!\n" in out, (out, err)
    assert "is answered by eyas-nano" in err


async def test_it_reads_calls_of_tools(built: Path) -> None:
    async with served(speaker("hermes", SAYS["hermes"], 2)) as address:
        code, out, err = await run(built, address, "Wie ist das Wetter in Köln?", "tools")
    assert code == 0 and 'calls weather with {"city": "Köln"}\n' in out and "calls now with {}\n" in out, err


async def test_it_tells_what_a_server_refuses(built: Path) -> None:
    async with served(ScriptedBackend(nano_tokenizer())) as address:
        code, out, err = await run(built, address, "Hi", "tools")
    assert code == 1 and "invalid_request (tools): tools is not supported" in err
