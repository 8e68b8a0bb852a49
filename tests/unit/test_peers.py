"""Flags of vLLM and SGLang: every row of the table, and what may go wrong on a command line of theirs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from eyas import cli
from eyas.commands import ReadLine
from eyas.peers.meanings import (
    BOTH,
    NONE,
    ONE,
    SGLANG,
    SWITCH,
    VLLM,
    AcceptedFlag,
    AcceptedValues,
    AcceptedWith,
    AliasFlag,
    FlagRow,
    RefusedFlag,
    SameFlag,
    TranslatedFlag,
)
from eyas.peers.reading import read
from eyas.peers.table import BY_NAME, ROWS
from tests.unit.command_line import told


@pytest.fixture(scope="module")
def parsers() -> dict[str, argparse.ArgumentParser]:
    actions = cli._parser()._actions
    return next(action for action in actions if isinstance(action, argparse._SubParsersAction)).choices


@pytest.fixture
def serve(parsers: dict[str, argparse.ArgumentParser]) -> argparse.ArgumentParser:
    return parsers["serve"]


def refused(capsys: pytest.CaptureFixture[str], parser: argparse.ArgumentParser, *words: str) -> str:
    """The one line with which the command ends."""
    with pytest.raises(SystemExit) as ended:
        read(parser, words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and len(said.splitlines()) == 1, said
    return said


def spelled(parser: argparse.ArgumentParser, name: str, row: FlagRow) -> list[str]:
    """The flag with its example, or alone if it takes nothing."""
    own = row.meaning.flag if isinstance(row.meaning, AliasFlag) else name
    action = parser._option_string_actions.get(own)
    takes = row.takes if action is None else NONE if action.nargs == 0 else ONE
    return [name] if takes in (NONE, SWITCH) else [name, row.example]


@pytest.mark.parametrize(
    ("name", "row"), [pytest.param(name, row, id=name) for row in ROWS for name in row.names]
)
def test_every_row(
    serve: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], name: str, row: FlagRow
) -> None:
    words, meaning = spelled(serve, name, row), row.meaning
    own = name in serve._option_string_actions
    if isinstance(meaning, RefusedFlag) and not own:
        said = refused(capsys, serve, *words)
        assert f"{name}: {meaning.instead}" in said
        return
    if isinstance(meaning, AcceptedWith):
        assert f"{name}: {meaning.instead}" in refused(capsys, serve, *words)
        words += [meaning.flags[0], "1"]
    reading = read(serve, words)
    if isinstance(meaning, AliasFlag):
        assert (
            reading.words[0].partition("=")[0] == serve._option_string_actions[meaning.flag].option_strings[0]
        )
    if isinstance(meaning, AcceptedFlag | AcceptedValues | AcceptedWith):
        assert any(note.startswith(f"{name} changes nothing: ") for note in reading.notes)
    if isinstance(meaning, SameFlag):
        assert own
    if isinstance(meaning, AcceptedValues):
        assert meaning.instead in refused(capsys, serve, name, "no-such-value")
    if isinstance(meaning, AliasFlag | SameFlag | TranslatedFlag):
        serve.parse_args(words)  # argparse takes what was made of it


def test_sixty_of_each() -> None:
    for server in (VLLM, SGLANG):
        assert sum(len(row.names) for row in ROWS if row.servers in (server, BOTH)) >= 60
    assert len(BY_NAME) == sum(len(row.names) for row in ROWS)  # none is there twice


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["--max-model-len", "8k"], ["--context-length=8000"]),
        (["--max-model-len=8K"], ["--context-length=8192"]),
        (["--max_model_len", "1.5k"], ["--context-length=1500"]),
        (["--dtype", "half"], ["--dtype=float16"]),
        (["--enforce-eager"], ["--disable-cuda-graph"]),
        (["-tp", "4"], ["--tensor-parallel-size=4"]),
        (["--max-total-tokens", "1600"], ["--num-pages=100"]),
        (["--allowed-origins", '["https://a.example", "*"]'], ["--cors-origin=https://a.example,*"]),
        (["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "h"], ["--draft=h"]),
        (["--speculative-algorithm", "NEXTN"], ["--draft=mtp"]),
        (["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "m"], ["--draft=m"]),
        (["--cudagraph-capture-sizes", "1", "2", "--port", "1"], ["--cuda-graph-bs", "1", "2", "--port=1"]),
        (["--enable-chunked-prefill", "True", "--seed", "-1"], ["--seed=-1"]),
        (["--otlp-traces-endpoint", "h:4317"], ["--otlp-endpoint=http://h:4317"]),
        (["--enable-lora", "--lora-modules", "a=/x", "b=/y"], ["--lora", "a=/x", "b=/y"]),
        (["--lora-modules", '{"name": "a", "path": "/x", "base_model_name": "m"}'], ["--lora=a=/x"]),
        (
            ["--lora-paths", "/x", "b=/y", "--max-loras-per-batch", "4"],
            ["--lora", "/x=/x", "b=/y", "--max-loras=4"],
        ),
        (["m", "--port", "1"], ["--model=m", "--port=1"]),
        (["--model-path", "m", "--model", "m"], ["--model=m", "--model=m"]),
        (["--port", "1", "--port", "2"], ["--port=1", "--port=2"]),  # the last counts, as ever
    ],
)
def test_their_words_in_ours(serve: argparse.ArgumentParser, words: list[str], made: list[str]) -> None:
    assert read(serve, words).words == made


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ({"method": "eagle3", "model": "h", "num_speculative_tokens": 3}, ["--draft=h", "--spec-steps=3"]),
        (
            {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4},
            ["--draft=ngram", "--spec-steps=4"],
        ),
        (
            {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0},
            ["--draft=suffix"],
        ),
        ({"method": "deepseek_mtp"}, ["--draft=mtp"]),
        ({"model": "h", "draft_tensor_parallel_size": 1}, ["--draft=h"]),
    ],
)
def test_vllms_object_of_speculation(
    serve: argparse.ArgumentParser, asked: dict[str, object], made: list[str]
) -> None:
    assert read(serve, ["--speculative-config", json.dumps(asked)]).words == made


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-model-lem", "5"], "unknown: --max-model-lem: did you mean --max-model-len?"),
        (["--no-such-thing-at-all"], "unknown: --no-such-thing-at-all (see"),
        (["--max-model-len", "8x"], "--max-model-len: '8x' is not a positive number"),
        (["--max-model-len"], "--max-model-len: needs a value"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization: '2' is not a fraction"),
        (["--max-model-len", "64", "--context-length", "32"], "two names of one flag, --context-length"),
        (
            ["a", "--model", "b"],
            "MODEL and --model are two names of one flag, --model, and their values differ: a and b",
        ),
        (["a", "b"], "unknown: 'b': a server has one model"),
        (["--num-pages", "3", "--max-total-tokens", "1600"], "their values differ: 3 and 100"),
        (["--speculative-algorithm", "NGRAM", "--draft", "h"], "their values differ: ngram and h"),
        (["--speculative-algorithm", "DFLASH"], "--speculative-algorithm: DFLASH drafts by a model: take"),
        (["--speculative-algorithm", "DECOUPLED"], "--speculative-algorithm: DECOUPLED is not served"),
        (["--speculative-config", "{"], "--speculative-config: it is not JSON"),
        (["--speculative-config", '{"modle": "h"}'], "modle is unknown: did you mean model?"),
        (["--speculative-config", '{"method": "eagle"}'], "it names no draft head"),
        (["--speculative-config", '{"model": "h", "num_speculative_tokens": "x"}'], "'x' is not a positive"),
        (["--disaggregation-mode", "prefill"], "start `eyas worker --roles prefill`"),
        (["--allowed-origins", "[1]"], "--allowed-origins: '[1]' is not a JSON list of texts"),
        (["--pipeline-parallel-size", "2"], "'2' is not served: share the model by"),
        (["--enable-chunked-prefill=false"], "--no-enable-chunked-prefill: set"),
        (["--enable-prefix-caching=x\ny"], "--enable-prefix-caching"),
    ],
)
def test_what_cannot_be_read_ends_in_one_sentence(
    serve: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert says in refused(capsys, serve, *words)


def test_a_worker_has_one_side_of_a_split_cluster(
    parsers: dict[str, argparse.ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    worker = parsers["worker"]
    assert read(worker, ["--disaggregation-mode", "decode"]).words == ["--roles=decode"]
    assert "is --workers of `eyas serve`" in refused(capsys, worker, "--dp-size", "2")
    assert "is no flag of `eyas worker`" in refused(capsys, worker, "--root-path", "/x")


# --- a file of flags ---------------------------------------------------------------------------------------


def from_file(parser: argparse.ArgumentParser, folder: Path, text: str, *words: str) -> ReadLine:
    file = folder / "flags.yaml"
    file.write_text(text)
    return read(parser, ["--config", str(file), *words])


def test_a_file_of_flags(serve: argparse.ArgumentParser, tmp_path: Path) -> None:
    text = """
