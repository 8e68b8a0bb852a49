"""Servers of small models of families with much of their own: what a client gets is transformers' greedy
text, and the same by every way. A server of other equations is noticed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.families_served import ServedFamily

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("family", ["gemma4_tokens", "glm4_moe_lite", "falcon_groups"])
def test_a_client_gets_the_same_tokens_by_every_way(tmp_path: Path, family: str) -> None:
    served = ServedFamily.of(family, tmp_path, processes=True)
    assert not served.problems, served


def test_a_family_that_is_served_by_another_configuration_is_noticed(tmp_path: Path) -> None:
    served = ServedFamily.of("mistral", tmp_path, sliding_window=None)
    assert served.differ["transformers"] and not sum(served.differ.values()) - served.differ["transformers"]
