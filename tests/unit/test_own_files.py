"""Files of live processes stay, also of those that another PID namespace hides; those of ended ones go."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eyas.common.errors import ConfigError
from kv_transfer.host_files import new_path, own_prefix, sweep

OWNER = """
import sys
from pathlib import Path
from kv_transfer.host_files import new_path
for group in "target", "draft":
    new_path(group, Path(sys.argv[1])).touch()
print("there", flush=True)
sys.stdin.read()
"""
SWEEPER = """
import sys
from pathlib import Path
from kv_transfer.host_files import sweep
print(len(sweep(Path(sys.argv[1]))))
"""
NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def may_unshare() -> bool:
    return (
        shutil.which("unshare") is not None
        and not subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode
    )


@contextmanager
def owner(folder: Path, *wrapped: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has two files in `folder`."""
    command = [*wrapped, sys.executable, "-c", OWNER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


def data(folder: Path) -> set[Path]:
    return {path for path in folder.iterdir() if path.suffix != ".lock"}


def test_what_a_live_process_has_stays_and_what_a_killed_one_had_goes(tmp_path: Path) -> None:
    mine, foreign = new_path("target", tmp_path), tmp_path / "eyas-notes"
    mine.touch()
    foreign.touch()
    with owner(tmp_path) as process:
        theirs = data(tmp_path) - {mine, foreign}
        assert len(theirs) == 2 and sweep(tmp_path) == []
        process.kill()
        process.wait()
        assert set(sweep(tmp_path)) == theirs
    lock = tmp_path / f"{own_prefix(tmp_path)}.lock"
    assert set(tmp_path.iterdir()) == {mine, foreign, lock}


@pytest.mark.skipif(not may_unshare(), reason="this system lends no PID namespace")
def test_a_process_of_another_container_is_left_alone(tmp_path: Path) -> None:
    """Neither side has the other's process ids, and both may have the same one."""
    with owner(tmp_path, *NAMESPACE):
        there = data(tmp_path)
        assert sweep(tmp_path) == []
        command = [*NAMESPACE, sys.executable, "-c", SWEEPER, str(tmp_path)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0\n"
        assert data(tmp_path) == there


def test_a_lock_counts_and_not_the_process_id_in_a_name(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with owner(tmp_path):
        for path in tmp_path.iterdir():
            path.rename(tmp_path / path.name.replace(path.name.split("-")[1], str(gone.pid)))
        there = set(tmp_path.iterdir())
        assert sweep(tmp_path) == [] and set(tmp_path.iterdir()) == there
    left = tmp_path / f"eyas-{os.getpid()}-ab12-target"  # a process id of now, and nobody's lock
    lock = tmp_path / f"eyas-{os.getpid()}-ab12.lock"
    for path in (left, lock):
        path.touch()
    assert left in sweep(tmp_path) and not lock.exists()


def test_an_end_in_good_order_leaves_nothing(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_make_and_leave, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 3 and not list(tmp_path.iterdir())


def _make_and_leave(folder: Path) -> None:
    new_path("target", folder).touch()
    sys.exit(3)


def test_strange_entries_of_a_shared_folder_are_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "eyas-1-a.lock")
    (tmp_path / "eyas-2-b.lock").symlink_to(tmp_path / "eyas-notes")
    (tmp_path / "eyas-3-c.lock").mkdir()
    assert sweep(tmp_path) == []


def test_a_folder_that_can_hold_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere cannot hold KV pages: No such file or directory"):
        own_prefix(tmp_path / "nowhere")
