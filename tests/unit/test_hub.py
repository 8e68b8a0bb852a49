"""Models named as on the hub: what is fetched, what it is called, and what goes wrong on the way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas import cli, configuration
from eyas.cluster.checks import check_model
from eyas.cluster.hub import chosen, model_folder
from eyas.common.config import NANO
from eyas.common.errors import ConfigError
from eyas.common.model_folder import HubName, model_name, on_hub
from tests.local_hub import COMMIT, LocalHub, local_hub

NAME = "org/Small-1.5B"
OTHERS = ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "original/model.safetensors", "README.md")


def files() -> dict[str, bytes]:
    """The embedded model as it would lie on the hub."""
    own = {path.name: path.read_bytes() for path in NANO.iterdir() if path.is_file()}
    return own | dict.fromkeys((*OTHERS, "consolidated.safetensors"), b"never")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub with one model, and an empty cache."""
    from huggingface_hub import constants

    with local_hub() as running:
        running.models[NAME] = files()
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(variable, raising=False)
        yield running


def refusal(model: str = NAME, flag: str = "model") -> str:
    with pytest.raises(ConfigError) as raised:
        model_folder(model, flag)
    assert raised.value.param == flag
    assert "\n" not in raised.value.message
    return raised.value.message


def partial(cache: Path) -> list[Path]:
    return list(cache.rglob("*.incomplete"))


def test_a_model_is_fetched_once_without_what_is_never_read(hub: LocalHub) -> None:
    folder = model_folder(NAME)
    check_model(folder)
    sent = sorted(hub.fetched)
    assert sent == sorted(
        path.name for path in NANO.iterdir() if path.suffix in (".json", ".safetensors", ".jinja")
    )
    assert model_folder(f"{NAME}@main") == model_folder(f"{NAME}@{COMMIT}") == folder
    assert sorted(hub.fetched) == sent
    assert model_name(NAME) == model_name(folder) == NAME


def test_a_gateway_fetches_no_weights(hub: LocalHub) -> None:
    check_model(model_folder(NAME, weights=False), "dummy")
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for path in (str(NANO), "/nowhere", "nowhere", "./org/other", "../org/name", "a/b/c", "org/name"):
        assert on_hub(path) is None
        assert model_folder(path) == path
    assert on_hub("org/other@refs/pr/1") == HubName("org/other", "refs/pr/1")
    assert model_name("org/name") == "name"


def test_offline_the_cache_serves(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    folder = model_folder(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_folder(NAME) == folder
    said = refusal("org/other")
    assert said.startswith("--model: org/other is no folder here and not in the cache")
    assert said.endswith("HF_HUB_OFFLINE forbids to fetch it")


def test_part_of_a_model_in_the_cache_is_not_served(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    model_folder(NAME, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "is not whole in the cache, and HF_HUB_OFFLINE forbids" in refusal()


def test_a_hub_that_is_away(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    folder = model_folder(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert model_folder(NAME) == folder
    assert "org/other is no folder here, and the hub cannot be reached (http://127.0.0.1:9)" in refusal(
        "org/other"
    )


def test_what_the_hub_refuses(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models["org/gated"] = files()
    hub.gated.add("org/gated")
    assert f"org/other is no folder here, and no model on the hub ({hub.url})" in refusal(
        "org/other", "draft"
    )
    assert f"{NAME} has no revision v9 on the hub" in refusal(f"{NAME}@v9")
    assert "org/gated is gated: accept its terms on the hub, and set HF_TOKEN" in refusal("org/gated")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "org/gated is gated: accept its terms on the hub, and see that the token" in refusal("org/gated")
    monkeypatch.setenv("HF_TOKEN", "right")
    check_model(model_folder("org/gated"))


@pytest.mark.parametrize(
    ("only", "says"),
    [
        ("model-Q4_K_M.gguf", "only GGUF files"),
        ("pytorch_model.bin", "only PyTorch files"),
        ("README.md", "on the hub, and no other weights are fetched"),
    ],
)
def test_a_repository_without_safetensors(hub: LocalHub, only: str, says: str) -> None:
    hub.models["org/other"] = {"config.json": b"{}", only: b"x"}
    said = refusal("org/other")
    assert "org/other has no safetensors files on the hub" in said and says in said
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"config.json": b'{"architectures": ["MT5EncoderModel"], "model_type": "mt5"}'},
            "MT5EncoderModel of org/other is not supported: it is an encoder-decoder (mt5)",
        ),
        ({"params.json": b"{}"}, "has no config.json on the hub, but Mistral's own format"),
    ],
)
def test_what_cannot_be_served_is_refused_before_its_weights_come(
    hub: LocalHub, config: dict[str, bytes], says: str
) -> None:
    hub.models["org/other"] = {"model.safetensors": b"never"} | config
    with pytest.raises(ConfigError) as raised:
        model_folder("org/other")
    assert says in raised.value.message
    assert "model.safetensors" not in hub.fetched


def test_a_disk_that_is_full_leaves_nothing(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import file_download

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", full)
        assert f"{NAME} does not fit on the disk of {tmp_path}/hub: No space left" in refusal()
    assert partial(tmp_path) == []
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage())
    assert "MiB are to come, and 0.0 MiB are free" in refusal()


class _Usage:
    free = 1000


def test_files_are_chosen() -> None:
    names = ["model.safetensors", "consolidated.safetensors", "a/model.safetensors", "x.bin", "vocab.json"]
    names += [
        "merges.txt",
        "tokenizer.model",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
    ]
    assert set(names) - set(chosen(names, weights=True)) == {
        "consolidated.safetensors",
        "a/model.safetensors",
        "x.bin",
    }
    assert chosen(["consolidated.safetensors"], weights=True) == ["consolidated.safetensors"]


def test_flags_take_names(hub: LocalHub) -> None:
    def parsed(*words: str) -> configuration.ServeConfig:
        args = cli._parser().parse_args(["serve", *words])
        return configuration.serve_config(args, configuration.gateway_config(args))

    config = parsed("--model", NAME, "--revision", "main", "--draft", NAME)
    assert config.engine.model == config.engine.draft == config.gateway.model == model_folder(NAME)
    assert config.gateway.served_model == NAME
    args = cli._parser().parse_args(["gateway", "--registry", "static:h:1", "--model", NAME])
    assert configuration.gateway_alone(args).served_model == NAME
    with pytest.raises(ConfigError, match="--revision: .* is a folder, and revisions are the hub's"):
        parsed("--revision", "main")
    with pytest.raises(ConfigError, match="--revision: .* has a revision already"):
        parsed("--model", f"{NAME}@main", "--revision", "main")
    hub.fetched.clear()
    with pytest.raises(
        ConfigError, match="--draft-workers"
    ):  # flags are looked at before anything is fetched
        parsed("--model", f"{NAME}@{COMMIT}", "--draft-workers", "2")


def test_ctrl_c_in_mid_download(hub: LocalHub, tmp_path: Path) -> None:
    hub.models[NAME] = {**files(), "model.safetensors": bytes(1 << 22)}
    hub.held.add("model.safetensors")
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    words = [sys.executable, "-m", "eyas.cli", "serve", "--model", NAME]
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert hub.half.wait(60)
        others = [name for name in chosen(hub.models[NAME], weights=True) if name not in hub.held]
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("home/hub/*/snapshots/*/*"))) < len(others):
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"eyas: fetching {NAME} was interrupted" in said and "Traceback" not in said
    assert partial(tmp_path) == []
