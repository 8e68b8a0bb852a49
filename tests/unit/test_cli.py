"""The command line: quick help, and one line for what cannot work."""

from __future__ import annotations

import resource

import pytest

from eyas import configuration
from tests.unit.command_line import eyas, told

ON_GPU = ("serve", "--device", "cuda")
SYNTHETIC = ["--rejection-sample-method", "synthetic", "--synthetic-acceptance-length", "3"]


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: several have another usual layout."""
    monkeypatch.setattr(configuration, "visible", lambda: 1)


def test_help_is_quick() -> None:
    """In seconds of a core: other tests may run beside it."""
    fastest = 10.0
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert eyas("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        fastest = min(fastest, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert 0 < fastest < 0.5


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "eighty"], "'eighty' is not a port"),
        (["serve", "--decode", "0"], "'0' is no whole number from 1 to 1024"),
        (["serve", "--layout", "diagonal"], "diagonal"),
        (["worker", "--roles", "chef"], "'chef' is not a list of prefill, decode, draft"),
        (["serve", "--model", "/nowhere"], "/nowhere is not a folder"),
        (["worker", "--model", "/nowhere"], "/nowhere is not a folder"),
        (["gateway", "--registry", "static:127.0.0.1:1", "--model", "/nowhere"], "/nowhere is not a folder"),
        (["serve", "--model", "/no\udcffwhere"], r"--model: the path '/no\udcffwhere' is not UTF-8"),
        (["serve", "--draft", "/no\udcffwhere"], r"--draft: the path '/no\udcffwhere' is not UTF-8"),
        (["gateway"], "--registry"),
        (["worker", "--registry", "etcd:"], "registry must start with 'static:', 'redis://' or 'rediss://'"),
        (
            ["worker", "--host", "0.0.0.0"],
            "0.0.0.0 is no address that others can dial: name one with --advertise",
        ),
        (["worker", "--host", "::"], ":: is no address that others can dial: name one with --advertise"),
        (["worker", "--host", "[::]"], ":: is no address that others can dial: name one with --advertise"),
        (["serve", "--host", "[::1]:8000"], "'[::1]:8000' is neither a name nor an IP address"),
        (["worker", "--host", "0.0.0.0", "--advertise", "0.0.0.0"], "'0.0.0.0' is not HOST or HOST:PORT"),
        (["worker", "--advertise", "unix:/tmp/x"], "'unix:/tmp/x' is not HOST or HOST:PORT"),
        (["gateway", "--registry", "etcd:"], "registry must start with 'static:', 'redis://' or 'rediss://'"),
        (["bench", "serve", "--rat", "1"], "(see eyas bench serve --help)"),
        (["bench", "bs0"], "'bs0'"),
        (["serve", "--host-cache-gb", "-1"], "--host-cache-gb: '-1' is not a number, 0 or above"),
        (["serve", "--mem-fraction-static", "1.5"], "--mem-fraction-static: '1.5' is not a fraction"),
        (["serve", "--mixed-step-tokens", "-1"], "--mixed-step-tokens"),
        (["serve", "--lora", "alice"], "--lora: 'alice' is not NAME=DIR"),
        (["serve", "--lora", "alice=/nowhere"], "--lora: there is no folder /nowhere"),
        (["serve", "--lora-dir", "/nowhere"], "--lora-dir: there is no folder /nowhere"),
        (["serve", "--lora-experts"], "--lora-experts: needs adapters (--lora, --lora-dir or --max-loras)"),
        (["serve", "--max-lora-rank", "257"], "--max-lora-rank: '257' is no whole number from 1 to 256"),
        (
            ["serve", "--decode", str(10**22)],
            "--decode: '10000000000000000000000' is no whole number from 1 to 1024",
        ),
        (["serve", "--max-loras", "2147483648"], "'2147483648' is no whole number from 1 to 2147483647"),
        (["serve", "--drain-s", "2147483648"], "'2147483648' is no whole number from 0 to 2147483647"),
        (["serve", "--gateway-workers", "1025"], "'1025' is no whole number from 1 to 1024"),
        (["serve", "--cuda-graph-bs", "1", "--disable-cuda-graph"], "--cuda-graph-bs"),
        (["serve", "--device", "gpu"], "--device: 'gpu' is neither cpu nor cuda"),
        (["serve", "--dtype", "bfloat16"], "--dtype: bfloat16 needs a GPU"),
        (["serve", "--attention-backend", "triton"], "--attention-backend: triton needs a GPU"),
        ([*ON_GPU, "--attention-backend", "flashinfer"], "(--prefill-attention-backend flashinfer)"),
        (
            [*ON_GPU, "--prefill-attention-backend", "torch"],
            "--prefill-attention-backend: torch does not go with --attention-backend triton",
        ),
        (["serve", "--tp", "2"], "--tensor-parallel-size: 2 needs a GPU"),
        (["serve", "--cuda-graph-max-bs", "8"], "--cuda-graph-max-bs: 8 needs a GPU"),
        (["serve", "--synthetic-acceptance-length", "3"], "--synthetic-acceptance-length: needs --rejection"),
        (["serve", "--rejection-sample-method", "synthetic"], "--synthetic-acceptance-rates: give either"),
        (["serve", *SYNTHETIC], "--rejection-sample-method: synthetic needs a GPU"),
        (["serve", "--uniform-experts"], "--uniform-experts: needs a GPU"),
        ([*ON_GPU, "--dp-attention", "2", "--spec-adaptive"], "--dp-attention: attention ranks on GPUs have"),
        (["serve", "--dp-attention", "2", "--host-cache-gb", "1"], "--dp-attention: attention ranks have no"),
        (["serve", "--dp-attention", "0"], "--dp-attention"),
        ([*ON_GPU, *SYNTHETIC, "--attention-backend", "torch"], "--rejection-sample-method: synthetic needs"),
        (
            ["serve", "--speculative-token-map", "f", "--draft", "none"],
            "--speculative-token-map: needs a draft",
        ),
        ([*ON_GPU, *SYNTHETIC, "--draft", "none"], "--rejection-sample-method: synthetic needs a draft head"),
        ([], "COMMAND"),
    ],
)
def test_what_cannot_work_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    done = told(capsys, *args)
    assert done.code != 0 and done.out == ""
    assert len(done.err.splitlines()) == 1 and says in done.err, done.err


def test_a_process_tells_the_same_and_exits() -> None:
    done = eyas("serve", "--model", "/no\udcffwhere")
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert r"eyas: --model: the path '/no\udcffwhere' is not UTF-8" in done.stderr


def test_version() -> None:
    assert eyas("--version").stdout.startswith("eyas ")


NOWHERE = ("--url", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "command", [("chat",), ("bench", "serve"), ("eval", "nano"), ("doctor",), ("doctor", "determinism")]
)
def test_a_command_that_finds_no_server_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    done = told(capsys, *command, *NOWHERE)
    assert done.code == 1
    said = done.out + done.err
    assert "nothing listens at http://127.0.0.1:1: start `eyas serve` first" in said
    assert "Traceback" not in said


def test_an_unknown_flag_names_the_help_of_its_command() -> None:
    assert "(see eyas serve --help)" in eyas("serve", "--prot", "1").stderr


def test_bench_alone_lists_its_commands() -> None:
    done = eyas("bench")
    assert done.returncode == 0
    assert "serve" in done.stdout and "load a server" in done.stdout


def test_an_address_is_one_of_http() -> None:
    assert "'127.0.0.1:8001' is not an address like http://" in eyas("chat", "--url", "127.0.0.1:8001").stderr
    assert "leave out /v1" in eyas("chat", "--url", "http://127.0.0.1:8000/v1").stderr
