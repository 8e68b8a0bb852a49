"""Log lines of every process, on standard error: plain text for people, or one JSON object per line.

It knows the two formats, and the id of the request that is being served. It refuses to know what is logged.
"""

from __future__ import annotations

import datetime
import json
import logging
import time
from contextvars import ContextVar

FORMATS = ("text", "json")

# The X-Request-Id of the request that this code serves; tasks inherit it from the code that starts them.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def setup(process: str, format: str = "text") -> None:
    """Called once per process, before anything else; `process` is its name in each line."""
    text = logging.Formatter(f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s", "%H:%M:%S")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class Rarely:
    """A logger for what callers can cause often: it writes one line per `every_s` and drops the others."""

    def __init__(self, log: logging.Logger, every_s: float = 60.0) -> None:
        self._log = log
        self._every_s = every_s
        self._next = 0.0

    def warning(self, message: str, *args: object) -> None:
        """As `logging.Logger.warning`, unless a line was written too recently."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            self._log.warning(message, *args)


class JsonFormatter(logging.Formatter):
    """One JSON object per record.

    time (UTC), level, process, logger, message; request_id and exception if there is one.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The record's line, without a newline."""
        line = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id.get():
            line["request_id"] = request_id.get()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
