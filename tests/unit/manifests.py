"""A layout of docker/kubernetes: its resources, and its command lines as the parser of `eyas` reads them.

It knows how a Deployment holds a container. It refuses to know what is right.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kustomized import FOLDER, Resource, render

from eyas import cli
from eyas.common.config import GatewayConfig, WorkerConfig
from eyas.configuration import gateway_config, worker_config

POD_IP = "10.1.2.3"

Config = TypeVar("Config", WorkerConfig, GatewayConfig)


@dataclass(frozen=True)
class Service(Generic[Config]):
    """A Deployment that runs `eyas`, and what its command line means."""

    deployment: Resource
    config: Config

    @property
    def name(self) -> str:
        return str(self.deployment["metadata"]["name"])

    @property
    def pod(self) -> dict[str, Any]:
        found: dict[str, Any] = self.deployment["spec"]["template"]["spec"]
        return found

    @property
    def container(self) -> dict[str, Any]:
        """The only one."""
        found: list[dict[str, Any]] = self.pod["containers"]
        (only,) = found
        return only

    @property
    def ports(self) -> dict[str, int]:
        """By name."""
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def scraped(self) -> int:
        """The port that the annotations show to Prometheus."""
        annotations = self.deployment["spec"]["template"]["metadata"]["annotations"]
        assert annotations["prometheus.io/scrape"] == "true"
        assert annotations["prometheus.io/path"] == "/metrics"
        return int(annotations["prometheus.io/port"])

    @property
    def environment(self) -> dict[str, Any]:
        """Where the value of each variable comes from."""
        return {variable["name"]: variable["valueFrom"] for variable in self.container["env"]}


@dataclass(frozen=True)
class Stack:
    """One layout: all that Kubernetes would be told."""

    resources: list[Resource]
    redis: Resource
    gateway: Service[GatewayConfig]
    workers: list[Service[WorkerConfig]]

    @property
    def services(self) -> list[Service[GatewayConfig] | Service[WorkerConfig]]:
        return [self.gateway, *self.workers]

    def of_kind(self, kind: str) -> dict[str, Resource]:
        """By name."""
        return {r["metadata"]["name"]: r for r in self.resources if r["kind"] == kind}


@functools.cache
def stack_of(layout: str) -> Stack:
    """Parses the command lines as the containers would: a flag that is refused ends the test."""
    resources = render(FOLDER / layout)
    deployments = {r["metadata"]["name"]: r for r in resources if r["kind"] == "Deployment"}
    redis, gateway = deployments.pop("redis"), deployments.pop("gateway")
    door, parsed = parse(gateway), {name: parse(worker) for name, worker in deployments.items()}
    assert door.command == "gateway" and {args.command for args in parsed.values()} == {"worker"}
    return Stack(
        resources,
        redis,
        Service(gateway, gateway_config(door, door.registry)),
        [Service(deployments[name], worker_config(args)) for name, args in parsed.items()],
    )


def parse(deployment: Resource) -> Any:
    """The flags of a Deployment's only container."""
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return cli._parser().parse_args([word.replace("$(POD_IP)", POD_IP) for word in container["args"]])
