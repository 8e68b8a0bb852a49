"""Where a streamed Markdown block ends."""

from __future__ import annotations

import pytest

from eyas.client.prose import split_blocks

TEXT = "Hello\nthere.\n\n```python\n\nx = 1\n```\n\n~~~\n```\n\n~~~\n\nThe end"
BLOCKS = ["Hello\nthere.\n\n", "```python\n\nx = 1\n```\n\n", "~~~\n```\n\n~~~\n\n", "The end"]


@pytest.mark.parametrize("stride", [1, 2, 3, 7, len(TEXT)])
def test_blocks_do_not_depend_on_how_the_text_is_cut(stride: int) -> None:
    printed, rest = "", ""
    for start in range(0, len(TEXT), stride):
        whole, rest = split_blocks(rest + TEXT[start : start + stride])
        printed += whole
    assert printed == "".join(BLOCKS[:-1]) and rest == BLOCKS[-1]


def test_an_open_fence_is_never_cut() -> None:
    assert split_blocks("a\n\n```\nb\n\nc\n\n") == ("a\n\n", "```\nb\n\nc\n\n")
