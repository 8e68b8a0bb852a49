"""docker/kubernetes without a cluster: Kubernetes's own schemas, and what schemas cannot know.

Command lines are parsed by the real parser; ports, probes, labels, metrics and limits must fit each other.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kustomized import FOLDER, Resource, files, named, render
from manifests import POD_IP, Stack, stack_of

from eyas.cluster.serve import GATEWAY_GRACE_S, WORKER_GRACE_S
from eyas.common.config import NANO, NANO_HEAD, EngineConfig
from eyas.common.security import api_keys
from eyas.worker.worker import START_S

DOCKER = FOLDER.parent
METRICS = DOCKER.parent / "docs" / "metrics.md"
LAYOUTS = ("split", "gpu", "gpu-split")
BESIDE = ("model", "monitoring", "inference")  # folders that go with any layout
VERSIONS = (
    "1.30",
    kubernetes_validate.latest_version(),
)  # the oldest that docker/README.md names; the newest
NAME = "app.kubernetes.io/name"
UNITS = {"Mi": 2**20, "Gi": 2**30}
CPU_START_S = 120


@pytest.fixture(params=LAYOUTS)
def stack(request: pytest.FixtureRequest) -> Stack:
    return stack_of(request.param)


# --- the schemas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(stack: Stack, version: str) -> None:
    for resource in stack.resources:
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize(("field", "value"), [("terminationGraceSeconds", 60), ("nodeSelector", "gpu")])
def test_the_schemas_refuse_what_they_do_not_know(field: str, value: object) -> None:
    wrong = copy.deepcopy(stack_of("split").gateway.deployment)
    wrong["spec"]["template"]["spec"][field] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_every_file_belongs_to_a_layout() -> None:
    read = {path for folder in (*LAYOUTS, *BESIDE) for path in files(FOLDER / folder)}
    assert read == set(FOLDER.rglob("*.yaml"))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("layout", [*LAYOUTS, *BESIDE])
def test_kubectl_renders_the_same(layout: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER / layout)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert sorted(yaml.safe_load_all(said), key=named) == sorted(render(FOLDER / layout), key=named)


# --- command lines, and what surrounds them --------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        ("split", {"prefill": ["prefill"], "decode": ["decode"], "draft": ["draft"]}),
        ("gpu", {"unified": ["prefill", "decode", "draft"]}),
        ("gpu-split", {"prefill": ["prefill"], "decode": ["decode", "draft"]}),
    ],
)
def test_a_workload_for_each_kind_of_worker(layout: str, roles: dict[str, list[str]]) -> None:
    assert {w.name: list(w.config.engine.roles) for w in stack_of(layout).workers} == roles


def test_workers_are_reached_where_they_listen(stack: Stack) -> None:
    for worker in stack.workers:
        assert worker.config.address == f"{POD_IP}:{worker.ports['grpc']}"
        assert worker.environment["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert worker.config.metrics_port == worker.ports["metrics"] == worker.scraped
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert worker.container[probe]["grpc"] == {"port": worker.config.port}


def test_the_gateway_is_reached_where_it_listens(stack: Stack) -> None:
    """It lives without workers, and is ready with them."""
    gateway = stack.gateway
    assert gateway.ports == {"http": gateway.config.port, "grpc": gateway.config.grpc_port}
    assert gateway.scraped == gateway.config.port
    assert gateway.container["readinessProbe"]["grpc"] == {"port": gateway.config.grpc_port}
    for probe in ("startupProbe", "livenessProbe"):
        assert gateway.container[probe]["httpGet"] == {"path": "/version", "port": "http"}


def test_everyone_finds_everyone_in_redis(stack: Stack) -> None:
    (port,) = stack.of_kind("Service")["redis"]["spec"]["ports"]
    assert {s.config.registry for s in stack.services} == {f"redis://redis:{port['port']}/0"}
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["redis"]
    (container,) = stack.redis["spec"]["template"]["spec"]["containers"]
    assert (container["image"], container["args"]) == (compose["image"], compose["command"])


def test_everyone_listens_on_the_pods_address_too(stack: Stack) -> None:
    assert {s.config.host for s in stack.services} == {"0.0.0.0"}


def test_a_pod_has_the_time_to_drain(stack: Stack) -> None:
    for worker in stack.workers:
        assert "lifecycle" not in worker.container  # no Service leads to it: it says itself that it drains
        assert worker.pod["terminationGracePeriodSeconds"] >= worker.config.drain_s + WORKER_GRACE_S
    gateway = stack.gateway
    before_s = gateway.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed_s = before_s + gateway.config.drain_s + GATEWAY_GRACE_S
    assert gateway.pod["terminationGracePeriodSeconds"] >= needed_s


def test_a_starting_worker_is_not_killed(stack: Stack) -> None:
    for worker in stack.workers:
        probe = worker.container["startupProbe"]
        needed_s = CPU_START_S if worker.config.engine.device == "cpu" else START_S
        assert probe["periodSeconds"] * probe["failureThreshold"] >= needed_s, worker.name


def test_the_roles_differ_in_nothing_else() -> None:
    prefill, *others = stack_of("split").workers
    for other in others:
        text = json.dumps(other.deployment).replace(other.name, prefill.name)
        assert json.loads(text) == prefill.deployment, other.name


def test_all_serve_one_model(stack: Stack) -> None:
    model = stack.gateway.config.model
    assert {w.config.engine.model for w in stack.workers} == {model}
    if model != str(NANO):
        for service in stack.services:
            (volume,) = (m for m in service.container["volumeMounts"] if m["name"] == "models")
            assert model.startswith(f"{volume['mountPath']}/") and volume["readOnly"], service.name


# --- selectors -------------------------------------------------------------------------------------------


def test_selectors_find_their_pods(stack: Stack) -> None:
    workloads = stack.of_kind("Deployment")
    labels = {name: w["spec"]["template"]["metadata"]["labels"] for name, w in workloads.items()}

    def selected(wanted: dict[str, str]) -> list[str]:
        return [name for name, has in labels.items() if wanted.items() <= has.items()]

    budgets = stack.of_kind("PodDisruptionBudget")
    for name, resource in [*workloads.items(), *budgets.items()]:
        assert selected(resource["spec"]["selector"]["matchLabels"]) == [name]
    for name, resource in stack.of_kind("Service").items():
        assert selected(resource["spec"]["selector"]) == [name]
        (container,) = workloads[name]["spec"]["template"]["spec"]["containers"]
        ports = {(port["name"], port["containerPort"]) for port in container["ports"]}
        assert {(port["targetPort"], port["port"]) for port in resource["spec"]["ports"]} == ports


def test_only_redis_has_neither_budget_nor_autoscaler(stack: Stack) -> None:
    scaled = stack.of_kind("HorizontalPodAutoscaler")
    others = {s.name for s in stack.services}
    assert stack.of_kind("PodDisruptionBudget").keys() == scaled.keys() == others
    for name, resource in scaled.items():
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name}
        assert resource["spec"]["scaleTargetRef"] == target
    for service in stack.services:  # a number would undo the autoscaler's at each `kubectl apply`
        assert "replicas" not in service.deployment["spec"]


def test_only_the_services_reach_workers_and_redis(stack: Stack) -> None:
    policies = {name: r["spec"] for name, r in stack.of_kind("NetworkPolicy").items()}
    assert policies.pop("nothing-else") == {"podSelector": {}, "policyTypes": ["Ingress"]}
    applied = {p["podSelector"]["matchLabels"][NAME]: p["ingress"] for p in policies.values()}
    pods = {w["spec"]["template"]["metadata"]["labels"][NAME] for w in stack.of_kind("Deployment").values()}
    assert applied.keys() == pods
    inside = {"key": NAME, "operator": "In", "values": sorted(pods - {"redis"})}
    from_services = [{"podSelector": {"matchExpressions": [inside]}}]
    from_prometheus = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    for worker in stack.workers:
        assert applied["eyas-worker"] == [
            {"from": from_services, "ports": [{"protocol": "TCP", "port": worker.config.port}]},
            {"from": from_prometheus, "ports": [{"protocol": "TCP", "port": worker.config.metrics_port}]},
        ]
    assert applied["redis"] == [{"from": from_services, "ports": [{"protocol": "TCP", "port": 6379}]}]
    ports = [stack.gateway.config.port, stack.gateway.config.grpc_port]
    assert applied["eyas-gateway"] == [{"ports": [{"protocol": "TCP", "port": port} for port in ports]}]


# --- scaling, memory, GPUs -------------------------------------------------------------------------------


def gauges(heading: str) -> set[str]:
    """Those of one table of docs/metrics.md; an autoscaler compares a gauge's mean over pods."""
    section = METRICS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `(\w+)` \| gauge \|", section, re.MULTILINE))


