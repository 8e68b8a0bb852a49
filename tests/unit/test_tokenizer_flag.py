"""`--tokenizer`: another folder's tokenizer, chat template and ends of turns, by every part of a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas import cli, configuration
from eyas.cluster.checks import check_engine
from eyas.cluster.plan import gateway_argv, worker_argv
from eyas.cluster.serve import LocalCluster
from eyas.common.config import NANO, EngineConfig
from eyas.common.errors import ConfigError
from eyas.common.tokenizers.source import read_tokenizer, tokenizer_digest
from eyas.engine.loading.spec import EngineSpec
from gateway.text.tokenizer import Tokenizer
from tests.unit.tokenizer_families import write_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eot_id|>{% endfor %}"


def test_every_process_is_handed_the_folder(tmp_path: Path) -> None:
    folder = str(write_tokenizer(tmp_path / "t"))
    args = cli._parser().parse_args(["serve", "--tokenizer", folder, "--chat-template", TEMPLATE])
    config = configuration.serve_config(args, configuration.gateway_config(args))
    assert config.engine.tokenizer == config.gateway.tokenizer == folder
    assert config.engine.texts.folder == config.gateway.texts.folder == Path(folder)
    parse = cli._parser().parse_args
    assert config.engine.chat_template == config.gateway.chat_template == TEMPLATE
    given = ["--tokenizer", folder, "--chat-template", TEMPLATE]
    worker = configuration.worker_config(parse(["worker", *given]))
    assert worker.engine.tokenizer == folder
    assert configuration.worker_config(parse(worker_argv(worker))) == worker
    gateway = configuration.gateway_alone(parse(["gateway", "--registry", "static:127.0.0.1:1", *given]))
    assert gateway.tokenizer == folder
    assert configuration.gateway_alone(parse(gateway_argv(gateway))) == gateway
    demo = configuration.own_config(parse(["demo", "--tokenizer", folder]))
    assert demo.engine.tokenizer == demo.gateway.tokenizer == folder
    assert configuration.own_config(parse(["demo"])).engine.texts.folder == NANO


def test_a_model_without_a_tokenizer_takes_that_of_another_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((NANO / "config.json").read_bytes())
    engine = EngineConfig(model=str(tmp_path), draft=None, load_format="dummy")
    with pytest.raises(ConfigError, match=f"--model: {tmp_path} has no tokenizer"):
        check_engine(engine)
    check_engine(EngineConfig(**{**vars(engine), "tokenizer": str(write_tokenizer(tmp_path / "t"))}))


def test_its_template_its_special_tokens_and_its_ends_count(tmp_path: Path) -> None:
    """The model's own files say nothing of them any more."""
    folder = write_tokenizer(tmp_path / "t", chat_template=TEMPLATE, eos_token="<|im_start|>")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.template is not None
    assert tokenizer.template.render([{"role": "user", "content": "Hi"}]) == "<|endoftext|><user>Hi<|eot_id|>"
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((NANO / "config.json").read_text()) | {"eos_token_id": 7})
    )
    engine = EngineConfig(model=str(tmp_path), tokenizer=str(folder), draft=None, load_format="dummy")
    assert EngineSpec.of(engine).target.eos_token_ids == (7, 1)
    given = EngineConfig(**{**vars(engine), "chat_template": "{{ messages }}<|im_end|>"})
    assert EngineSpec.of(given).target.eos_token_ids == (7, 1, 2), "a given template ends turns too"


@pytest.mark.parametrize("command", ["serve", "worker", "gateway"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "nowhere is not a folder"),
        ("empty", "empty has no tokenizer (tokenizer.json, "),
        ("large", "large has token ids up to 4097, and "),
        ("broken", "tokenizer.json cannot be loaded: "),
    ],
)
def test_one_that_cannot_be_is_one_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    name: str,
    says: str,
) -> None:
    (tmp_path / "empty").mkdir()
    write_tokenizer(tmp_path / "large", more=2)
    (write_tokenizer(tmp_path / "broken") / "tokenizer.json").write_text('{"model": 5}')
    monkeypatch.setattr(LocalCluster, "__aenter__", None)  # nothing is to be started
    args = [command, "--port", "0", "--tokenizer", str(tmp_path / name)]
    args += ["--registry", "static:127.0.0.1:1"] if command == "gateway" else []
    assert cli.main(args) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1 and says in told, told


def test_the_names_of_other_servers(tmp_path: Path) -> None:
    args = cli._parser().parse_args(["serve", "--tokenizer-path", "x"])
    assert args.server_tokenizer == "x"


def test_a_digest_names_the_content(tmp_path: Path) -> None:
    own, other = write_tokenizer(tmp_path / "a"), write_tokenizer(tmp_path / "b")
    assert tokenizer_digest(own) == tokenizer_digest(other) != tokenizer_digest(NANO)
    assert tokenizer_digest(tmp_path) == ""
    ids = read_tokenizer(own).get_vocab()
    assert ids["Y"] == read_tokenizer(NANO).get_vocab()["Z"]
