"""What ends a command before any other process starts: a Ctrl-C, and flags that cannot work."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_cli import eyas

from eyas.worker.ports import free_ports


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve", "--transfer", "cuda_ipc"], "--transfer: cuda_ipc goes from GPU to GPU"),
        (["serve", "--transfer", "none"], "--transfer: none keeps pages where --layout split moves them"),
        (["serve", "--key-limits", "/nowhere"], "--key-limits: /nowhere cannot be read"),
        (["serve", "--cors-origin", "https://a.example,b.example"], "'b.example' is not * or an origin"),
        (["serve", "--cors-origin", "https://a.example/"], "is not * or an origin like"),
        (["serve", "--otlp-endpoint", "collector"], "--otlp-endpoint: 'collector' is not an address"),
        (["serve", "--context-length", "4096"], "--context-length: 4096 is more than the 2048 tokens"),
        (["worker", "--context-length", "4096"], "--context-length: 4096 is more than the 2048 tokens"),
        (["certs", "/nowhere", "--names", ","], "--names: ',' is not a host name"),
        (["certs", "/nowhere", "--names", "localhost,my host"], "--names: 'my host' is not a host name"),
    ],
)
def test_it_is_one_line(args: list[str], says: str) -> None:
    done = eyas(*args)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and says in done.stderr, done.stderr


def test_http_and_grpc_take_a_port_each() -> None:
    port = str(next(free_ports()))
    done = eyas("serve", "--port", port, "--grpc-port", port)
    assert len(done.stderr.splitlines()) == 1 and "--grpc-port: cannot listen" in done.stderr, done.stderr


INTERRUPTED = """
import sys
from eyas import cli

class Finder:
    def find_spec(self, name, *_):
        if name == "eyas.layout_flags":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
sys.exit(cli.main(["serve"]))
"""


def test_a_ctrl_c_among_the_first_imports_leaves_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
