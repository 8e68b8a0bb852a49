"""Log lines of every process, on standard error: plain text for people, or one JSON object per line.

In JSON all is a record: warnings, what nobody caught, what a process says at its start, and what a child
writes that is none. Each line names the ids by which a request is found in logs and traces; a worker logs one
line per request, which ties the caller's id to the cluster's. In processes that read what users say,
tracebacks have frames and types alone, for an exception's words may quote a request.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import logging
import os
import re
import secrets
import stat
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from eyas.common.types import GenerationRequest

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
RARELY_S = 60.0
REMIND_S, REMIND_RAREST_S = 30.0, 1800.0
"""Seconds from the first line of an outage to a reminder; each later wait is twice the one before, up to the
second of these times."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # would move a terminal's cursor, or begin a line
_BRACKETS = re.compile(r"[\s\[\]\\]")  # would end an id before its end
# The X-Request-Id of the request that this code serves, and its W3C traceparent, if it is traced. Tasks
# inherit them from the code that starts them.
request_id: ContextVar[str] = ContextVar("request_id", default="")
traceparent: ContextVar[str] = ContextVar("traceparent", default="")


def _shown(match: re.Match[str]) -> str:
    return f"\\x{ord(match[0]):02x}"


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


def setup(process: str, format: str = "text", level: str = "info", *, reads_text: bool = False) -> None:
    """Sets up logging, once per process, before anything else; `process` is its name in each line.

    `level`: one of `LEVELS`; for other packages' lines at least info. `reads_text`: it sees prompts and
    answers as text.
    """
    handler = logging.StreamHandler(LossyFile(sys.stderr))
    formatter = JsonFormatter if format == "json" else TextFormatter
    handler.setFormatter(formatter(process, reads_text))
    least = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(least, logging.INFO), handlers=[handler], force=True)
    logging.getLogger("eyas").setLevel(least)
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: _uncaught("nobody caught this", error)
    threading.excepthook = lambda args: _uncaught("a thread ended by this", args.exc_value)
    sys.unraisablehook = lambda args: _uncaught(args.err_msg or "nothing could raise this", args.exc_value)


class LossyFile(io.TextIOBase):
    """A file of lines for people, of which those are lost that a full disk, or the pipe of a reader that has
    stopped, does not take: they would end, or stop, who writes them.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._is_pipe = False
        self._rest = b""  # of a line that the pipe took in part
        self._writing = threading.RLock()
        with contextlib.suppress(OSError):  # some tests' standard error is no file of the system
            if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
                self._is_pipe = True
                _unblock(file.fileno())

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the file."""
        return self._file.encoding

    def isatty(self) -> bool:
        """Whether the file is a terminal."""
        return self._file.isatty()

    def fileno(self) -> int:
        """The file's number."""
        return self._file.fileno()

    def write(self, text: str) -> int:
        """Writes the text, if that can be done now."""
        with contextlib.suppress(OSError):
            if self._is_pipe:
                self._put(text.encode(self.encoding, "backslashreplace"))
            else:
                self._file.write(text)
        return len(text)

    def _put(self, text: bytes) -> None:
        """Writes the text to the pipe, or nothing of it. The pipe may take a part of more than 4 KiB, whose
        rest goes before any other text. Raises BlockingIOError if the pipe is full.
        """
        with self._writing:
            self._rest = self._rest and self._rest[os.write(self.fileno(), self._rest) :]
            if not self._rest:
                self._rest = text[os.write(self.fileno(), text) :]

    def flush(self) -> None:
        """Writes what the file has buffered, if that can be done now."""
        with contextlib.suppress(OSError):
            self._file.flush()


def _unblock(pipe: int) -> None:
    """Writes to this number no longer wait. Where the system can open the pipe anew, those of others to the
    pipe still do: of other processes, and of standard output that leads there too.
    """
    try:
        own = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # another system, or another user's pipe
        os.set_blocking(pipe, False)
    else:
        os.dup2(own, pipe)
        os.close(own)


def _uncaught(what: str, error: BaseException | None) -> None:
    if isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(type(error), error, error.__traceback__)
    else:
        logging.getLogger("eyas").critical(what, exc_info=error)


def announce(line: str, level: int = logging.INFO) -> None:
    """Writes a line that others may wait for: as it is, or in JSON as the message of a record.

    As any line of a log it is lost if it cannot be written: a full disk ends no server.
    """
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers):
        logger = logging.getLogger("eyas")  # whatever its level
        logger.handle(logger.makeRecord(logger.name, level, __file__, 0, "%s", (line,), None))
    else:
        print(line, file=LossyFile(sys.stderr), flush=True)


