"""How fast pages come by `tcp` between two network namespaces, beside iperf3: `python -m tests.e2e.tcp_rate`.

The owner's process has an area of 2 MiB pages in shared memory on the far host; the puller reads all of them,
in turn with eight streams of iperf3 in the same direction. A line of JSON for each turn: GB/s, and seconds of
processors per GB at both ends together. Then the medians, the ratio of rates to iperf3's best, and that of
seconds. Rates need a quiet machine, for all of it shares its cores; seconds hardly do. Needs root, iproute2
and iperf3.
"""

from __future__ import annotations

import argparse
import json
import os
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
COPIES = 4  # of all pages, in a turn
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
    """The seconds that one copy of all pages takes."""
    pages, began = tuple(range(PAGES)), time.perf_counter()
    puller.start(source, CopyJob(1, number, RankPages(0, pages), pages))
    while not (results := puller.poll()):
        time.sleep(0.001)
    assert results[0].ok, results[0].error
    return time.perf_counter() - began


def pulled(puller: TcpBackend, source: Any, number: int, owner: int) -> tuple[float, float]:
    """GB/s of copies, and seconds of processors per GB; `owner`: the process at the other end."""
    used = time.process_time() + seconds_of(owner)
    seconds = [pull(puller, source, number + i) for i in range(COPIES)]
    gigabytes = COPIES * PAGES * PAGE / 1e9
    return gigabytes / sum(seconds), (time.process_time() + seconds_of(owner) - used) / gigabytes


def seconds_of(process: int) -> float:
    """Of processors, since it began."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def iperf(hosts: TwoHosts, seconds: int) -> tuple[float, float]:
    """GB/s that come from the far host, and seconds of processors per GB."""
    server = subprocess.Popen(hosts.on_far("iperf3", "-s", "-1"), stdout=subprocess.DEVNULL)
    time.sleep(0.5)
    words = ["iperf3", "-c", FAR_ADDRESS, "-P", str(SOCKETS), "-t", str(seconds), "-R", "-J"]
    done = subprocess.run(hosts.on_near(*words), capture_output=True, check=True, text=True)
    server.wait(10)
    end = json.loads(done.stdout)["end"]
    rate, used = end["sum_received"]["bits_per_second"] / 8e9, end["cpu_utilization_percent"]
    return rate, (used["host_total"] + used["remote_total"]) / 100 / rate


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
        rates: dict[str, list[tuple[float, float]]] = {"tcp": [], "iperf3": []}
        pull(puller, source, 0)
        for turn in range(turns):
            rates["tcp"].append(pulled(puller, source, 10 + COPIES * turn, owner.pid))
            rates["iperf3"].append(iperf(hosts, seconds))
            print(
                json.dumps({name: [round(x, 3) for x in each[-1]] for name, each in rates.items()}),
                flush=True,
            )
        medians = {
            name: [statistics.median(x) for x in zip(*each, strict=True)] for name, each in rates.items()
        }
        best = max(rate for rate, _ in rates["iperf3"])
        ratios = {"rates": medians["tcp"][0] / best, "seconds": medians["tcp"][1] / medians["iperf3"][1]}
        print(json.dumps(medians | {name: round(ratio, 3) for name, ratio in ratios.items()}))
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