def targets(autoscaler: Resource) -> dict[str, int]:
    """By metric."""
    assert 1 <= autoscaler["spec"]["minReplicas"] < autoscaler["spec"]["maxReplicas"]
    pods = [metric["pods"] for metric in autoscaler["spec"]["metrics"]]
    return {metric["metric"]["name"]: int(metric["target"]["averageValue"]) for metric in pods}


def test_autoscalers_follow_what_is_exported(stack: Stack) -> None:
    autoscalers = stack.of_kind("HorizontalPodAutoscaler")
    assert targets(autoscalers["gateway"]).keys() <= gauges("Gateway")
    for worker in stack.workers:
        wanted, engine = targets(autoscalers[worker.name]), worker.config.engine
        assert wanted.keys() <= gauges("Workers")
        assert wanted.get("eyas_requests_running", 0) < engine.max_running  # or it would never be passed
        assert wanted.get("eyas_requests_waiting", 0) < engine.max_waiting
        assert wanted.get("eyas_kv_pages_used", 0) < (engine.num_pages or 1)


def amount(text: str) -> int:
    """Bytes."""
    return int(text[:-2]) * UNITS[text[-2:]]


def pool_bytes(engine: EngineConfig) -> int:
    """The KV pools of the embedded model and its head, and a page more of each for proofs."""
    assert engine.num_pages is not None and engine.dtype == "float32"
    row = 0
    for folder in (NANO, NANO_HEAD):
        model = json.loads((folder / "config.json").read_text())
        row += 2 * 4 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
    return int((engine.num_pages + 1) * engine.page_size * row)


