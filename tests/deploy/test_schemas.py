"""Check that Kubernetes, Compose and Docker accept the files in deploy/, by rendering them and by published schemas."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.prometheus import tool

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RELEASES = ("1.25", "1.31", "1.37")
OVERLAYS = ("gpu", "cpu")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    program = tool(str(command[0]))
    assert program is not None, f"{command[0]} is not installed: it is in dev/locks/omni.txt"
    return subprocess.run([program, *command[1:]], capture_output=True, text=True, check=False)


def rendered(folder: Path) -> list[dict[str, Any]]:
    """Return what ``kubectl apply -k`` would send to a cluster."""
    done = run("kubectl", "kustomize", folder)
    assert (done.returncode, done.stderr) == (0, "")
    return [*yaml.safe_load_all(done.stdout)]


@pytest.fixture(scope="module")
def overlays() -> dict[str, list[dict[str, Any]]]:
    return {name: rendered(DEPLOY / "kubernetes" / name) for name in OVERLAYS}


def only(kind: str, manifests: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_accepts_every_manifest(
    overlay: str, release: str, overlays: dict[str, list[dict[str, Any]]]
) -> None:
    kinds = [manifest["kind"] for manifest in overlays[overlay]]
    assert sorted(kinds) == ["ConfigMap", "Deployment", "PersistentVolumeClaim", "Service"]
    for manifest in overlays[overlay]:
        assert kubernetes_validate.validate(manifest, release, strict=True) == release


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_keeps_what_the_base_has(overlay: str, overlays: dict[str, list[dict[str, Any]]]) -> None:
    base = rendered(DEPLOY / "kubernetes" / "base")
    (before,) = only("Deployment", base)["spec"]["template"]["spec"]["containers"]
    pod = only("Deployment", overlays[overlay])["spec"]["template"]["spec"]
    (after,) = pod["containers"]
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed == {"image", "env", "resources"} | ({"securityContext"} if overlay == "cpu" else set())
    assert after["image"].startswith("registry.example.org/vllm-omni-sched:")
    names = {variable["name"] for variable in after["env"]}
    assert names > {variable["name"] for variable in before["env"]}
    assert after["securityContext"]["capabilities"]["drop"] == ["ALL"]
    options = only("ConfigMap", overlays[overlay])["metadata"]["name"]
    assert re.fullmatch(r"omni-sched-options-\w+", options)
    assert [v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v] == [options]


def test_each_overlay_reserves_its_device(overlays: dict[str, list[dict[str, Any]]]) -> None:
    resources = {
        name: only("Deployment", overlays[name])["spec"]["template"]["spec"]["containers"][0]["resources"]
        for name in OVERLAYS
    }
    assert resources["gpu"]["limits"]["nvidia.com/gpu"] == "1"
    assert resources["cpu"]["requests"] == resources["cpu"]["limits"]  # guaranteed, with processors of its own
    assert int(resources["cpu"]["limits"]["cpu"]) > 0


def test_the_monitoring_is_rendered() -> None:
    (monitor,) = rendered(DEPLOY / "kubernetes" / "monitoring")
    assert (monitor["kind"], monitor["apiVersion"]) == ("PodMonitor", "monitoring.coreos.com/v1")


def check(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_compose_accepts_its_files(tmp_path: Path) -> None:
    files = sorted(DEPLOY.glob("compose*.yaml"))
    assert len(files) == 3
    done = check("vendor.compose-spec", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DEPLOY / "compose.yaml").read_text().replace("shm_size", "shmsize"))
    assert "shmsize" in check("vendor.compose-spec", wrong).stdout


def test_hadolint_finds_nothing_in_the_image(tmp_path: Path) -> None:
    dockerfile = DEPLOY / "docker" / "Dockerfile"
    done = run("hadolint", dockerfile)
    assert (done.returncode, done.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text(dockerfile.read_text() + "RUN cd /tmp && apt-get install curl\n")
    assert "DL3008" in run("hadolint", tmp_path / "Dockerfile").stdout
