"""Pristine and patched sources of vLLM and vLLM-Omni, cached in `.cache/sources/`.

    from patches.sources import fetch_source, patched_source
    fetch_source("0.32.0")     # the Python files of vLLM 0.32.0 as released
    patched_source("0.32.0")   # the same with patches/0.32.0 applied

Either path goes on PYTHONPATH in front of an installed vLLM. Nothing of vLLM is committed here. Of vLLM-Omni 0.30.0
(`vllm-omni-0.30.0`) there is no source distribution: its wheel, which has no tests, takes its place.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from patches.series import ROOT, Series, release_of, title_of

CACHE = ROOT / ".cache" / "sources"

# The distributions as published: another file under the same name is an error.
SHA256 = {
    "0.22.1": "cd34902729f3767e3dfbb391956b2986bc638a54be9893e78bda9cc55669f15c",
    "0.28.0": "ac96dd0ec5be9c13f2aa4bfb50498c4727110406f6e4980b58a4097e4d18634a",
    "0.30.0": "5f8f4e890c042ffa1c3e103f81c35e2d96f60a0a175ac43a4adbae7006bef62b",
    "0.31.0": "dde46f1efbe846e5bd0c5c4ec6ec71842c42254c7ff3d9bebb2a57028715d380",
    "0.32.0": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "0.33.0": "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    "vllm-omni-0.30.0": "141cb0c7b9c07970e5c92a99aab9696e81682dbfa3d2bfcde359c3c1533385f4",
}
VERSIONS = tuple(SHA256)


class SourceError(RuntimeError):
    """A distribution could not be had, or is not the published one."""


def is_cached(version: str) -> bool:
    return _tree(version).is_dir()


def _tree(version: str) -> Path:
    return CACHE / "-".join(release_of(version))


def fetch_source(version: str) -> Path:
    """Return a release's pristine tree: its package, with `tests/` and pyproject.toml where distributed."""
    if version not in SHA256:
        raise SourceError(f"no {title_of(version)} here; known are {', '.join(VERSIONS)}")
    tree = _tree(version)
    if tree.is_dir():
        return tree
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        archive = _download(version, Path(scratch))
        _unpack(archive, version, Path(scratch) / "tree")
        _move_into_place(Path(scratch) / "tree", tree)
    return tree


def patched_source(version: str) -> Path:
    """Return the tree of `fetch_source` with the series of this version applied."""
    series = Series.read(version)
    tree = CACHE / f"{_tree(version).name}-patched-{series.digest()[:12]}"
    if tree.is_dir():
        return tree
    pristine = fetch_source(version)
    for outdated in CACHE.glob(f"{pristine.name}-patched-*"):
        shutil.rmtree(outdated)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        copy = Path(scratch) / "tree"
        # Hard links: 100 MB that are not copied. The touched files are replaced, never written through.
        shutil.copytree(pristine, copy, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__"))
        with tempfile.TemporaryDirectory() as outside:
            touched = series.copy_touched(pristine, Path(outside))
            series.apply(touched)
            for path in series.touched():
                (copy / path).unlink(missing_ok=True)
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(touched / path, copy / path)
        _move_into_place(copy, tree)
    return tree


def _download(version: str, folder: Path) -> Path:
    project, number = release_of(version)
    source = project == "vllm"
    # pip asks the package for its metadata, and that build only needs to know that nothing is to be compiled.
    env = os.environ | {
        "VLLM_VERSION_OVERRIDE": number,
        "VLLM_TARGET_DEVICE": "empty",
        "SETUPTOOLS_SCM_PRETEND_VERSION": number,
    }
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary" if source else "--only-binary", project]
    command += ["--no-build-isolation", "--dest", str(folder), f"{project}=={number}"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()
        raise SourceError(f"pip could not fetch the distribution of {title_of(version)}:\n" + "\n".join(reason[-8:]))
    name = f"{project.replace('-', '_')}-{number}"
    archive = folder / (f"{name}.tar.gz" if source else f"{name}-py3-none-any.whl")
    if not archive.is_file():
        raise SourceError(f"pip left no {archive.name}, but {sorted(p.name for p in folder.iterdir())}")
    with archive.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != SHA256[version]:
        raise SourceError(f"{archive.name} has SHA-256 {found}, the published one has {SHA256[version]}")
    return archive


def _unpack(archive: Path, version: str, tree: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(tree, [name for name in wheel.namelist() if ".dist-info/" not in name])
        return
    top = f"vllm-{version}/"
    with tarfile.open(archive) as tar:
        members = []
        for member in tar:
            name = member.name.removeprefix(top)
            if name.startswith(("vllm/", "tests/")) or name == "pyproject.toml":
                member.name = name
                members.append(member)
        tar.extractall(tree, members=members, filter="data")


def _move_into_place(new: Path, tree: Path) -> None:
    try:
        new.rename(tree)
    except OSError:
        if not tree.is_dir():  # else another process was faster, with the same content
            raise
