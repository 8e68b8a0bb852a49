"""Starts of a model in four bits from files on a local disk: what takes how long?

    python -m tests.gpu.time_start --out FILE [--shape llama-3.1-8b] [--folder DIR] [--seconds 120]

Writes Llama's shape as compressed-tensors packs it (pack-quantized, groups of 128), with numbers that mean
nothing, and then: `eyas serve`, when it may have to compile kernels, again, and with the files out of the
page cache: the seconds to healthy, to the first answer, and the phases of the engine; between these what a
process takes to load the weights, and the functions that take it; and what Python takes to import the engine.
What begins when the time is over is left out. A line of JSON is in FILE as soon as it is known.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from eyas.bench.shapes import SHAPES, ModelShape, write_model
from eyas.common.cluster.listening import free_ports
from eyas.common.config import resolve_engine
from eyas.engine.checkpoint.folder import weight_files
from eyas.quantize.formats import IntegerFormat
from eyas.quantize.tensor_file import TensorFile
from tests.gpu.report import Report

LAYERS_OF_A_FILE = 8
READY = re.compile(r"ready in ([\d.]+) s: (.*)")
POLL_S, GRACE_S = 0.05, 15.0
WRITES_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
Tensor = tuple[str, torch.Tensor]
MatrixParts = Callable[[tuple[int, int]], Iterable[Tensor]]


def write_packed_model(shape: ModelShape, folder: Path) -> None:
    """The folder of a model in four bits. Matrices of one size have the same numbers in every layer."""
    write_model(shape, folder)
    config, form = json.loads((folder / "config.json").read_text()), IntegerFormat(4, _group(shape))
    packed = {"quantization_config": form.described(["lm_head"])}
    (folder / "config.json").write_text(json.dumps(config | packed))
    ends = [("model.embed_tokens.weight", wide(shape)), ("model.norm.weight", ones(shape))]
    ends.append(("lm_head.weight", ends[0][1]))
    matrices = {size: _matrix(*size, form.group) for size in dict.fromkeys(sizes_of(shape).values())}
    write_layers(shape, folder, ends, lambda size: matrices[size].items())


def write_layers(shape: ModelShape, folder: Path, ends: list[Tensor], parts: MatrixParts) -> None:
    """The files of a model. `ends`: what is in no layer. `parts`: what a matrix [n, k] is stored as."""
    _write(folder / "model-ends.safetensors", ends)
    for first in range(0, shape.layers, LAYERS_OF_A_FILE):
        some = range(first, min(first + LAYERS_OF_A_FILE, shape.layers))
        layers = [tensor for layer in some for tensor in _layer(shape, layer, parts)]
        _write(folder / f"model-{first:03}.safetensors", layers)
    os.sync()


def sizes_of(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """[n, k] of a layer's matrices."""
    heads, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = {"q_proj": (heads, shape.hidden), "k_proj": (kv, shape.hidden), "v_proj": (kv, shape.hidden)}
    ends = {"o_proj": (shape.hidden, heads), "down_proj": (shape.hidden, shape.intermediate)}
    gates = dict.fromkeys(("gate_proj", "up_proj"), (shape.intermediate, shape.hidden))
    return attention | ends | gates


def _layer(shape: ModelShape, layer: int, parts: MatrixParts) -> Iterator[Tensor]:
    for name, size in sizes_of(shape).items():
        part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        for end, tensor in parts(size):
            yield f"model.layers.{layer}.{part}.{name}.{end}", tensor
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"model.layers.{layer}.{name}.weight", ones(shape)


def _group(shape: ModelShape) -> int:
    return min(128, shape.head_dim)


