"""The files in deploy/ agree with each other and with the package: names, ports, versions, options, probes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.prometheus import tool
from vllm_omni_sched import __version__
from vllm_omni_sched.compat.versions import is_supported
from vllm_omni_sched.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
MANIFESTS = sorted(path for path in DEPLOY.rglob("*.y*ml"))
IMAGE = re.compile(r"^[a-z0-9./-]+:v?\d+\.\d+\.\d+(-[a-z]+)?$")
VLLM_IMAGE = re.compile(r"vllm/[a-z-]+:v([\d.]+)")
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def pod_of(deployment: dict[str, Any]) -> dict[str, Any]:
    return deployment["spec"]["template"]["spec"]


def kustomized(folder: Path) -> list[dict[str, Any]]:
    """Return the manifests that a kustomization names, with those of the folders that it names."""
    found = []
    for name in read(folder / "kustomization.yaml")["resources"]:
        path = (folder / name).resolve()
        found += kustomized(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    return found


def one(kind: str, folder: Path = KUBERNETES / "base") -> dict[str, Any]:
    (found,) = [manifest for manifest in kustomized(folder) if manifest["kind"] == kind]
    return found


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    return pod_of(one("Deployment"))


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read(DEPLOY / "compose.yaml")


def test_every_manifest_of_kubernetes_is_used() -> None:
    used = set()
    for path in KUBERNETES.rglob("kustomization.yaml"):
        kustomization = read(path)
        files = [*kustomization["resources"], *(patch["path"] for patch in kustomization.get("patches", ()))]
        files += [file for made in kustomization.get("configMapGenerator", ()) for file in made["files"]]
        assert all((path.parent / file).exists() for file in files), files
        used |= {path, *((path.parent / file).resolve() for file in files)}
    assert {path for path in MANIFESTS if path.is_relative_to(KUBERNETES)} <= used


def test_names_and_labels_and_ports_agree(pod: dict[str, Any], container: dict[str, Any]) -> None:
    deployment, service, claim = one("Deployment"), one("Service"), one("PersistentVolumeClaim")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    monitored = one("PodMonitor", KUBERNETES / "monitoring")
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
        monitored["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000}
    named = [port["targetPort"] for port in service["spec"]["ports"]]
    named += [endpoint["port"] for endpoint in monitored["spec"]["podMetricsEndpoints"]]
    named += [container[probe]["httpGet"]["port"] for probe in PROBES]
    assert set(named) == set(ports)
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [claim["metadata"]["name"]]
    generated = {made["name"] for made in read(KUBERNETES / "base" / "kustomization.yaml")["configMapGenerator"]}
    assert {v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v} == generated
    assert {v["name"] for v in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}


def test_a_slow_start_is_not_a_death_and_a_death_is_noticed(container: dict[str, Any]) -> None:
    assert {container[probe]["httpGet"]["path"] for probe in PROBES} == {"/health"}
    start, live = container["startupProbe"], container["livenessProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 1800
    assert live["periodSeconds"] * live["failureThreshold"] <= 120
    assert all(container[probe]["timeoutSeconds"] >= 5 for probe in PROBES)


def test_the_server_has_resources_and_no_rights(pod: dict[str, Any], container: dict[str, Any]) -> None:
    assert set(container["resources"]) == {"requests", "limits"}
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert pod["automountServiceAccountToken"] is False
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    in_memory = [v["name"] for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
    assert [mounted[name] for name in in_memory] == ["/dev/shm"]
    assert all("sizeLimit" in v["emptyDir"] for v in pod["volumes"] if "emptyDir" in v)
    stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert stop < pod["terminationGracePeriodSeconds"]


def test_every_image_is_pinned_to_a_release(compose: dict[str, Any], container: dict[str, Any]) -> None:
    images = [service["image"] for service in compose["services"].values()]
    images += [read(DEPLOY / "compose.cpu.yaml")["services"]["server"]["image"], container["image"]]
    assert [image for image in images if not IMAGE.match(image)] == []
    ours = [image.split(":")[1] for image in images if image.startswith("vllm-omni-sched:")]
    assert sorted(ours) == [__version__, __version__, f"{__version__}-cpu"]


def test_images_of_vllm_are_of_versions_that_this_package_supports() -> None:
    named = "".join(path.read_text() for path in (*MANIFESTS, DEPLOY / "docker" / "Dockerfile"))
    versions = VLLM_IMAGE.findall(named)
    assert len(versions) >= 4
    assert [version for version in versions if not is_supported(version)] == []
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert set(re.findall(r"^FROM (\S+)", dockerfile, re.MULTILINE)) == {"${VLLM_IMAGE}"}


def test_the_image_gets_all_that_a_wheel_is_built_from() -> None:
    kept = re.findall(r"^!(\S+)$", (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    project = (ROOT / "pyproject.toml").read_text()
    needed = {"pyproject.toml", "hatch_build.py", "README.md", "vllm_omni_sched"}
    needed |= set(re.findall(r'^license-files = \["(\w+)"\]', project, re.MULTILINE))
    assert needed == set(kept)


def _given(arguments: list[str]) -> dict[str, str]:
    return dict(zip(arguments[1::2], arguments[2::2], strict=True))


@pytest.mark.parametrize("of", ["compose", "kubernetes"])
def test_the_server_starts_with_options_that_are_valid(
    of: str, compose: dict[str, Any], container: dict[str, Any]
) -> None:
    if of == "compose":
        arguments, file = compose["services"]["server"]["command"], DEPLOY / "omni_sched.yaml"
        places = [mount.split(":")[1] for mount in compose["services"]["server"]["volumes"]]
    else:
        arguments, file = container["args"], KUBERNETES / "base" / "omni_sched.yaml"
        places = [f"{mount['mountPath']}/{file.name}" for mount in container["volumeMounts"]]
    given = _given(arguments)
    assert given["--scheduler-cls"] == "vllm_omni_sched.OmniScheduler"
    (key, place), *others = json.loads(given["--additional-config"]).items()
    assert (key, others) == ("omni_sched", [])
    assert place in places
    assert load_config({key: str(file)}).profile.value == "chat"


def test_compose_mounts_files_that_exist_and_publishes_to_this_host_alone(compose: dict[str, Any]) -> None:
    volumes = compose["volumes"]
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert source in volumes or (DEPLOY / source).exists(), source
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert (DEPLOY / compose["services"]["server"]["build"]["context"]).resolve() == ROOT
    assert (ROOT / compose["services"]["server"]["build"]["dockerfile"]).is_file()
    for overlay in ("gpu", "cpu"):
        assert set(read(DEPLOY / f"compose.{overlay}.yaml")["services"]) <= set(compose["services"])


def test_prometheus_and_grafana_find_each_other_and_the_server(compose: dict[str, Any]) -> None:
    ports = {name: service["ports"][0].rsplit(":", 1)[1] for name, service in compose["services"].items()}
    config = read(DEPLOY / "prometheus" / "prometheus.yml")
    assert [target for job in config["scrape_configs"] for s in job["static_configs"] for target in s["targets"]] == [
        f"server:{ports['server']}"
    ]
    (alertmanager,) = config["alerting"]["alertmanagers"]
    assert alertmanager == {"static_configs": [{"targets": [f"alertmanager:{ports['alertmanager']}"]}]}
    provisioned = DEPLOY / "grafana" / "provisioning"
    (source,) = read(provisioned / "datasources" / "prometheus.yaml")["datasources"]
    assert source["url"] == f"http://prometheus:{ports['prometheus']}"
    (provider,) = read(provisioned / "dashboards" / "dashboards.yaml")["providers"]
    mounts = dict(mount.split(":")[:2] for mount in compose["services"]["grafana"]["volumes"])
    assert provider["options"]["path"] == mounts["../docs/dashboards"]


@pytest.mark.skipif(tool("promtool") is None, reason="no promtool: put `promtool` on PATH")
@pytest.mark.parametrize("name", ["prometheus.yml", "local.yml"])
def test_prometheus_accepts_its_configuration(name: str) -> None:
    config = DEPLOY / "prometheus" / name
    done = subprocess.run([tool("promtool"), "check", "config", config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_reaches_somebody(compose: dict[str, Any]) -> None:
    config = read(DEPLOY / "alertmanager" / "alertmanager.yml")
    (mounted,) = [m for m in compose["services"]["alertmanager"]["volumes"] if m.startswith("./")]
    assert mounted.split(":")[:2] == ["./alertmanager/alertmanager.yml", "/etc/alertmanager/alertmanager.yml"]
    receivers = {receiver.pop("name"): receiver for receiver in config["receivers"]}
    assert all(any(receiver.values()) for receiver in receivers.values())
    rules = [rule for group in read(DEPLOY / "prometheus" / "alerts.yaml")["groups"] for rule in group["rules"]]
    named = {rule["alert"] for rule in rules}
    of_severity = {}
    for severity in {rule["labels"]["severity"] for rule in rules}:
        matching = [one for one in config["route"]["routes"] if one["matchers"] == [f'severity = "{severity}"']]
        of_severity[severity] = (matching or [config["route"]])[0]["receiver"]
    assert of_severity == {"critical": "somebody-on-call", "warning": "tickets"}
    assert set(of_severity.values()) == set(receivers)
    for rule in config["inhibit_rules"]:
        (source,) = rule["source_matchers"]
        assert re.fullmatch(r'alertname = "(\w+)"', source)[1] in named


def test_the_rules_can_be_given_to_the_operator() -> None:
    program = DEPLOY / "prometheus" / "as_resource.py"

    def printed(address: str) -> Any:
        variables = os.environ | {"VLLM_OMNI_SCHED_URL": address}
        command = [sys.executable, program]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=variables).stdout)

    links = re.findall(r"https://[^#\s\"]+", json.dumps(printed("https://git.example.com/ours/")))
    assert set(links) == {"https://git.example.com/ours/blob/main/docs/runbook.md"}
    resource = printed("")
    assert resource["kind"] == "PrometheusRule"
    assert resource["spec"] == read(DEPLOY / "prometheus" / "alerts.yaml")