model: m
max_model_len: 8k
served-model-name: [a, no]
enforce-eager: true
trust-special-tokens: false
enable-prefix-caching: true
allowed-host: [x, y]
speculative-config: {method: ngram, num_speculative_tokens: 3}
override-generation-config: {temperature: 0.5}
"""
    reading = from_file(serve, tmp_path, text, "--context-length", "64")
    args = serve.parse_args(["--config", str(tmp_path / "flags.yaml"), "--context-length", "64"])
    assert (args.model, args.context_length, args.served_model_names) == ("m", 64, ["a", "no"])
    assert args.disable_cuda_graph and not args.trust_special_tokens and args.allowed_host == ["x", "y"]
    assert (args.draft, args.spec_steps) == ("ngram", 3)
    assert json.loads(args.override_generation_config) == {"temperature": 0.5}
    assert len(reading.notes) == 1 and reading.notes[0].startswith("--enable-prefix-caching changes nothing")
    assert from_file(serve, tmp_path, "").words == [f"--config={tmp_path / 'flags.yaml'}"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-model-lem: 5", "unknown: --max-model-lem: did you mean --max-model-len?"),
        ("port: 1\nport: 2", "has port twice"),
        ("max-model-len: 64\ncontext-length: 32", "two names of one flag"),
        ("port: [1, 2]", "--port: takes one value"),
        ("port:", "port has no value"),
        ("enforce-eager: maybe", "--enforce-eager: takes true or false"),
        ("- port", "is no mapping"),
        ("a: [", "is not YAML"),
        ("config: x", "names another file"),
        ("speculative-config: {a: &x {b: *x}}", "is not a value that JSON has"),
        ("quantization: fp8", "--quantization: leave it out"),
    ],
)
def test_a_file_that_cannot_be_read(
    serve: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    (tmp_path / "flags.yaml").write_text(text)
    assert says in refused(capsys, serve, "--config", str(tmp_path / "flags.yaml"))


def test_a_file_that_is_not_there(serve: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config: /nowhere.yaml cannot be read" in refused(capsys, serve, "--config", "/nowhere.yaml")


def test_an_unknown_flag_of_any_command_has_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown: --ur: did you mean --url?" in told(capsys, "chat", "--ur").err
