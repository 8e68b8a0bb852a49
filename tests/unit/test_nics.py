"""Which RDMA cards lie near a GPU, on sysfs trees of files."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from eyas.common.errors import ConfigError
from kv_transfer import nics
from kv_transfer.nics import RdmaCard

UP, DOWN = "4: ACTIVE", "1: DOWN"


class Tree:
    """A sysfs. `root/switch/device` is a way on the PCIe tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("bus/pci/devices", "bus/pci/drivers", "class/infiniband"):
            (root / folder).mkdir(parents=True)

    def device(self, way: str, node: int = -1) -> Path:
        parts = way.split("/")
        path = self.root / "devices" / f"pci{parts[0]}" / "/".join(parts[1:])
        path.mkdir(parents=True, exist_ok=True)
        (path / "numa_node").write_text(f"{node}\n")
        (self.root / "bus/pci/devices" / parts[-1]).symlink_to(path)
        return path

    def card(
        self, name: str, way: str, state: str = UP, node: int = -1, rate: str = "400 Gb/sec", driver: str = ""
    ) -> None:
        path = self.device(way, node)
        if driver:
            (self.root / "bus/pci/drivers" / driver).mkdir(exist_ok=True)
            (path / "driver").symlink_to(self.root / "bus/pci/drivers" / driver)
        port = self.root / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text(rate + " (4X NDR)\n")
        (self.root / "class/infiniband" / name / "device").symlink_to(path)

    def near(self, gpu: str) -> list[str]:
        return [card.name for card in nics.near(gpu, self.root)]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_each_gpu_has_the_cards_behind_its_own_switch(tree: Tree) -> None:
    """As in a machine of eight: per switch a GPU and a card, two switches per root."""
    for i in range(8):
        root, switch = f"0000:{i // 2}0", f"0000:{i // 2}0:0{i % 2}.0/0000:{i}1:00.0"
        tree.device(f"{root}/{switch}/0000:{i}2:00.0/0000:{i}4:00.0", i // 4)
        tree.card(f"mlx5_{i}", f"{root}/{switch}/0000:{i}2:01.0/0000:{i}5:00.0", node=i // 4)
    for i in range(8):
        assert tree.near(f"0000:{i}4:00.0") == [f"mlx5_{i}"]


def test_without_a_switch_in_common_the_node_decides_and_without_that_all_are_equal(tree: Tree) -> None:
    tree.device("0000:10/0000:10:01.0", 0)
    tree.device("0000:11/0000:11:01.0")
    tree.card("a", "0000:20/0000:20:01.0", node=0)
    tree.card("b", "0000:30/0000:30:01.0", node=1)
    assert tree.near("0000:10:01.0") == ["a"]
    assert tree.near("0000:11:01.0") == ["a", "b"], "-1: a machine that does not tell"
    assert tree.near("0000:77:00.0") == ["a", "b"], "no such GPU"


def test_cards_that_are_down_or_unfit_are_not_taken(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    tree.device("0000:10/0000:10:00.0/0000:11:00.0")
    tree.card("near", "0000:10/0000:10:00.0/0000:12:00.0", DOWN)
    tree.card("efa", "0000:10/0000:10:00.0/0000:13:00.0", driver="efa")
    tree.card("far", "0000:20/0000:20:00.0", rate="100 Gb/sec")
    far = RdmaCard("far", 12.5e9)
    assert nics.near("0000:11:00.0", tree.root) == [far]
    with caplog.at_level(logging.WARNING):
        assert nics.named(["near", "far", "efa"], tree.root) == [far]
    assert "near is not used: the state of its port is 1: DOWN" in caplog.text
    assert "efa is not used: it cannot read a GPU's pool" in caplog.text


def test_names_that_this_host_does_not_have_are_refused(tree: Tree) -> None:
    with pytest.raises(ConfigError, match="mlx5_9 is no RDMA card of this host, which has none") as refused:
        nics.named(["mlx5_9"], tree.root)
    assert refused.value.param == "transfer-devices"
    tree.card("a", "0000:20/0000:20:01.0")
    with pytest.raises(ConfigError, match="b is no RDMA card of this host, which has a"):
        nics.named(["a", "b"], tree.root)


def test_files_that_say_nothing_stop_nothing(tree: Tree, tmp_path: Path) -> None:
    assert nics.near("0000:00:00.0", tmp_path / "nowhere") == []
    tree.card("a", "0000:20/0000:20:01.0", rate="")
    port = tree.root / "class/infiniband/a/ports/1"
    assert nics.near("", tree.root)[0].bytes_per_s == 0.0
    for text in ("?", "", "fast Gb/sec", "400 Tb/sec"):
        (port / "rate").write_text(text)
        assert nics.near("", tree.root)[0].bytes_per_s == 0.0
    (port / "state").unlink()
    assert nics.near("", tree.root) == []


def test_a_card_that_is_taken_shares_at_least_as_much_as_any_other(tree: Tree) -> None:
    """Random trees: no port that is up lies nearer than those that are taken, and one is always taken."""
    pick = random.Random(5)
    ways: dict[str, list[str]] = {}
    for i in range(12):
        way = [f"0000:{pick.randrange(2)}0"]
        for _ in range(pick.randrange(4)):
            way.append(f"{way[-1]}:{pick.randrange(2)}")
        leaf = f"0000:{i:02x}:00.0"
        (tree.device if i < 6 else lambda way, i=i: tree.card(f"c{i}", way))("/".join([*way, leaf]))
        ways[leaf if i < 6 else f"c{i}"] = way

    def shared(gpu: str, port: str) -> int:
        pairs = list(zip(ways[gpu], ways[port], strict=False))
        return next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))

    ports = [name for name in ways if name.startswith("c")]
    for gpu in set(ways) - set(ports):
        taken = tree.near(gpu)
        most = max(shared(gpu, port) for port in ports)
        assert taken and {shared(gpu, port) for port in taken} == {most}


def test_a_card_is_up_if_its_port_is_active(tree: Tree) -> None:
    assert not nics.any_up(tree.root)
    tree.card("mlx5_0", "0000:00/0000:01:00.0", DOWN)
    assert not nics.any_up(tree.root)
    tree.card("efa0", "0000:00/0000:02:00.0", driver="efa")
    assert nics.any_up(tree.root)
