"""What services log about a request, in both formats."""

from __future__ import annotations

import json
import logging

from eyas.common.logging import JsonFormatter, TextFormatter
from eyas.common.types import Role

PROMPT = {"model": "eyas-nano", "prompt": list(range(5, 45)), "max_tokens": 4, "seed": 1}
SPLIT = ((Role.PREFILL,), (Role.DECODE,))


class Lines(logging.Handler):
    """What is logged, as both formats write it."""

    def __init__(self) -> None:
        super().__init__()
        self.json: list[dict[str, str]] = []
        self.text: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.json.append(json.loads(JsonFormatter("p").format(record)))
        self.text.append(TextFormatter("p").format(record))
