"""Two network namespaces and the cable between them: the short form of `make two-hosts`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kv_transfer.backends.table import missing
from tests.e2e.namespaces import problem

ROOT = Path(__file__).resolve().parents[2]
REASON = problem()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(REASON), reason=f"two hosts cannot be made here: {REASON}")
@pytest.mark.parametrize("transfer", ["grpc", "nixl", "tcp"])
@pytest.mark.parametrize("cable", ["--cut 8", "--cut 0.7 --times 10 --loss 1 --mbit 100"])
def test_a_pulled_cable_loses_no_text(transfer: str, cable: str) -> None:
    if reason := missing(transfer):
        pytest.skip(reason)
    if "--loss" in cable and not (shutil.which("nft") and shutil.which("tc")):
        pytest.skip("a bad cable needs nft and tc")
    command = [sys.executable, "-m", "tests.e2e.two_hosts", *cable.split(), "--transfer", transfer]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(REASON), reason=f"two hosts cannot be made here: {REASON}")
@pytest.mark.parametrize("ranks", [("2", "1"), ("1", "2"), ("2", "2")])
def test_a_pulled_cable_between_groups_of_ranks_loses_no_answer(ranks: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "tests.e2e.rank_hosts", "--ranks", *ranks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
