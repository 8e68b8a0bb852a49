"""Who may call, and under which name; the file of keys, and the command that changes it."""

from __future__ import annotations

import base64
import dataclasses
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eyas.cli import main
from eyas.common.config import GatewayConfig
from eyas.common.errors import ConfigError, Unauthorized
from eyas.common.security import api_keys
from gateway.limits import keys as gateway_keys
from gateway.limits.keys import KeyRing
from gateway.main import warn_if_open

PLAIN = GatewayConfig(api_keys=("first-key", "second-key"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def basic(key: str) -> dict[str, str]:
    return {"authorization": f"Basic {base64.b64encode(f'anyone:{key}'.encode()).decode()}"}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a key of alice; it is looked at again with every caller."""
    monkeypatch.setattr(gateway_keys, "LOOK_S", 0.0)
    path = tmp_path / "keys"
    api_keys.add(str(path), "alice", "a-key-that-alice-brings")
    return path


def test_callers_have_names_that_tell_keys_apart_and_do_not_show_them() -> None:
    keys = KeyRing(PLAIN)
    names = [keys.caller(bearer(key)).name for key in PLAIN.api_keys]
    assert len(set(names)) == 2 and all(names)
    assert not any("key" in name for name in names)
    alone = KeyRing(GatewayConfig(api_keys=("first-key",)))  # after a restart, at another gateway
    assert names[0] == alone.caller({"x-api-key": "first-key"}).name


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer ", "first-key", "Bearer first-ke", "Basic first-key"]
)
def test_others_are_not_let_in(given: str) -> None:
    for headers in ({"authorization": given}, {"x-api-key": given.replace("first-key", "")}, {}):
        with pytest.raises(Unauthorized, match="Bearer KEY"):
            KeyRing(PLAIN).caller(headers)


def test_without_keys_the_door_is_open() -> None:
    keys = KeyRing(GatewayConfig())
    assert keys.caller({}).name == keys.caller(bearer("anything")).name == ""


def test_a_browsers_password_reads_and_writes_from_our_own_page_only() -> None:
    keys, own, other = KeyRing(PLAIN), {"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "cross-site"}
    assert keys.reader(basic("first-key"), "GET").name == keys.caller(bearer("first-key")).name
    assert keys.reader(basic("first-key") | own, "POST").name
    assert keys.reader(bearer("first-key") | other, "POST").name  # a page that knows the key may use it
    for headers in (basic("first-key"), basic("first-key") | other, basic("wrong") | own, basic("") | own):
        with pytest.raises(Unauthorized):
            keys.reader(headers, "POST")
    for headers in ({"authorization": "Basic !"}, {"authorization": "Basic /w=="}, basic("wrong")):
        with pytest.raises(Unauthorized):
            keys.reader(headers, "GET")


def test_a_door_that_stands_open_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for host in ("127.0.0.1", "::1", "[::1]", "localhost"):
        warn_if_open(GatewayConfig(host=host))
    warn_if_open(dataclasses.replace(PLAIN, host="0.0.0.0"))
    warn_if_open(GatewayConfig(host="::", api_key_file="keys"))
    assert caplog.records == []
    for host in ("0.0.0.0", "::", "10.0.0.7", "gateway"):
        warn_if_open(GatewayConfig(host=host))
        assert f"listens on {host} without API keys" in caplog.records[-1].message
    assert len(caplog.records) == 4


# --- the file ----------------------------------------------------------------------------------------------


def test_a_file_has_names_and_no_keys(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("alice sha256:") and "brings" not in text
    assert file.stat().st_mode & 0o077 == 0
    keys = KeyRing(GatewayConfig(api_key_file=str(file)))
    assert keys.caller(bearer("a-key-that-alice-brings")).name == "alice"
    with pytest.raises(Unauthorized):
        keys.caller(bearer(text.split()[1].removeprefix("sha256:")))  # who reads the file is not let in


def test_a_file_that_changes_is_read_again(file: Path) -> None:
    keys = KeyRing(GatewayConfig(api_key_file=str(file)))
    api_keys.add(str(file), "bob", "a-key-that-bob-brings-too")
    assert keys.caller(bearer("a-key-that-bob-brings-too")).name == "bob"
    api_keys.remove(str(file), "alice")
    with pytest.raises(Unauthorized):
        keys.caller(bearer("a-key-that-alice-brings"))
    api_keys.remove(str(file), "bob")  # the last one: then every call is refused
    for key in ("a-key-that-bob-brings-too", ""):
        with pytest.raises(Unauthorized):
            keys.caller(bearer(key))


def test_a_file_that_turns_bad_changes_nothing_but_the_log(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, good = KeyRing(GatewayConfig(api_key_file=str(file))), file.read_text()
    for bad in (good + "oops\n", None, good):
        file.write_text(bad) if bad else file.unlink()
        for _ in range(3):
            assert keys.caller(bearer("a-key-that-alice-brings")).name == "alice"
    said = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(said) == 2 and all(str(file) in text and "the 1 keys before count" in text for text in said)
    assert "line 2" in said[0] and "cannot be read" in said[1]


def test_it_is_looked_at_once_in_a_while(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_keys, "LOOK_S", 60.0)
    keys = KeyRing(GatewayConfig(api_key_file=str(file)))
    os.unlink(file)
    monkeypatch.setattr(gateway_keys.os, "stat", lambda *_: pytest.fail("it was looked at"))
    assert keys.caller(bearer("a-key-that-alice-brings")).name == "alice"


HASH = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("eyas-a-secret-key-by-itself", "line 1: a line is NAME"),
        (f"# ours\n\na {HASH}\nb {HASH[:-1]}", "line 4: b has no SHA-256"),
        (f"a {HASH}\na {HASH}", "line 2: the name a is there twice"),
        (f"a {HASH} more", "line 1: a line is"),
        (f"a/b {HASH}", "line 1: a line is"),
        (f"a {HASH.upper()}", "line 1: a has no"),
        ("a eyas-a-secret-key-with-a-name", "line 1: a has no"),
        ("# \xff", "cannot be read"),
    ],
)
def test_a_bad_line_is_named_and_not_repeated(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=said) as caught:
        api_keys.read(str(path))
    assert str(path) in caught.value.message and "secret" not in caught.value.message


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("#" * (api_keys.MOST_BYTES + 1))
    with pytest.raises(ConfigError, match="more than"):
        api_keys.read(str(path))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    assert main(["keys", "add", str(path), "carol"]) == 0
    key = capsys.readouterr().out.strip()
    assert KeyRing(GatewayConfig(api_key_file=str(path))).caller(bearer(key)).name == "carol"
    path.write_text("# ours\n" + path.read_text())
    assert main(["keys", "add", str(path), "carol"]) == 2  # the first one stays valid
    assert "has a key of carol" in capsys.readouterr().err
    assert main(["keys", "add", str(path), "no name"]) == 2
    capsys.readouterr()
    assert main(["keys", "list", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.startswith(f"eyas: {tmp_path / 'absent'}: cannot be read")  # no flag's
    assert main(["keys", "add", str(path), "dan"]) == 0
    assert main(["keys", "remove", str(path), "carol"]) == 0
    capsys.readouterr()
    assert main(["keys", "list", str(path)]) == 0
    assert capsys.readouterr().out == "dan\n"
    assert path.read_text().startswith("# ours\ndan sha256:")
    assert os.listdir(tmp_path) == ["keys"]


def test_keys_that_are_added_at_once_are_all_kept(tmp_path: Path) -> None:
    path, names = str(tmp_path / "keys"), [f"caller-{i}" for i in range(24)]
    with ThreadPoolExecutor(8) as many:
        list(many.map(lambda name: api_keys.add(path, name, api_keys.new_key()), names))
        list(many.map(lambda name: api_keys.remove(path, name), names[::2]))
    assert {key.name for key in api_keys.read(path)} == set(names[1::2])