def as_record(process: str, line: str) -> str:
    """A line of a child's output in JSON: its own record with the child's name as `service`, or a new one."""
    record = _record_in(line)
    if record is None:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        record = {"time": now, "level": "INFO", "process": process, "logger": "output", "message": line}
    elif record.get("process") != process:
        record["service"] = process
    return json.dumps(record, ensure_ascii=False)


def message_in(line: str) -> str:
    """Returns the message of a line: of a record, or the line itself."""
    record = _record_in(line)
    return line if record is None else str(record["message"])


def _record_in(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record if "message" in record else None


class RateLimitedLogger:
    """A logger for what callers can cause often: it writes one line per `RARELY_S` and drops the others."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._next = 0.0

    def warning(self, message: str, *args: object) -> None:
        """Logs a warning, unless a line was written too recently."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + RARELY_S
            self._log.warning(message, *args)


class OutageLog:
    """The log of something that fails for a while: a line when it fails, reminders while that lasts, each
    after twice as long as the one before, and a line when it works again. Any thread may call it.

    `grace_s`: a failure that is over within this time is not logged.
    """

    def __init__(self, log: logging.Logger, grace_s: float = 0.0) -> None:
        self._log = log
        self._grace_s = grace_s
        self._lock = threading.Lock()
        self._logged = False  # since it fails
        self._due = 0.0  # the next line, in monotonic seconds
        self._wait_s = 0.0  # between that one and the one after it
        self.since = 0.0
        """When it failed, in seconds since the epoch; 0.0: it works."""

    def failed(self, message: str, *args: object) -> None:
        """It fails, or still does. Logs that if a line is due."""
        with self._lock:
            now = time.monotonic()
            if not self.since:
                self.since, self._logged = time.time(), False
                self._due, self._wait_s = now + self._grace_s, REMIND_S
            if now < self._due:
                return
            self._logged = True
            self._due, self._wait_s = now + self._wait_s, min(2 * self._wait_s, REMIND_RAREST_S)
        self._log.warning(message, *args)

    def works(self, message: str, *args: object) -> None:
        """It works. Logs that if its failure was logged."""
        with self._lock:
            logged, self.since = self.since and self._logged, 0.0
        if logged:
            self._log.warning(message, *args)


class TextFormatter(logging.Formatter):
    """One line per record, in the end the id of the request that is served, and a traceback if there is one.

    `reads_text` as for `setup`.
    """

    def __init__(self, process: str, reads_text: bool = False) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {process} %(name)s: %(message)s", "%H:%M:%S")
        self._reads_text = reads_text

    def format(self, record: logging.LogRecord) -> str:
        """The record's line and its traceback, never the one that another handler's formatter left in it."""
        record.exc_text = None
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, before any exception."""
        line = super().formatMessage(record)
        if id := request_id.get():
            line += f" [{_BRACKETS.sub(_shown, id)}]"
        return _CONTROLS.sub(_shown, line)

    def formatException(self, ei: Any) -> str:
        """The traceback, without the exceptions' words in a process that reads text."""
        return wordless(ei[1]) if self._reads_text else super().formatException(ei)


def wordless(error: BaseException) -> str:
    """The traceback of an exception and of its causes: frames and types."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    parts = [] if before is None else [wordless(before)]
    parts += [
        "Traceback (most recent call last):",
        "".join(traceback.format_tb(error.__traceback__)).rstrip(),
    ]
    parts.append(f"{type(error).__module__}.{type(error).__qualname__} (its words may quote a request)")
    if isinstance(error, BaseExceptionGroup):
        parts += map(wordless, error.exceptions)
    return "\n".join(parts)


class JsonFormatter(TextFormatter):
    """One JSON object per record.

    time (UTC), level, process, logger, message; request_id, trace_id and exception if there is one.
    """

    def __init__(self, process: str, reads_text: bool = False) -> None:
        super().__init__(process, reads_text)
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


def log_request(log: logging.Logger, request: GenerationRequest, attempt: int) -> None:
    """Logs that a worker was given a request. Canaries have no caller, and no line."""
    if request.request_id:
        with serving(request.request_id, request.traceparent):
            log.info("request %s, attempt %d: %d prompt tokens", request.id, attempt, len(request.prompt_ids))