def test_pools_fit_into_shared_memory(stack: Stack) -> None:
    for worker in stack.workers:
        mounted = {mount["mountPath"]: mount["name"] for mount in worker.container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in worker.pod["volumes"]}
        shared = volumes[mounted[worker.config.engine.pool_dir]]["emptyDir"]
        assert shared["medium"] == "Memory"
        assert amount(shared["sizeLimit"]) < amount(worker.container["resources"]["limits"]["memory"])
        if worker.config.engine.device == "cpu":
            assert amount(shared["sizeLimit"]) >= pool_bytes(worker.config.engine)


def test_a_restarted_engine_has_another_process_id(stack: Stack) -> None:
    """By which it sees that the pools of a killed one have no owner, and removes them."""
    assert all(worker.pod["shareProcessNamespace"] is True for worker in stack.workers)


def test_a_pod_has_the_gpus_of_its_group(stack: Stack) -> None:
    assert stack.gateway.container["image"] == "eyas:cpu"
    for worker in stack.workers:
        engine = worker.config.engine
        on_gpu = engine.device == "cuda"
        gpus = int(worker.container["resources"]["limits"].get("nvidia.com/gpu", 0))
        assert gpus == (engine.tensor_parallel_size if on_gpu else 0)
        assert worker.container["image"] == ("eyas:gpu" if on_gpu else "eyas:cpu")


# --- secrets and rights ----------------------------------------------------------------------------------


def test_keys_come_from_a_secret(stack: Stack) -> None:
    """Which the manifests do not have: a key in them would be known to all who read them."""
    assert not stack.of_kind("Secret")
    assert stack.gateway.config.api_keys == ()
    assert stack.gateway.environment[api_keys.VARIABLE].keys() == {"secretKeyRef"}
    assert all(api_keys.VARIABLE not in worker.environment for worker in stack.workers)


