"""What ends a command before any other process starts: a Ctrl-C, and flags that cannot work."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.common.cluster.listening import free_ports
from tests.unit.command_line import eyas, told


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
        (["serve", "--context-length", "1"], "--context-length: at least 16 tokens"),
        (["serve", "--draft", "none", "--draft-workers", "2"], "--draft-workers: there is no draft head"),
        (["serve", "--draft", "ngram", "--draft-workers", "1"], "--draft-workers: there is no draft head"),
        (["serve", "--draft", "none", "--spec-topk", "2"], "--spec-topk: nothing is drafted"),
        (["demo", "--draft", "none", "--spec-adaptive"], "--spec-adaptive: nothing is drafted"),
        (["worker", "--draft", "none", "--spec-steps", "3"], "--spec-steps: nothing is drafted"),
        (["worker", "--draft", "none", "--spec-draft-tokens", "9"], "--spec-draft-tokens: nothing is"),
        (["serve", "--draft", "none", "--spec-ngram"], "--spec-ngram: nothing is drafted"),
        (["serve", "--draft", "none", "--draft-capture-layers", "1"], "--draft-capture-layers: there is no"),
        (["serve", "--draft", "ngram", "--draft-capture-layers", "1"], "--draft-capture-layers: there is no"),
        (["certs", "/nowhere", "--names", ","], "--names: ',' is not a host name"),
        (["certs", "/nowhere", "--names", "localhost,my host"], "--names: 'my host' is not a host name"),
    ],
)
def test_it_is_one_line(capsys: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    done = told(capsys, *args)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1 and says in done.err, done.err


def test_http_and_grpc_take_a_port_each() -> None:
    port = str(next(free_ports()))
    done = eyas("serve", "--port", port, "--grpc-port", port)
    assert len(done.stderr.splitlines()) == 1 and "--grpc-port: cannot listen" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_worker_tells_by_its_flag_where_it_cannot_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flag in ("--port", "--metrics-port"):
            done = eyas("worker", "--roles", "decode", flag, port)
            assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
            assert f"eyas: {flag}: cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    done = eyas("worker", "--host", "no-such-host.invalid")
    assert len(done.stderr.splitlines()) == 1 and "eyas: --host: cannot listen on no-such" in done.stderr


PLAN = ["plan", "--gpus", "1", "--seconds", "1", "--input-len", "64", "--output-len", "8"]
FULL = """
import resource, sys
from eyas import cli
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["keys", "add", "keys", "me"], 2, "eyas: keys cannot be written: [Errno 27] File too large"),
        (["certs", "certs"], 2, "eyas: certs: [Errno 27] File too large"),
        pytest.param(  # matplotlib looks for fonts anew where it can store nothing
            [*PLAN, "--plot", "plan.svg"],
            1,
            "eyas: [Errno 27] File too large",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_disk_that_takes_no_more_is_told_in_one_line(
    tmp_path: Path, args: list[str], code: int, says: str
) -> None:
    command = [sys.executable, "-c", FULL, *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (code, f"{says}\n")


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


PEER_THAT_LEAVES = """
import contextlib, socket, struct, sys, threading
from eyas import cli

def frame(kind, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind]) + bytes(5) + payload

def leave():
    connection = listener.accept()[0]
    connection.recv(65536)
    connection.sendall(frame(4))  # SETTINGS
    connection.recv(65536)
    connection.sendall(frame(7, struct.pack(">II", 0, 2)))  # GOAWAY with an error
    connection.recv(65536)

listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=leave, daemon=True).start()
cli.main(["keys", "list", sys.argv[1]])
import grpc
with grpc.insecure_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel:
    with contextlib.suppress(grpc.RpcError):
        channel.unary_unary("/any/Call")(b"", timeout=1)
"""


@pytest.mark.parametrize("asked", [None, "INFO"])
def test_grpc_itself_is_silent_of_peers_that_leave_unless_asked(tmp_path: Path, asked: str | None) -> None:
    keys = tmp_path / "keys"
    keys.touch()
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environment |= {} if asked is None else {"GRPC_VERBOSITY": asked}
    done = subprocess.run(
        [sys.executable, "-c", PEER_THAT_LEAVES, str(keys)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0 and ("goaway" in done.stderr) == (asked == "INFO"), done.stderr
    assert asked or not done.stderr


@pytest.mark.parametrize("args", [["serve", "--no-such-flag"], ["serve", "--context-length", "1"]])
def test_what_is_wrong_with_flags_is_said_before_large_libraries_are_imported(args: list[str]) -> None:
    code = (
        "import sys\nfrom eyas import cli\n"
        f"try: ended = cli.main({args!r})\nexcept SystemExit as error: ended = error.code\n"
        "print(ended, sorted({'torch', 'transformers', 'grpc', 'xgrammar'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 []\n", done.stderr
