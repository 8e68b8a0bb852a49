"""With JSON logs every line on standard error is a record: of a server, and of all that can go wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas.cluster.screen import ClusterScreen
from eyas.common.cluster.listening import free_ports
from eyas.common.config import NANO
from eyas.common.logging import as_record, message_in
from tests.e2e.served import make_folders, serving

GONE = "127.0.0.1:1"
TROUBLE = """
import sys, threading, warnings
from eyas.common import logging
logging.setup("trouble", "json", reads_text=True)
warnings.warn("deprecated\\nsince long")
def fail():
    raise ValueError("the words of a request")
thread = threading.Thread(target=fail)
thread.start()
thread.join()
class Broken:
    def __del__(self):
        fail()
Broken()
logging.announce("it is ready")
fail()
"""


def records(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.split("\n") if line]
    assert all({"time", "level", "process", "logger", "message"} <= record.keys() for record in found)
    return found


def test_warnings_and_what_nobody_caught_are_records_without_a_caller_s_words() -> None:
    done = subprocess.run([sys.executable, "-c", TROUBLE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    told = records(done.stderr)
    assert [record["level"] for record in told] == ["WARNING", "CRITICAL", "CRITICAL", "INFO", "CRITICAL"]
    assert "since long" in told[0]["message"] and told[3]["message"] == "it is ready"
    assert all("in fail" in told[at]["exception"] for at in (1, 2, 4))
    assert "the words of a request" not in done.stderr


@pytest.mark.slow
def test_a_gateway_of_two_processes_writes_json_alone() -> None:
    ports = free_ports()
    port, flags = (
        next(ports),
        ["--log-format", "json", "--gateway-workers", "2", "--registry", f"static:{GONE}"],
    )
    words = ["gateway", f"--port={port}", f"--grpc-port={next(ports)}", f"--model={NANO}", *flags]
    process = subprocess.Popen([sys.executable, "-m", "eyas.cli", *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    while sum("gateway listening" in line for line in lines) < 2:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=60, trust_env=False).status_code == 503
    process.send_signal(signal.SIGTERM)
    rest = process.communicate(timeout=60)[1]
    told = records("".join(lines) + rest)
    assert {record["process"] for record in told} == {"gateway-0", "gateway-1"}
    assert any(record["message"].startswith("draining") for record in told)


def test_a_command_that_cannot_work_says_so_in_json() -> None:
    words = ["gateway", "--registry=static:", f"--model={NANO}", "--log-format=json"]
    done = subprocess.run(
        [sys.executable, "-m", "eyas.cli", *words], capture_output=True, text=True, timeout=60
    )
    (record,) = records(done.stderr)
    assert done.returncode == 2 and record["level"] == "ERROR" and "--registry" in record["message"]


@pytest.mark.slow
def test_a_whole_cluster_writes_json_alone(tmp_path: Path) -> None:
    with serving(make_folders(tmp_path), "--log-format", "json") as served:
        body = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
    mixed = [line for line in served.lines if line.startswith("{")]
    plain = [line for line in served.lines if not line.startswith("{")]
    told = records("\n".join(mixed))
    assert len(plain) <= 4 and "is ready" in plain[0]  # standard output, which is for people
    assert {"prefill-0", "decode-0", "gateway"} <= {
        record.get("service", record["process"]) for record in told
    }


def test_a_child_s_line_is_its_own_record_or_a_new_one(capfd: pytest.CaptureFixture[str]) -> None:
    screen = ClusterScreen(quiet=False, json=True)
    own = '{"time": "t", "level": "INFO", "process": "engine", "logger": "l", "message": "é"}'
    lines = [own, "E0000 a library's line", '{"a": 1}', "{broken", '["message"]', "", "\x1b[1m\ttab"]
    for line in lines:
        screen.log("decode-0", line)
    first, *others = records(capfd.readouterr().err)
    assert first == json.loads(own) | {"service": "decode-0"}
    assert [(record["process"], record["message"]) for record in others] == [
        ("decode-0", line) for line in lines[1:]
    ]
    assert message_in(as_record("decode-0", "eyas: no")) == "eyas: no" == message_in("eyas: no")
