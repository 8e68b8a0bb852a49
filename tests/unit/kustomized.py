"""What `kubectl kustomize` makes of a folder of docker/kubernetes: resources, patched, in one namespace.

It does what these folders use, and fails on anything else. It refuses to know what a resource means.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "docker" / "kubernetes"
KUSTOMIZATION = "kustomization.yaml"

Resource = dict[str, Any]


def render(folder: Path) -> list[Resource]:
    """All resources of a kustomization, patched, in its namespace."""
    plan = _plan(folder)
    resources: list[Resource] = []
    for name in plan["resources"]:
        path = folder / name
        resources += render(path) if path.is_dir() else _documents(path)
    for patch in plan.get("patches", ()):
        for resource in resources:
            if named(resource) == (patch["target"]["kind"], patch["target"]["name"]):
                _patch(resource, _documents(folder / patch["path"])[0])
    for resource in resources:
        if resource["kind"] != "Namespace":
            resource["metadata"]["namespace"] = plan["namespace"]
    return resources


def files(folder: Path) -> Iterator[Path]:
    """The files that `render` reads."""
    plan = _plan(folder)
    yield folder / KUSTOMIZATION
    for name in plan["resources"]:
        path = (folder / name).resolve()
        yield from files(path) if path.is_dir() else [path]
    yield from (folder / patch["path"] for patch in plan.get("patches", ()))


def named(resource: Resource) -> tuple[str, str]:
    """Kind and name, which no two resources of a namespace share."""
    return resource["kind"], resource["metadata"]["name"]


def _plan(folder: Path) -> Resource:
    plan: Resource = _documents(folder / KUSTOMIZATION)[0]
    assert plan.keys() <= {"apiVersion", "kind", "namespace", "resources", "patches"}, folder
    return plan


def _documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def _patch(resource: Resource, steps: list[dict[str, Any]]) -> None:
    """JSON Patch, of which only `add` is here: to a list's end, or of a field that is not there."""
    for step in steps:
        assert step["op"] == "add", step
        *way, last = step["path"].strip("/").split("/")
        place: Any = resource
        for key in way:
            place = place[int(key) if isinstance(place, list) else key]
        if isinstance(place, list):
            assert last == "-", step
            place.append(step["value"])
        else:
            assert last not in place, step
            place[last] = step["value"]
