"""The archives of a release stand alone: they build from each other, install offline, and say who they are."""

from __future__ import annotations

import email
import email.message
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from patches.sources import SourceError, fetch_source
from vllm_omni_sched import __version__

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://example.org/team/vllm-omni-sched"
NAME = f"vllm_omni_sched-{__version__}"
ENVIRONMENTS = {".venv": Path(sys.executable), ".venv-latest": ROOT / ".venv-latest" / "bin" / "python"}


def run(command: list[str | Path], folder: Path, **variables: str) -> str:
    """Run in a folder that is not the checkout; return what was printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VLLM_OMNI_SCHED_URL")}
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=kept | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, sources: Path, to: Path, **variables: str) -> Path:
    before = set(to.glob("*"))
    run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", to], sources, **variables)
    (made,) = set(to.glob("*")) - before
    return made


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, built with the address of a repository, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("release")
    source = build("sdist", ROOT, folder, VLLM_OMNI_SCHED_URL=ADDRESS)
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (folder / "wheel").mkdir()
    return source, build("wheel", folder / "unpacked" / NAME, folder / "wheel")


@pytest.fixture(scope="module")
def installed(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
    run([*pip, "--target", folder / "packages", archives[1]], folder)
    return folder / "packages"


def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))


def test_the_archives_are_named_after_the_version_of_the_package(archives: tuple[Path, Path]) -> None:
    source, wheel = archives
    assert source.name == f"{NAME}.tar.gz"
    assert wheel.name == f"{NAME}-py3-none-any.whl"


def test_the_description_leads_to_the_repository_from_anywhere(archives: tuple[Path, Path]) -> None:
    described = metadata(archives[1])
    text = described.get_payload()
    assert described["Description-Content-Type"] == "text/markdown"
    assert f"]({ADDRESS}/blob/v{__version__}/docs/stages.md)" in text
    assert f"]({ADDRESS}/raw/v{__version__}/benchmarks/results/" in text  # the picture
    assert "](docs/" not in text
    assert "](benchmarks/" not in text
    urls = dict(entry.split(", ") for entry in described.get_all("Project-URL"))
    assert urls["Repository"] == ADDRESS
    assert urls["Changelog"] == f"{ADDRESS}/blob/v{__version__}/CHANGELOG.md"


def test_without_an_address_nothing_leads_nowhere(tmp_path: Path) -> None:
    described = metadata(build("wheel", ROOT, tmp_path))
    text = described.get_payload()
    assert described.get_all("Project-URL") is None
    assert "](" not in text
    assert "Profiles lists" in text  # the words of a link stay


def test_the_metadata_names_what_an_index_sorts_by(archives: tuple[Path, Path]) -> None:
    described = metadata(archives[1])
    assert described["Version"] == __version__
    assert described["License-Expression"] == "Apache-2.0"
    assert described["Requires-Python"] == ">=3.10"
    assert "Operating System :: POSIX :: Linux" in described.get_all("Classifier")
    requirements = [entry for entry in described.get_all("Requires-Dist") if "extra ==" not in entry]
    assert not any(entry.startswith("vllm") for entry in requirements)  # the user has the build of his machine


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_the_installed_wheel_runs_by_itself(installed: Path, environment: str, tmp_path: Path) -> None:
    python, variables = ENVIRONMENTS[environment], {"PYTHONPATH": str(installed)}
    where = run([python, "-P", "-c", "import vllm_omni_sched; print(vllm_omni_sched.__file__)"], tmp_path, **variables)
    assert Path(where.strip()).is_relative_to(installed)
    script = installed / "bin" / "vllm-omni-sched"
    for command in ([python, "-P", script], [python, "-P", "-m", "vllm_omni_sched"]):
        assert run([*command, "--version"], tmp_path, **variables) == f"vllm-omni-sched {__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize("environment", [".venv", pytest.param(".venv-latest", marks=pytest.mark.long)])
def test_doctor_of_the_installed_wheel_finds_vllm_and_its_plugin(
    installed: Path, environment: str, tmp_path: Path
) -> None:
    variables = {"PYTHONPATH": str(installed), "HOME": str(tmp_path)}
    command = [ENVIRONMENTS[environment], "-P", "-m", "vllm_omni_sched", "doctor", "--json"]
    found = json.loads(run(command, tmp_path, **variables))
    versions = {entry["name"]: entry["version"] for entry in found["versions"]}
    assert versions["vllm-omni-sched"] == __version__
    assert found["problems"] == []
    plugin = (
        "from importlib.metadata import distribution as d; found = d('vllm-omni-sched'); print(found.locate_file('')); "
        "print(*(point.value for point in found.entry_points if point.group == 'vllm.general_plugins'))"
    )
    place, loaded = run([ENVIRONMENTS[environment], "-P", "-c", plugin], tmp_path, **variables).splitlines()
    assert (Path(place), loaded) == (installed, "vllm_omni_sched.plugin:register")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.22.1", "0.31.0", "0.32.0"])
def test_doctor_of_the_installed_wheel_accepts_every_other_supported_vllm(
    installed: Path, version: str, tmp_path: Path
) -> None:
    """The Python files of these versions are laid over an environment that has another version's dependencies."""
    try:
        source = fetch_source(version)
    except SourceError as error:
        pytest.skip(str(error))
    (tmp_path / "vllm").symlink_to(source / "vllm", target_is_directory=True)
    (tmp_path / "vllm.dist-info").mkdir()
    distribution = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (tmp_path / "vllm.dist-info" / "METADATA").write_text(distribution)
    path = os.pathsep.join([str(installed), str(tmp_path)])
    command = [sys.executable, "-P", "-m", "vllm_omni_sched", "doctor", "--json"]
    found = json.loads(run(command, tmp_path, PYTHONPATH=path, HOME=str(tmp_path)))
    versions = {entry["name"]: entry["version"] for entry in found["versions"]}
    assert versions["vllm"].split("+")[0] == version
    assert found["problems"] == []
