"""What cannot fit is told before any process starts, in GiB: weights, KV pages, host caches, contexts."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny_llama

from eyas import cli
from eyas.cluster import checks, serve
from eyas.cluster.checks import check_room
from eyas.common.config import GPU_DEFAULTS, NANO, EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.machine.memory import GIB, MemoryBudget
from eyas.common.types import Role
from eyas.engine.checkpoint.sizes import page_bytes, parameters, weight_bytes
from eyas.engine.models.table import read_model
from tests.unit.tiny_mtp import write_tiny_mimo

BIG = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
BIG |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False}
PARAMETERS = 70.6e9


def write_big(folder: Path, dtype: str = "BF16", **changes: Any) -> Path:
    """The files of Llama 3 70B, of which the disk has the headers alone."""
    folder.mkdir()
    config = (
        json.loads((NANO / "config.json").read_text()) | BIG | {"max_position_embeddings": 131072} | changes
    )
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((NANO / name).read_bytes())
    hidden, ffn, kv = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"] * 128
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    tensors = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(config["num_hidden_layers"] + 1)  # the last one is a draft head's
        for name, shape in shapes.items()
    }
    tensors |= {
        name: (config["vocab_size"], hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    entries, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + math.prod(shape) * (4 if dtype == "F32" else 2)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
    return folder


def memory(gib: float) -> MemoryBudget:
    return MemoryBudget(int(2 * gib * GIB), int(gib * GIB), "container")


def cpu(model: Path, **changes: Any) -> dict[str, EngineConfig]:
    """A prefill, a decode and a draft worker."""
    engine = EngineConfig(model=str(model), draft=None, **changes)
    return {role: replace(engine, roles=(role,)) for role in Role}


def gpu(model: Path, **changes: Any) -> dict[str, EngineConfig]:
    return {"worker-0": replace(GPU_DEFAULTS, model=str(model), draft=None, device="cuda:0", **changes)}


# --- how much it is --------------------------------------------------------------------------------------


def test_the_headers_say_how_large_the_weights_are(tmp_path: Path) -> None:
    """Without a layer that no decoder reads; as the configuration says, but for the vectors."""
    folder = write_big(tmp_path / "big")
    stored = weight_bytes(read_model(folder), "float32", "cpu")
    assert stored.total == pytest.approx(4 * PARAMETERS, rel=0.01) and stored.as_stored == 0
    assert stored.total == 4 * parameters(read_model(folder)).total
    halved = weight_bytes(read_model(folder), "bfloat16", "cpu")
    assert halved.total == halved.as_stored == stored.total // 2
    assert page_bytes(read_model(folder), 16, "bfloat16", ranks=2) == 16 * 80 * 2 * 4 * 128 * 2


def test_a_small_model_is_counted_to_the_byte(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "tiny")
    whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0.9 * whole < weight_bytes(read_model(folder), "float32", "cpu").total <= whole


def test_a_head_in_the_models_folder_does_not_count(tmp_path: Path) -> None:
    folder = write_tiny_mimo(tmp_path)
    model = read_model(folder)
    vectors = sum(2 * model.hidden_size + layer.attention.head_dim * 8 for layer in model.layers)
    counted = weight_bytes(model, "float32", "cpu").total // 4
    assert parameters(model).total < counted <= parameters(model).total + 2 * vectors


# --- in a machine's memory -------------------------------------------------------------------------------


BOTH = "in each of 2 workers"
ON_CPU = [
    (
        500,
        {},
        "model",
        f"the float32 weights of big take 262.8 GiB {BOTH}, and the container has 500.0 GiB avail",
    ),
    (500, {}, "model", r"take a smaller model, or fewer workers \(--layout unified\)"),
    (540, {}, "num-pages", rf"2048 KV pages take 20.0 GiB {BOTH}, .* ask for at most 7\d\d"),
    (
        700,
        {"num_pages": 9000},
        "num-pages",
        rf"9000 KV pages take 87.9 GiB {BOTH}, .* ask for at most 89\d\d",
    ),
    (600, {"host_cache_gb": 30.0}, "host-cache-gb", "60.0 GiB asked for, .*: ask for at most 17.2"),
    (
        900,
        {"context_length": 40000},
        "context-length",
        "40000 tokens take 2500 KV pages, 24.4 GiB, and 2048 ",
    ),
]


@pytest.mark.parametrize(("gib", "changes", "flag", "says"), ON_CPU)
def test_workers_take_a_machines_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, changes: dict[str, Any], flag: str, says: str
) -> None:
    disk(monkeypatch, 9000)
    engines = cpu(write_big(tmp_path / "big"), **changes)
    with pytest.raises(ConfigError, match=f"--{flag}: .*{says}") as refused:
        check_room(engines, (), memory(gib))
    assert refused.value.param == flag and "\n" not in refused.value.message
    check_room(engines | {"prefill": engines["draft"], "decode": engines["draft"]}, (), memory(1))
    if flag != "context-length":
        check_room(engines, (), memory(900))
        check_room(engines, (), None)


def disk(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    free = namedtuple("free", "free")(int(gib * GIB))
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: free)


def test_pools_need_room_in_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, 1)
    says = (
        "--num-pages: 2048 KV pages take 20.0 GiB in each of 2 workers, and /dev/shm has 1.0 GiB free: ask "
    )
    with pytest.raises(ConfigError, match=f"{says}for at most 51"):
        check_room(cpu(write_big(tmp_path / "big")), (), memory(900))
    check_room(cpu(NANO), (), memory(1))


def test_files_that_are_used_as_they_are_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk(monkeypatch, 900)
    check_room(cpu(write_big(tmp_path / "big", "F32")), (), memory(310))
    with pytest.raises(ConfigError, match="--model: the float32 weights of big take 262.8 GiB"):
        check_room(cpu(tmp_path / "big"), (), memory(250))


# --- on GPUs ---------------------------------------------------------------------------------------------


PAIR: dict[str, Any] = {"tensor_parallel_size": 2}
ON_GPUS = [
    (
        141,
        {},
        "model",
        r"the bfloat16 weights of big take 131.4 GiB, more than 0.88 of the 141.0 GiB of GPU 0",
    ),
    (141, {}, "model", r"\(--mem-fraction-static\): share it among more GPUs \(--tp\)"),
    (79, PAIR | {"mem_fraction_static": 0.8}, "model", "take 65.7 GiB on each of 2 GPUs"),
    (
        79,
        PAIR,
        "context-length",
        "KV pages of a request of 131072 tokens take 20.0 GiB on each of 2 GPUs, and ",
    ),
    (79, PAIR, "context-length", r"ask for at most 2\d\d\d\d"),
    (160, {"num_pages": 5000}, "num-pages", r"5000 KV pages take 24.4 GiB, .*; ask for at most 1\d\d\d"),
]


@pytest.mark.parametrize(("gib", "changes", "flag", "says"), ON_GPUS)
def test_workers_take_a_gpus_memory(
    tmp_path: Path, gib: int, changes: dict[str, Any], flag: str, says: str
) -> None:
    engines = gpu(write_big(tmp_path / "big"), **changes)
    with pytest.raises(ConfigError, match=f"--{flag}: .*{says}") as refused:
        check_room(engines, (gib * GIB,) * 2, None)
    assert refused.value.param == flag
    for known in ((200 * GIB,) * 2, (None, None), ()):
        check_room(engines, known, memory(1))


def test_attention_ranks_share_experts_alone(tmp_path: Path) -> None:
    changes = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 64, "num_experts_per_tok": 8}
    changes |= {"moe_intermediate_size": 1024, "decoder_sparse_step": 1, "mlp_only_layers": []}
    folder = write_big(tmp_path / "big", **changes)
    engines = gpu(folder, load_format="dummy", dp_attention=4)
    found = parameters(read_model(folder, "dummy"))
    assert found.experts == 80 * 64 * 3 * 8192 * 1024
    with pytest.raises(ConfigError, match="--model: .* take 86.5 GiB on each of 4 GPUs"):
        check_room(engines, (80 * GIB,) * 4, None)


# --- before anything starts ------------------------------------------------------------------------------


def test_it_ends_a_command_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "memory", lambda: memory(100))
    monkeypatch.setattr(serve.LocalCluster, "__aenter__", None)  # nothing is to be started
    folder = str(write_big(tmp_path / "big"))
    assert cli.main(["serve", "--port", "0", "--grpc-port", "0", "--model", folder]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert told.startswith("eyas: --model: the float32 weights of big take 262.8 GiB in each of 2 workers")


def test_a_worker_alone_looks_before_torch_comes(tmp_path: Path) -> None:
    """Of a size that no machine has."""
    folder = str(write_big(tmp_path / "big", num_hidden_layers=8, intermediate_size=16_000_000))
    code = f"""if True:
        import sys
        from eyas import cli
        ended = cli.main(["worker", "--model", {folder!r}])
        print(ended, "torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "2 False\n", done.stderr
    assert "eyas: --model: the float32 weights of big take " in done.stderr
