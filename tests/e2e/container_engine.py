"""A container engine in a folder of its own: podman, with images that need no registry.

It knows what an engine may not do here: raise limits, run health checks by systemd, fetch an image. The
base image is then made of Debian's packages, and pip's configuration and local packages of this machine are
mounted while an image is built. It refuses to know what a compose file says.
"""

from __future__ import annotations

import configparser
import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

IMAGE = "docker.io/library/eyas:cpu"
BASE = "docker.io/library/python:3.11-slim"
REDIS = "docker.io/library/redis:7-alpine"
USER = "10001"
PROGRAMS = ("podman", "buildah", "runc", "debootstrap", "catatonit")
NETWORK_PROGRAMS = (Path("/usr/lib/podman/netavark"), Path("/usr/lib/podman/aardvark-dns"))
INSTALLED = "podman buildah runc debootstrap catatonit netavark aardvark-dns"
PACKAGES = "python3,python3-venv,ca-certificates,redis-server"
MOST_PROCESSES = 32768  # to which podman lowers its own limit
NAMES = Path("/run/containers/networks/aardvark-dns")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def problem() -> str:
    """Why no container can run here; empty if they can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [path.name for path in NETWORK_PROGRAMS if not path.exists()]
    if missing:
        return f"make containers: {', '.join(missing)} not installed (Debian's: {INSTALLED})"
    return "" if os.geteuid() == 0 else "make containers: only root may"


class EngineError(Exception):
    """A command of the engine failed: its words, and what it said."""


class Engine:
    """podman and podman-compose, whose images and state are below `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._podman = folder / "podman"
        self._stores = [
            "--root",
            str(folder / "storage"),
            "--runroot",
            str(folder / "run"),
            "--storage-driver",
            "overlay",
        ]
        self.environment = dict(os.environ) | {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "DISABLE_HC_SYSTEMD": "true",
            "EYAS_IMAGE": IMAGE,
        }
        self.does_without = self._configure()
        self.compose = [*self._composer(), "--podman-path", str(self._podman)]

    def _configure(self) -> list[str]:
        """Writes the engine's configuration; says what this machine does not allow."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        processes = min(resource.getrlimit(resource.RLIMIT_NPROC)[1], MOST_PROCESSES)
        limits = f'default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]'
        text = f'[containers]\n{limits}\n[network]\nnetwork_backend = "netavark"\n'
        (self._folder / "containers.conf").write_text(text)
        words = ["podman", *self._stores, "--cgroup-manager", "cgroupfs", "--runtime", "runc"]
        self._podman.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        self._podman.chmod(0o755)
        return [f"limits of containers: {files} files, {processes} processes, as none may be raised here"]

    def _composer(self) -> list[str]:
        """podman-compose, of this folder."""
        there = self._folder / "podman-compose"
        if not there.exists():
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--target",
                str(there),
                "podman-compose",
            ]
            subprocess.run(command, check=True)
        return [sys.executable, str(there / "podman_compose.py")]

    def podman(self, *words: str, limit_s: float = 300.0) -> str:
        """What podman says. Raises EngineError if it fails."""
        return self._run([str(self._podman), *words], limit_s)

    def succeeds(self, *words: str) -> bool:
        try:
            self.podman(*words, limit_s=30.0)
        except (EngineError, subprocess.TimeoutExpired):
            return False
        return True

    def said(self, name: str) -> str:
        """The last lines of a container's log."""
        command = [str(self._podman), "logs", "--tail", "15", name]
        return subprocess.run(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ).stdout

    def started(self, name: str) -> str:
        """When a container was started, last."""
        return self.podman("inspect", "--format", "{{.State.StartedAt}}", name).strip()

    @staticmethod
    def forget_names(network: str) -> None:
        """Removes the names of a network that is gone. The engine's name server keeps those of killed
        containers: the next cluster would look for its Redis where none is. Without names it ends.
        """
        (NAMES / network).unlink(missing_ok=True)
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((NAMES / "aardvark.pid").read_text()), signal.SIGHUP)

    def make_base(self) -> None:
        """The base and Redis images, unless they are here: one, of Debian's packages."""
        if self.succeeds("image", "exists", BASE) and self.succeeds("image", "exists", REDIS):
            return
        root = self._folder / "root"
        shutil.rmtree(root, ignore_errors=True)
        self._run(
            ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)], 1200.0
        )
        (root / "usr" / "bin" / "python").symlink_to("python3")
        packed = self._folder / "root.tar"
        self._run(["tar", "--create", "--file", str(packed), "--directory", str(root), "."], 300.0)
        for name in (BASE, REDIS):
            self.podman("import", str(packed), name)
        packed.unlink()
        shutil.rmtree(root)

    def build(self, source: Path) -> None:
        """The CPU image of the tree at `source`; layers that are here already are taken."""
        mounts = [word for path in self._mounted() for word in ("--volume", f"{path}:{path}:ro")]
        pip = self._folder / "pip.conf"
        command = ["buildah", *self._stores, "bud", "--isolation", "chroot", "--network", "host", "--layers"]
        command += [
            *mounts,
            "--volume",
            f"{pip}:/etc/pip.conf:ro",
            "-f",
            str(source / "docker" / "Dockerfile.cpu"),
        ]
        self._run([*command, "--tag", IMAGE, str(source)], 3600.0)

    def _mounted(self) -> list[Path]:
        """Writes pip's configuration of this machine as a file; the files and folders that it names."""
        pip = [sys.executable, "-m", "pip", "config", "list"]
        said = subprocess.run(pip, check=True, capture_output=True, text=True).stdout
        settings: dict[str, str] = {}
        for line in said.splitlines():
            name, _, value = line.partition("=")
            settings[name.rpartition(".")[2]] = value.strip("'")
        written = configparser.ConfigParser(interpolation=None)
        written["global"] = {name: value for name, value in settings.items() if name != "constraint"}
        with (self._folder / "pip.conf").open("w") as file:
            written.write(file)
        words = " ".join(
            settings.get(name, "") for name in ("find-links", "index-url", "extra-index-url")
        ).split()
        folders = [Path(urlparse(word).path) for word in words if word.startswith(("/", "file:"))]
        roots = {path.parent if path.name == "simple" else path for path in folders}
        return sorted(path for path in roots | {CERTIFICATES} if path.exists())

    @contextlib.contextmanager
    def changed_copy(self, source: Path) -> Iterator[Path]:
        """The files that git knows in `source`, and one source changed."""
        with tempfile.TemporaryDirectory() as folder:
            names = self._run(["git", "-C", str(source), "ls-files", "-co", "--exclude-standard", "-z"], 60.0)
            for name in filter(None, names.split("\0")):
                if (source / name).is_file():
                    Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source / name, Path(folder, name))
            with Path(folder, "eyas", "__init__.py").open("a") as file:
                file.write("# changed\n")
            yield Path(folder)

    def _run(self, command: list[str], limit_s: float) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=limit_s)
        if done.returncode != 0:
            raise EngineError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        return done.stdout
