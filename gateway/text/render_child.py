"""The process that renders what takes long: `python -m gateway.text.render_child`.

The first frame has the template. Each later one, a job as JSON, is answered with a frame: the text, or why
there is none. Memory has a limit, and who asks kills this process when it takes too long.
"""

from __future__ import annotations

import resource
import sys
from typing import IO, Any

import msgspec

from eyas.common.errors import InvalidRequest
from gateway.text.templates import ChatTemplate, TooManySteps

MEMORY_BYTES = 1 << 30


def main(incoming: IO[bytes], outgoing: IO[bytes]) -> None:
    """Answers frames until there are no more."""
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
    """The next frame: its length in four bytes, then as many bytes. None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    length = int.from_bytes(head, "little")
    data = stream.read(length)
    return data if len(data) == length else None


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Writes one."""
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
