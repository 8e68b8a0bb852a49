"""Renders chats in bounded time: most on the event loop, those with many steps in another process.

A template is a program. Most take some hundred steps per chat, which costs less than a call to another
process. One that takes more is aborted and restarted in `python -m gateway.text.rendering`, where its time
and its memory are limited. The first frame to that process has the template. Each later frame is a job as
JSON, which is answered with a frame: the text, or the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import select
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.machine.processes import python_module
from gateway.text.templates import ChatTemplate, TooManySteps

QUICK_STEPS = 5_000  # a few milliseconds, which the event loop can spare
RENDER_S = 5.0
MEMORY_BYTES = 1 << 30


class TemplateRenderer:
    """Renders chats with one template. Its process starts with the first chat that needs it."""

    def __init__(self, template: ChatTemplate, deadline_s: float = RENDER_S) -> None:
        self._template = template
        self._deadline_s = deadline_s
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def render(self, **chat: Any) -> str:
        """See `ChatTemplate.render`. Also raises InvalidRequest at the deadline."""
        try:
            return self._template.render(**chat, steps=QUICK_STEPS)
        except TooManySteps:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "render")
            job = msgspec.json.encode(chat)
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, job)
        if "error" in answer:
            raise InvalidRequest(answer["error"], param="messages")
        return answer["text"]

    def _ask(self, job: bytes) -> dict[str, str]:
        """Returns the answer of the process. Runs in a single thread, so jobs are sequential."""
        child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        end = time.monotonic() + self._deadline_s
        frame, reason = None, "the chat template needs too much memory"
        with contextlib.suppress(OSError):  # it has ended
            write_frame(child.stdin, job)
            if _is_readable(child.stdout.fileno(), end - time.monotonic()):
                frame = read_frame(child.stdout)
            else:
                reason = f"the chat template takes more than {self._deadline_s:g} s"
        if frame is not None:
            answer: dict[str, str] = msgspec.json.decode(frame)
            return answer
        self._child = None
        _end(child)
        return {"error": reason}

    def _start(self) -> subprocess.Popen[bytes]:
        command = python_module("gateway.text.rendering")
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._child = child
        weakref.finalize(self, _end, child)
        assert child.stdin is not None
        write_frame(child.stdin, msgspec.json.encode(self._template.definition))
        return child


def _is_readable(file: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(timeout_s, 0.0) * 1000))


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    child.wait()


def main(incoming: IO[bytes], outgoing: IO[bytes]) -> None:
    """Answers frames until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: ChatTemplate | None = None
    while (frame := read_frame(incoming)) is not None:
        job = msgspec.json.decode(frame)
        if template is None:
            template = ChatTemplate(job["sources"], job["special"])
        else:
            write_frame(outgoing, msgspec.json.encode(_rendered(template, job)))


def _rendered(template: ChatTemplate, job: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": template.render(**job)}
    except (InvalidRequest, TooManySteps) as error:
        return {"error": str(error)}


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Reads the next frame: its length in four bytes, then its bytes. None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    length = int.from_bytes(head, "little")
    data = stream.read(length)
    return data if len(data) == length else None


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Writes a frame."""
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
