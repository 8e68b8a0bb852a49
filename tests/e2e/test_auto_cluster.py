"""`eyas serve --layout auto` as a user starts it: the same answer, also when a worker is killed meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.served import Served, make_folders, serving, wait_until

BODY = {"model": "tiny", "prompt": "x" * 200, "max_tokens": 64, "ignore_eos": True, "temperature": 0.8}
ROLES = "--roles=prefill,decode,draft"


def workers(served: Served) -> list[psutil.Process]:
    return [process for process in served.descendants() if ROLES in process.cmdline()]


def cluster(served: Served) -> Any:
    return httpx.get(f"{served.url}/cluster", timeout=30, trust_env=False).json()["workers"]


def busy(served: Served) -> psutil.Process:
    """The worker that has this gateway's request."""
    address = next(worker["worker"] for worker in cluster(served) if worker["in_flight"])
    port = address.rpartition(":")[2]
    return next(process for process in workers(served) if f"--port={port}" in process.cmdline())


def text(served: Served, *, kill: bool = False) -> str:
    """A streamed answer; `kill`: once it has begun, the worker that gives it is killed."""
    said, body = "", {**BODY, "seed": 7, "stream": True}
    url = f"{served.url}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                said += json.loads(line[6:])["choices"][0]["text"]
            if said and kill:
                busy(served).kill()
                kill = False
    return said


def predicted(served: Served) -> float:
    """How many requests were placed by prediction."""
    page = httpx.get(f"{served.url}/metrics", timeout=30, trust_env=False).text
    lines = [line for line in page.splitlines() if line.startswith("eyas_placements_total{")]
    return sum(float(line.split()[1]) for line in lines if "by_roles" not in line)


@pytest.mark.slow
def test_a_killed_worker_changes_no_answer(tmp_path: Path) -> None:
    folders = make_folders(tmp_path)
    with serving(folders, "--layout", "auto", "--ttft-target", "0.5", "--tpot-target", "0.02") as served:
        assert len(workers(served)) == 2
        expected = text(served)
        assert len(expected) > 60
        assert text(served, kill=True) == expected
        assert served.says("goes on at") and predicted(served) >= 2
        wait_until(lambda: len(workers(served)) == 2, 30)
        assert served.says("starting it again")