def _matrix(n: int, k: int, group: int) -> dict[str, torch.Tensor]:
    """Even numbers, as wide as random weights of such rows."""
    words = torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32)
    scales = torch.full((n, k // group), k**-0.5 / 4, dtype=torch.bfloat16)
    return {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor([n, k])}


def wide(shape: ModelShape) -> torch.Tensor:
    return (
        torch.randn(min(shape.vocab, 4096), shape.hidden)
        .bfloat16()
        .repeat(-(-shape.vocab // 4096), 1)[: shape.vocab]
    )


def ones(shape: ModelShape) -> torch.Tensor:
    return torch.ones(shape.hidden, dtype=torch.bfloat16)


def _write(path: Path, tensors: list[Tensor]) -> None:
    with TensorFile(path, [name for name, _ in tensors]) as file:
        for name, tensor in tensors:
            file.add(name, tensor)


def let_go(folder: Path) -> None:
    """Asks the system to keep nothing of the files in memory."""
    for path in weight_files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def environment() -> dict[str, str]:
    """That of processes which compile a module once: they find it compiled at later starts."""
    return {name: value for name, value in os.environ.items() if name != WRITES_NO_BYTECODE}


def imports() -> dict[str, Any]:
    """Seconds until the engine is imported, and by package those within its modules; a second process's."""
    command = [sys.executable, "-X", "importtime", "-c", "import torch, eyas.engine.loading.build"]
    for _ in range(2):
        began = time.monotonic()
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=100, env=environment()
        )
        seconds = time.monotonic() - began
    packages: dict[str, float] = defaultdict(float)
    for line in done.stderr.splitlines():
        if (match := re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)", line)) is not None:
            packages[match[2].split(".")[0]] += int(match[1]) / 1e6
    most = sorted(packages.items(), key=lambda each: -each[1])[:6]
    return {"s": round(seconds, 2), "within": {name: round(each, 2) for name, each in most}}


def load(folder: Path, device: str) -> None:
    """Loads the weights, in this process, as an engine does; prints a line of JSON."""
    from eyas.engine.loading.device_build import build_state
    from eyas.engine.loading.spec import EngineSpec
    from eyas.engine.loading.startup import StartPhases
    from eyas.engine.parallel.group import ProcessGroup
    from eyas.engine.parallel.ranks import RankInfo

    config = replace(
        resolve_engine(device, model=str(folder), num_pages=64, draft=None), attention_backend="triton"
    )
    loaded = EngineSpec.of(config, epoch=1)
    torch.zeros(1, device=device)
    profile, began = cProfile.Profile(), time.monotonic()
    profile.runcall(build_state, loaded, ProcessGroup(RankInfo(), device), StartPhases())
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.monotonic() - began
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = sorted(((row[2], place, row[0]) for place, row in stats.items()), reverse=True)[:14]
    found = [f"{own_s:.2f} s, {calls} calls: {Path(at[0]).name} {at[2]}" for own_s, at, calls in own]
    print(json.dumps({"s": round(seconds, 2), "functions": found}))


READING = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
began, files = time.monotonic(), sorted(Path(sys.argv[1]).glob("*.safetensors"))
def ahead(number, piece=8 << 20):
    read = bytearray(piece)
    for path in files:
        with path.open("rb") as file:
            for first in range(number * piece, path.stat().st_size, 2 * piece):
                os.preadv(file.fileno(), [read], first)
if sys.argv[2] == "ahead":
    for number in range(2):
        Thread(target=ahead, args=(number,), daemon=True).start()
import torch, eyas.engine.loading.build
imported = time.monotonic()
from safetensors import safe_open
def read(path):
    with safe_open(path, framework="pt") as file:
        for name in file.keys():
            torch.empty_like(tensor := file.get_slice(name)[...]).copy_(tensor)
with ThreadPoolExecutor(4) as readers:
    list(readers.map(read, files))
print(round(imported - began, 2), round(time.monotonic() - imported, 2))
"""
"""Imports the engine, then reads a folder, of which threads have read some meanwhile; says both's seconds."""


def reading(folder: Path) -> dict[str, Any]:
    """What threads that read ahead spare a process that imports the engine and then reads files."""
    found = {}
    for how in ("plain", "ahead"):
        let_go(folder)
        command = [sys.executable, "-c", READING, str(folder), how]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        found[how] = f"{done.stdout.strip()} s"
    return found


def loading(folder: Path, device: str) -> dict[str, Any]:
    """`load` in a process of its own: files are in memory."""
    command = [sys.executable, "-m", "tests.gpu.time_start", "--load", str(folder), "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    if done.returncode:
        return {"ok": False, "error": done.stderr[-600:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@dataclass(frozen=True)
class Server:
    """`eyas serve` of a folder."""

    folder: Path
    device: str
    flags: tuple[str, ...]

    def start(self, seconds: float) -> dict[str, Any]:
        """Starts it, asks it for a token, and ends it."""
        ports = free_ports()
        port, grpc = next(ports), next(ports)
        command = [sys.executable, "-m", "eyas.cli", "serve", "--model", str(self.folder), *self.flags]
        command += ["--device", self.device, "--layout", "unified", "--port", str(port)]
        command += ["--grpc-port", str(grpc)]
        with tempfile.TemporaryFile("w+") as log:
            began = time.monotonic()
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=environment()
            )
            try:
                found = self._seen(process, f"http://127.0.0.1:{port}", began, seconds)
            finally:
                _end(process)
            log.seek(0)
            text = log.read()
        if (match := READY.search(text)) is not None:
            found |= {"engine": float(match[1]), "phases": match[2]}
        return found if found["ok"] else found | {"log": text[-800:]}

    def _seen(self, process: subprocess.Popen[Any], url: str, began: float, most: float) -> dict[str, Any]:
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            while time.monotonic() - began < most and process.poll() is None:
                try:
                    if client.get("/health", timeout=2).status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(POLL_S)
            else:
                return {"ok": False, "ended": process.poll()}
            healthy = time.monotonic() - began
            body = {"model": self.folder.name, "prompt": "a", "max_tokens": 1, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            asked = time.monotonic() - began
        return {"ok": answer.status_code == 200, "healthy": round(healthy, 2), "answer": round(asked, 2)}


def _end(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    """The command line; 1 if a start failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.time_start", description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--folder", type=Path, help="where the model is written, or is already")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--load", type=Path, metavar="DIR", help="only loads the weights, in this process")
    parser.add_argument("--flags", default="", help="more flags of eyas serve, in one word")
    args = parser.parse_args()
    if args.load:
        load(args.load, args.device)
        return 0
    report = Report(args.out, args.seconds)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "model"
        report.run("written", lambda: _written(SHAPES[args.shape], folder))
        server = Server(folder, args.device, tuple(args.flags.split()))
        report.run("start, kernels may be compiled", lambda: server.start(report.left))
        report.run("start, again", lambda: server.start(report.left))
        report.run("weights", lambda: loading(folder, args.device))
        report.run("imports", imports)
        report.run("imports, then files from a disk", lambda: reading(folder))
        let_go(folder)
        report.run("start, files out of the cache", lambda: server.start(report.left))
    return int(report.failed > 0)


def _written(shape: ModelShape, folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    if not folder.exists():
        write_packed_model(shape, folder)
    size = sum(path.stat().st_size for path in weight_files(folder))
    return {"GB": round(size / 1e9, 3), "s": round(time.monotonic() - began, 2)}


if __name__ == "__main__":
    sys.exit(main())
