"""docker/monitoring: dashboards and alerts ask for figures that exist, of jobs that are scraped."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docker" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana" / "eyas.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"][0]["rules"]
SCRAPED = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
ROW = re.compile(r"^\| `(eyas_\w+)` \| (\w+) \| ([^|]*) \|", re.MULTILINE)
HISTOGRAM = ("_bucket", "_sum", "_count")


def exported() -> dict[str, set[str]]:
    """Every series' name with its own labels. docs/metrics.md is what the processes export, by a test."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in ROW.findall((ROOT / "docs" / "metrics.md").read_text()):
        for end in HISTOGRAM if kind == "histogram" else ("",):
            found.setdefault(name + end, set()).update(labels.replace(",", " ").split())
    return found


EXPRESSIONS = {
    **{f"{panel['title']}: {t['refId']}": t["expr"] for panel in PANELS for t in panel["targets"]},
    **{rule["alert"]: rule["expr"] for rule in RULES},
}


@pytest.mark.parametrize("title", EXPRESSIONS)
def test_what_is_asked_for_is_exported(title: str) -> None:
    expression, series = EXPRESSIONS[title], exported()
    names = set(re.findall(r"\beyas_\w+", expression))
    assert names or "up{" in expression
    assert names <= series.keys()
    known = {"job", "instance", "le", "model_name"}.union(*(series[name] for name in names))
    told = re.findall(r"(\w+)=~?\"", expression)
    told += [
        label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")
    ]
    assert set(told) <= known
    assert expression.count("(") == expression.count(")")


def test_jobs_are_those_that_are_scraped() -> None:
    jobs = {scrape["job_name"] for scrape in SCRAPED}
    asked = set(re.findall(r'job="([\w-]+)"', " ".join(EXPRESSIONS.values())))
    assert asked == jobs


def test_every_service_is_scraped_where_it_listens() -> None:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    flags = {"gateway": "--port", "worker": "--metrics-port"}
    pages = set()
    for name, service in services.items():
        words = service.get("command", [])
        kind = service.get("entrypoint", [""])[-1]
        if kind in flags:
            pages.add(f"{name}:{words[words.index(flags[kind]) + 1]}")
    fixed = {t for scrape in SCRAPED for s in scrape.get("static_configs", ()) for t in s["targets"]}
    named = [s for scrape in SCRAPED for s in scrape.get("dns_sd_configs", ())]
    assert fixed | {f"{name}:{s['port']}" for s in named for name in s["names"]} == pages


def test_panels_are_explained_and_do_not_overlap() -> None:
    assert all(panel["description"] and panel["title"] for panel in PANELS)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for one, other in itertools.combinations((panel["gridPos"] for panel in DASHBOARD["panels"]), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_alerts_say_what_is_wrong() -> None:
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "warn") and rule["annotations"]["summary"]


def test_what_is_mounted_exists() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for service in services.values():
        for volume in service["volumes"]:  # paths count from the first compose file's folder
            assert (ROOT / "docker" / volume.split(":")[0]).is_file(), volume
