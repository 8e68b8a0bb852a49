"""A prompt that goes from one worker to another by NIXL: the answers are those of one worker alone."""

from __future__ import annotations

import pytest

from eyas.common.config import NANO, NANO_HEAD
from kv_transfer.backends.table import missing
from tests.e2e.served import Folders, serving
from tests.e2e.two_hosts import chats

FOLDERS = Folders(str(NANO), str(NANO_HEAD))
PROMPTS = range(6)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(missing("nixl")), reason=missing("nixl"))
@pytest.mark.parametrize("path", ["default", "tcp"])
def test_answers_are_those_of_one_worker(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FOLDERS, "--layout", "unified") as alone:
        expected = [seen.said for seen in chats(alone.url, PROMPTS)]
    if path != "default":
        monkeypatch.setenv("UCX_TLS", path)
    with serving(FOLDERS, "--layout", "split", "--transfer", "nixl") as split:
        seen = chats(split.url, PROMPTS)
    assert [answer.status for answer in seen] == [200] * len(PROMPTS)
    assert [answer.said for answer in seen] == expected
    assert {answer.path for answer in seen} == {"nixl"}
    assert split.says("KV of worker") and split.says("NIXL reads from")
