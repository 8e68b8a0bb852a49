"""A whole cluster as a user starts it: what answers, what comes back, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eyas import cli
from eyas.client import Client
from tests.e2e.served import Folders, Served, gone, make_folders, serving, wait_until
from tests.unit.eval_files import write_problems
from tests.unit.planted import plant

ROOT = Path(__file__).resolve().parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def split(folders: Folders) -> Iterator[Served]:
    """One split cluster for the tests that only ask, and for the one that ends it."""
    with serving(folders, "--layout", "split", "--drain-s", "1") as served:
        yield served


# --- what answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["openai_sdk.py", "grpc_sdk.py"])
def test_the_examples_run_as_written(split: Served, name: str, tmp_path: Path) -> None:
    code = (ROOT / "examples" / name).read_text()
    here = code.replace("127.0.0.1:8000", f"127.0.0.1:{split.port}")
    here = here.replace("127.0.0.1:8001", f"127.0.0.1:{split.grpc_port}")
    assert here != code
    (tmp_path / name).write_text(here)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, tmp_path / name], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_curl_gets_a_stream_that_ends(split: Served) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 8, "stream": True}
    command = ["curl", "-sN", f"{split.url}/v1/chat/completions", "-d", json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    events = [line for line in done.stdout.splitlines() if line]
    assert len(events) > 2 and all(line.startswith("data: ") for line in events)
    assert events[-1] == "data: [DONE]"


def test_both_fronts_give_the_same_answer(split: Served) -> None:
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 24, "temperature": 0.8, "seed": 11}
    http = httpx.post(f"{split.url}/v1/chat/completions", json=body, timeout=30, trust_env=False).json()
    with Client(f"127.0.0.1:{split.grpc_port}") as client:
        grpc = client.chat(QUESTION, max_tokens=24, temperature=0.8, seed=11)
    assert http["choices"][0]["message"]["content"] == grpc.text
    assert http["usage"]["completion_tokens"] == grpc.usage.completion_tokens
    prefill, decode = sorted(grpc.timings.workers, key=lambda worker: worker.role == "decode")
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert prefill.prefill_ms and decode.prefill_ms is None and prefill.transfer_path is None
    assert grpc.request_id and grpc.timings.first_token_ms < grpc.timings.total_ms


def test_drafts_change_no_answer_of_an_evaluation(split: Served, tmp_path: Path) -> None:
    """The drafts of a tiny model may all come too late, so nothing is asserted of them."""
    out, data = tmp_path / "out.jsonl", write_problems(tmp_path / "test.jsonl")
    flags = ("--against", "no-speculative", "--require-identical", "--output-file", str(out))
    asked = ("--data", data, "--shots", "2", "--max-tokens", "16", "--url", split.url)
    assert cli.main(["eval", "gsm8k", *asked, *flags]) == 0
    drafted, plain = (json.loads(line) for line in out.read_text().splitlines())
    assert plain["accept_rate"] is None
    assert plain["against_first"]["identical"] == drafted["completed"] == plain["completed"] == 2


def test_bad_input_is_reported_by_field(split: Served) -> None:
    body = {"model": "tiny", "messages": QUESTION, "temperature": 9}
    reply = httpx.post(f"{split.url}/v1/chat/completions", json=body, timeout=30, trust_env=False)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temperature"


def test_bench_measures_a_running_server(split: Served, tmp_path: Path) -> None:
    """The drafts of a tiny model may all come too late: then both sides tell of none."""
    out = tmp_path / "figures.jsonl"
    few = ["--num-prompts=4", "--random-input-len=16", "--random-output-len=12", "--random-range-ratio=1"]
    command = ["bench", "serve", "--url", split.url, *few, "--max-concurrency=2", f"--output-file={out}"]
    assert cli.main(command) == 0
    assert cli.main([*command, "--backend=sglang", '--extra-request-body={"speculative": false}']) == 0
    drafted, plain = (json.loads(line) for line in out.read_text().splitlines())
    for line in (drafted, plain):
        assert (line["completed"], line["failed"], line["total_input_tokens"]) == (4, 0, 64)
        assert line["total_output_tokens"] == 48 and line["median_tpot_ms"] > 0
        assert 0 < line["median_server_first_token_ms"] < line["p99_ttft_ms"]
    told = drafted["accepted_tokens"] + drafted["rejected_tokens"] > 0
    assert told == (drafted["accept_length"] is not None) and (drafted["accept_length"] or 1) >= 1
    assert plain["accepted_tokens"] == plain["rejected_tokens"] == 0 and plain["accept_length"] is None


def test_a_killed_worker_comes_back(split: Served) -> None:
    killed = split.worker("decode")
    killed.kill()
    wait_until(lambda: gone([killed]), 5)

    def answers() -> bool:
        body = {"model": "tiny", "messages": QUESTION, "max_tokens": 4}
        reply = httpx.post(f"{split.url}/v1/chat/completions", json=body, timeout=30, trust_env=False)
        return reply.status_code == 200

    wait_until(answers, 90)
    assert split.says("starting it again")
    assert split.worker("decode").pid != killed.pid


# --- what is left behind -------------------------------------------------------------------------------


def test_ctrl_c_gives_open_streams_their_time_then_leaves_nothing(split: Served) -> None:
    """The last of the tests that ask this cluster."""
    body = {"model": "tiny", "prompt": "x", "n": 8, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    lasts: list[list[str]] = []
    begun = threading.Semaphore(0)
    family, pools = split.descendants(), split.pools()
    assert any(path.is_file() for path in pools.rglob("*"))

    def read() -> None:
        with httpx.stream("POST", f"{split.url}/v1/completions", json=body, timeout=60, trust_env=False) as r:
            lines = r.iter_lines()
            begun.release()
            lasts.append([line for line in lines if line][-2:])

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert begun.acquire(timeout=30)
    assert split.interrupt() == 0
    assert gone(family) and not pools.exists()
    for reader in readers:
        reader.join(10)
    wait_until(lambda: not split.reader.is_alive(), 5)
    assert split.says("stopping (open requests may finish within 1 s); Ctrl-C again to stop now")
    assert not split.says("Traceback")
    assert [done for _, done in lasts] == ["data: [DONE]"] * 4
    assert all(
        "draining" in json.loads(error.removeprefix("data: "))["error"]["message"] for error, _ in lasts
    )


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(folders: Folders) -> None:
    with serving(folders, "--layout", "unified") as served:
        family, pools = served.descendants(), served.pools()
        served.worker("prefill,decode,draft").suspend()  # it cannot stop in order
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        began = time.monotonic()
        served.interrupt()
        assert time.monotonic() - began < 8  # a worker that cannot stop in order has 10
        assert gone(family)
        assert not pools.exists()


@pytest.mark.slow
def test_a_killed_supervisor_leaves_no_process_and_no_pool(folders: Folders) -> None:
    with serving(folders, "--layout", "unified") as served:
        family, pools = served.descendants(), served.pools()
        served.process.kill()
        served.process.wait(timeout=5)
        wait_until(lambda: gone(family), 20)
        assert not pools.exists()


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_one_line(folders: Folders, tmp_path: Path) -> None:
    config = json.loads(Path(folders.model, "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(Path(folders.model, name))
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["OddForCausalLM"]}))
    command = [sys.executable, "-m", "eyas.cli", "demo", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "OddForCausalLM" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo_streams_an_answer_and_shows_figures(tmp_path: Path) -> None:
    """The one test here that needs the embedded model: drafts of a random head seldom come in time.

    It starts where somebody has left modules that are named as Python's own.
    """
    command, here = tmp_path / "bin" / "eyas", tmp_path / "here"
    command.parent.mkdir()
    command.write_text(
        "import sys\nfrom eyas.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
    )
    here.mkdir()
    mark = plant(here)
    path = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(command), "demo", "--layout", "unified"],
        cwd=here,
        env=path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert not mark.exists()
    last = done.stdout.strip().splitlines()[-1]
    assert "tokens/s" in last and "first token after" in last and "acceptance length" in last
