"""Log lines of every process, on standard error: plain text for people, or one JSON object per line.

It knows the two formats, and by which ids a request is found in logs and traces. It refuses to know what is
logged.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import re
import secrets
import time
from collections.abc import Iterator
from contextvars import ContextVar

FORMATS = ("text", "json")

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

# The X-Request-Id of the request that this code serves, and its W3C traceparent, if it is traced. Tasks
# inherit them from the code that starts them.
request_id: ContextVar[str] = ContextVar("request_id", default="")
traceparent: ContextVar[str] = ContextVar("traceparent", default="")


def known_as(given: str) -> str:
    """The id that a caller gave its request, or a new one if that cannot stand in a log."""
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


@contextlib.contextmanager
def serving(id: str, parent: str = "") -> Iterator[None]:
    """Names the request in lines logged meanwhile. `parent`: its traceparent."""
    ids = request_id.set(id), traceparent.set(parent)
    try:
        yield
    finally:
        request_id.reset(ids[0])
        traceparent.reset(ids[1])


def setup(process: str, format: str = "text") -> None:
    """Called once per process, before anything else; `process` is its name in each line."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
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


class TextFormatter(logging.Formatter):
    """A line for people; it ends in the request's id in brackets, if one is served."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, before any exception."""
        line = super().formatMessage(record)
        return f"{line} [{id}]" if (id := request_id.get()) else line


class JsonFormatter(logging.Formatter):
    """One JSON object per record.

    time (UTC), level, process, logger, message; request_id, trace_id and exception if there is one.
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
        if traceparent.get():
            line["trace_id"] = traceparent.get().split("-")[1]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
