"""Renders chats within bounds of time: most at once, and what takes many steps in a process of its own.

A template is a program. Most take some hundred steps per chat, which is less than asking another process
costs. One that takes more is given up and begun anew there, where its deadline ends it whatever it is doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import subprocess
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.machine.processes import python_module
from gateway.text.render_child import read_frame, write_frame
from gateway.text.templates import ChatTemplate, TooManySteps

QUICK_STEPS = 5_000  # a few milliseconds, which the event loop can spare
RENDER_S = 5.0


class TemplateRenderer:
    """Renders with one template. Its process starts with the first chat that needs it."""

    def __init__(self, template: ChatTemplate, deadline_s: float = RENDER_S) -> None:
        self._template = template
        self._deadline_s = deadline_s
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def render(self, **chat: Any) -> str:
        """`ChatTemplate.render` of these arguments. InvalidRequest at the deadline, beside what it raises."""
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
        """The process's answer. One thread runs this, so jobs wait for one another."""
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
        command = python_module("gateway.text.render_child")
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
