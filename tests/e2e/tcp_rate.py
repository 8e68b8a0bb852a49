"""How fast pages come by `tcp` between two network namespaces, beside iperf3: `python -m tests.e2e.tcp_rate`.

The owner's process has an area of 2 MiB pages in shared memory on the far host; the puller reads all of them,
in turn with eight streams of iperf3 in the same direction. A line of JSON for each turn, then the medians and
their ratio. Needs root, iproute2 and iperf3; a quiet machine, for all of it shares its cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from eyas.common.config import SHARED_MEMORY
from eyas.common.types import RankPages
from kv_transfer.area import PoolArea, create_file
from kv_transfer.backends.base import BackendSite, CopyJob, TransferWire
from kv_transfer.backends.tcp import TcpBackend
from kv_transfer.backends.tcp_reads import SOCKETS
from tests.e2e.namespaces import FAR_ADDRESS, TwoHosts, problem, two_hosts

PAGE, PAGES = 2 << 20, 256
NO_WIRE = cast(TransferWire, None)  # nothing is staged here


def backend(folder: Path) -> TcpBackend:
    memory = create_file(folder / "area", (PAGES + 1) * PAGE)
    area = PoolArea.new(memoryview(memory), PAGE, str(folder / "area"))
    area.pages[:] = area.pages[-1]
    return TcpBackend(BackendSite(area, str(folder), NO_WIRE, host=FAR_ADDRESS))


def own(folder: Path) -> None:
    """The far host's process: writes its export, and waits for its end."""
    export = backend(folder).export()
    assert export is not None
    print(json.dumps({name: value.hex() for name, value in export.items()}), flush=True)
    sys.stdin.read()


def pull(puller: TcpBackend, source: Any, number: int) -> float:
    """Gigabytes a second."""
    pages, began = tuple(range(PAGES)), time.perf_counter()
    puller.start(source, CopyJob(1, number, RankPages(0, pages), pages))
    while not (results := puller.poll()):
        time.sleep(0.001)
    assert results[0].ok, results[0].error
    return PAGES * PAGE / (time.perf_counter() - began) / 1e9


def iperf(hosts: TwoHosts, seconds: int) -> float:
    """Gigabytes a second that come from the far host."""
    server = subprocess.Popen(hosts.on_far("iperf3", "-s", "-1"), stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    words = ["iperf3", "-c", FAR_ADDRESS, "-P", str(SOCKETS), "-t", str(seconds), "-R", "-J"]
    done = subprocess.run(hosts.on_near(*words), capture_output=True, check=True, text=True)
    server.wait(10)
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9


def measure(turns: int, seconds: int) -> None:
    with two_hosts() as hosts, TemporaryDirectory(dir=SHARED_MEMORY) as top:
        far, near = Path(top, "far"), Path(top, "near")
        for folder in (far, near):
            folder.mkdir()
        words = hosts.on_far(sys.executable, "-m", "tests.e2e.tcp_rate", "--own", str(far))
        owner = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert owner.stdout is not None
        export = {name: bytes.fromhex(value) for name, value in json.loads(owner.stdout.readline()).items()}
        puller = backend(near)
        source = puller.open(export)
        rates: dict[str, list[float]] = {"tcp": [], "iperf3": []}
        pull(puller, source, 0)
        for turn in range(turns):
            count = 1 + 2 * turn
            rates["tcp"].append(statistics.mean(pull(puller, source, 10 * count + i) for i in range(4)))
            rates["iperf3"].append(iperf(hosts, seconds))
            print(json.dumps({name: round(each[-1], 3) for name, each in rates.items()}), flush=True)
        medians = {name: statistics.median(each) for name, each in rates.items()}
        print(json.dumps(medians | {"ratio": round(medians["tcp"] / max(rates["iperf3"]), 3)}))
        owner.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="of each turn of iperf3 (2)")
    parser.add_argument("--own", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.own:
        own(args.own)
        return 0
    if reason := problem():
        print(reason, file=sys.stderr)
        return 1
    measure(args.turns, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
