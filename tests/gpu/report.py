"""What a script on a GPU finds, part by part: printed, kept as JSON lines, and counted where it failed."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas.bench.output import append_line


class Report:
    """Tells lines, and counts what failed; parts that begin too late are left out."""

    def __init__(self, out: Path | None, seconds: float) -> None:
        self._out, self._end, self.failed = out, time.monotonic() + seconds, 0

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def tell(self, part: str, found: dict[str, Any]) -> None:
        """A line with `ok` passes or fails."""
        verdict = {True: "PASS", False: "FAIL", None: "    "}[found.get("ok")]
        self.failed += verdict == "FAIL"
        print(f"{verdict} {part}: {json.dumps(found)}", flush=True)
        if self._out:
            append_line(self._out, {"part": part} | found)

    def run(self, part: str, work: Callable[[], dict[str, Any]]) -> None:
        if self.left < 5:
            print(f"     {part}: no time left", flush=True)
            return
        try:
            self.tell(part, work())
        except Exception:
            traceback.print_exc()
            self.tell(part, {"ok": False, "error": traceback.format_exc()[-800:]})
