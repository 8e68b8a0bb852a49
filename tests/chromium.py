"""A headless Chromium that tests drive, by its DevTools protocol over a pipe: no library and no port.

It knows how to start and end one, and pages that load, evaluate, type and are photographed. It refuses to
know what they show.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --no-first-run "
    "--disable-background-networking --remote-debugging-pipe"
)
WAIT_S = 30.0


def installed() -> str | None:
    """The path of a Chromium on this machine; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A running Chromium. It reads commands at its descriptor 3 and answers at 4, each ended by a NUL."""

    def __init__(self, command: int, answers: int) -> None:
        self._command = command
        self._answers = answers
        self._ids = itertools.count(1)
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """A command's result. What happens meanwhile is added to `events`. Raises RuntimeError on failure."""
        id = next(self._ids)
        message: dict[str, Any] = {"id": id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._command, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next(time.monotonic() + WAIT_S)
            if said.get("id") != id:
                self.events.append(said)
            elif "error" in said:
                raise RuntimeError(f"{method}: {said['error']}")
            else:
                result: dict[str, Any] = said["result"]
                return result

    def open(self, width: int, height: int) -> Page:
        """An empty page of this size, in CSS pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        return page

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0.0))
            part = os.read(self._answers, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("Chromium does not answer")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        said: dict[str, Any] = json.loads(line)
        return said


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command to this page."""
        return self._browser.call(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        """Gives the page this size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """What the system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def send_with_all(self, headers: Mapping[str, str]) -> None:
        """Sends these headers with every request, as a browser that knows a password does."""
        self.call("Network.setExtraHTTPHeaders", headers=dict(headers))

    def go(self, url: str) -> None:
        """Loads a page and waits until its scripts have run."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """The value of a script, a promise's too. Raises RuntimeError for what it throws."""
        said = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in said:
            raise RuntimeError(f"{script}: {said['exceptionDetails']}")
        return said["result"].get("value")

    def wait(self, script: str, timeout_s: float = WAIT_S) -> None:
        """Returns once the script is true. Raises TimeoutError that names it."""
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(f"Boolean({script})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.05)

    def press(self, key: str, code: int = 0, text: str = "") -> None:
        """A key, as a keyboard sends it."""
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Text into what has the focus."""
        self.call("Input.insertText", text=text)

    def photograph(self, path: Path) -> None:
        """What is seen, as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Exceptions, refused requests and broken policies of this page so far."""
        self.evaluate("0")  # what has happened is told by now
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(event["params"]["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser with a profile of its own, ended at the end. Raises FileNotFoundError where there is none."""
    path = installed()
    if path is None:
        raise FileNotFoundError(f"no Chromium on this machine: none of {', '.join(NAMES)}")
    commands, answers = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = f"exec {shlex.quote(path)} {FLAGS} --user-data-dir={profile} 3<&{commands[0]} 4>&{answers[1]}"
        process = subprocess.Popen(
            ["bash", "-c", words], pass_fds=(commands[0], answers[1]), stderr=subprocess.DEVNULL
        )
        os.close(commands[0])
        os.close(answers[1])
        try:
            browser = Browser(commands[1], answers[0])
            yield browser
            with contextlib.suppress(OSError, RuntimeError, TimeoutError):
                browser.call("Browser.close")
        finally:
            os.close(commands[1])
            os.close(answers[0])
            process.terminate()
            process.wait()