def test_every_pod_is_restricted(stack: Stack) -> None:
    """As the namespace demands."""
    labels = stack.of_kind("Namespace")["eyas"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for deployment in stack.of_kind("Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_pods_run_as_the_user_of_the_image(kind: str) -> None:
    text = (DOCKER / f"Dockerfile.{kind}").read_text()
    (user,) = re.findall(r"^USER (\d+):\1$", text, re.MULTILINE)
    assert f"useradd --create-home --uid {user} eyas" in text
    for service in (s for layout in LAYOUTS for s in stack_of(layout).services):
        if service.container["image"] == f"eyas:{kind}":
            rights = service.pod["securityContext"]
            assert (rights["runAsUser"], rights["runAsGroup"]) == (int(user), int(user)), service.name


def test_every_image_has_a_tag(stack: Stack) -> None:
    for deployment in stack.of_kind("Deployment").values():
        for container in deployment["spec"]["template"]["spec"]["containers"]:
            name, _, tag = container["image"].rpartition(":")
            assert name and tag != "latest" and "/" not in tag, container["image"]


# --- what goes with any layout ---------------------------------------------------------------------------


def beside(folder: str) -> dict[tuple[str, str], Resource]:
    """By kind and name."""
    return {named(resource): resource for resource in render(FOLDER / folder)}


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field_of_the_fetch(version: str) -> None:
    for resource in beside("model").values():
        kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("layout", ["gpu", "gpu-split"])
def test_the_model_is_fetched_to_where_it_is_read(layout: str) -> None:
    fetched = beside("model")
    pod = fetched["Job", "fetch-model"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (place,) = (word.split("=")[1] for word in container["args"] if word.startswith("--local-dir="))
    (claim,) = (v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if v["name"] == "models")
    assert ("PersistentVolumeClaim", claim) in fetched
    stack = stack_of(layout)
    assert stack.gateway.config.model == place
    for service in stack.services:
        (volume,) = (v for v in service.pod["volumes"] if v["name"] == "models")
        assert volume["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
    assert {worker.config.engine.model for worker in stack.workers} == {place}
    worker = stack.workers[0]
    assert pod["securityContext"] == worker.pod["securityContext"]  # of the same user, who may read it
    assert container["securityContext"] == worker.container["securityContext"]


def test_hf_takes_the_fetch() -> None:
    """The image has `hf`, as transformers needs its package; its own parser reads the job's words."""
    (container,) = beside("model")["Job", "fetch-model"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["hf"] and container["image"] == "eyas:cpu"
    flags = {word.split("=")[0] for word in container["args"] if word.startswith("--")}
    said = subprocess.run(
        [Path(sys.executable).with_name("hf"), "download", "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ) | {"COLUMNS": "200", "TERM": "dumb"},
    ).stdout
    assert all(flag in said for flag in flags), said


def test_prometheus_finds_the_pods(stack: Stack) -> None:
    """Its operator knows these fields; the jobs have the names that alerts and dashboard ask for."""
    monitors = beside("monitoring")
    services = {"eyas-worker": stack.workers, "eyas-gateway": [stack.gateway]}
    assert monitors.keys() == {("PodMonitor", name) for name in services}
    for (_, name), monitor in monitors.items():
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        spec = monitor["spec"]
        assert spec["selector"] == {"matchLabels": {NAME: name}} and spec["jobLabel"] == NAME
        (endpoint,) = spec["podMetricsEndpoints"]
        assert endpoint.keys() <= {"port", "path", "interval", "authorization"}
        for service in services[name]:
            assert service.deployment["spec"]["template"]["metadata"]["labels"][NAME] == name
            assert service.ports[endpoint["port"]] == service.scraped


def test_an_inference_pool_has_the_gateways(stack: Stack) -> None:
    resources = beside("inference")
    pool = resources["InferencePool", "eyas"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    assert pool["spec"].keys() == {"selector", "targetPorts", "endpointPickerRef"}
    labels = stack.gateway.deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pool["spec"]["targetPorts"] == [{"number": stack.gateway.config.port}]
    assert pool["spec"]["endpointPickerRef"]["failureMode"] == "FailOpen"
    (rule,) = resources["HTTPRoute", "eyas"]["spec"]["rules"]
    assert rule["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "eyas"}
    ]
